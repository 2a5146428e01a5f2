"""The second of the three checks: the plan's own code, the model and the optimizer, on meta, before a process starts."""

from __future__ import annotations

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.plan import Plan


def check_model(plan: Plan, world: int) -> None:
    """Assembles rank 0 of `world` ranks in a fake world: the same code as in a run, without memory or peers.

    Raises PlanError or PluginError as `assemble` does, and whatever the plan's own code raises.
    """
    with World.fake(0, world) as fake:
        assemble(plan, fake).close()
