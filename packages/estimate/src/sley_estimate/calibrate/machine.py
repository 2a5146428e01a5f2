"""Measures a machine and returns its file: the device and its host, links where several ranks measure, the layers of a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sley_core.process import keep_freed_memory
from sley_estimate.calibrate.device import measure_device
from sley_estimate.calibrate.engine import measure_engine
from sley_estimate.calibrate.host import measure_host
from sley_estimate.calibrate.layers import measure_variants
from sley_estimate.calibrate.links import measure_links
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.machine.tables import MACHINE_FORMAT

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.plan.plan import Plan
    from sley_estimate.machine.tables import MachineFile

BUDGET_S = 50.0
"""Of a calibration, so that the command takes a minute, unless the plan's own layers alone take longer."""


def measure(
    world: World,
    plan: Plan | None,
    timeout_s: float,
    budget_s: float = BUDGET_S,
    leave_out: Callable[[Sequence[str]], None] = lambda variants: None,
) -> MachineFile | None:
    """Measures the machine and returns it on rank 0 of `world`, None on others; a collective of a world of several ranks, which
    measures links.

    The device and its layers are measured by rank 0 alone, once the others have nothing more to do; but on CPUs, where ranks
    share memory and caches in a run, by all ranks at once. On CPUs the process keeps memory that is freed from then on, unless
    the plan says not to. plan: whose layers are timed; None for none. budget_s: once it is over, no other variant of the plan's
    layers is begun; ranks ask their own clocks, so that some may time one layer more. leave_out: called on rank 0 with words
    for each variant that was left out.
    """
    until_s = time.monotonic() + budget_s
    if world.device.type == "cpu" and (plan is None or plan.run.keep_freed_memory):
        keep_freed_memory()  # as a run does: else layers and copies pay for pages that a run has
    links = measure_links(world, timeout_s) if world.size > 1 else None
    together = world.size > 1 and world.device.type == "cpu"

    def alone() -> dict[str, Any]:
        """Measures device, host, engine and the plan's layers on this rank; returns their tables, and the variants
        that were left out.
        """
        found: dict[str, Any] = {"device": measure_device(world.device), "host": measure_host(world.device)}
        if world.device.is_async:
            found["engine"] = measure_engine(world.device, plan)
        if plan is not None:
            found["layers"], found["left out"] = measure_variants(plan, world.device, until_s)
        return found

    tables: dict[str, Any] = {"format": MACHINE_FORMAT}
    if together or world.rank == 0:
        tables |= world.on_all(alone, "measure its device and layers") if together else alone()
    if world.rank != 0:
        return None
    leave_out(tables.pop("left out", ()))
    if links is not None:
        tables["links"] = links
    return machine_from_dict(tables)
