"""Collects what the parts of one rank's run have counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.errors import dotted
from sley_core.memory.run_memory import CountsOf
from sley_core.protocols import Counts, Keeps

if TYPE_CHECKING:
    from sley_core.engine.parts import Pools
    from sley_core.engine.stepper import Stepper
    from sley_core.memory.run_memory import RunMemory
    from sley_core.plan.plan import Component, Plan


def counts_of(plan: Plan, stepper: Stepper, pools: Pools, memory: RunMemory) -> dict[str, dict[str, float]]:
    """Returns the counts of the run's parts that implement `protocols.Counts`, and of its offload managers, by their names
    in the plan.

    A name that the plan lists twice is followed by its number.
    """
    parts = [*parts_of(plan, stepper), *zip(plan.offload, map(CountsOf, memory.managers), strict=True)]
    found: dict[str, dict[str, float]] = {}
    for component, part in parts:
        if component is not None and isinstance(part, Counts):
            same = sum(name.split(" ")[0] == component.name for name in found)
            found[f"{component.name} {same + 1}" if same else component.name] = dict(part.counts())
    return found | {name: dict(pool.counts()) for name, pool in pools.labels().items() if isinstance(pool, Counts)}


def parts_of(plan: Plan, stepper: Stepper) -> list[tuple[Component | None, object]]:
    """Returns pairs of the plan's component that made a live part of a run (None if the plan has no such
    table) and that part.
    """
    return [
        (plan.weights, stepper.executor.weights),
        (plan.link, stepper.executor.crossing.link),
        *zip(plan.gradient_handlers, stepper.handlers, strict=True),
        *zip(plan.scheduler_hooks, stepper.executor.hooks, strict=False),
        (plan.activations, stepper.executor.caller.policy),
    ]


def keepers_of(plan: Plan, stepper: Stepper) -> dict[str, Keeps]:
    """Returns those parts that keep something for a checkpoint, by their place: `gradient_handlers.0 dp.powersgd`."""
    found: dict[str, Keeps] = {}
    for component, part in parts_of(plan, stepper):
        if component is not None and isinstance(part, Keeps):
            found[f"{dotted(component.path)} {component.name}"] = part
    return found
