"""Measures a machine and returns its file: the device, its links where several ranks measure, and the layers of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sley_core.comm.malloc import keep_freed_memory
from sley_core.estimate.calibrate.device import measure_device
from sley_core.estimate.calibrate.host import measure_host
from sley_core.estimate.calibrate.layers import measure_layers
from sley_core.estimate.calibrate.links import measure_links
from sley_core.estimate.machine.read import machine_from_dict
from sley_core.estimate.machine.tables import MACHINE_FORMAT

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.estimate.machine.tables import MachineFile
    from sley_core.plan.plan import Plan


def measure(world: World, plan: Plan | None, timeout_s: float) -> MachineFile | None:
    """Returns the machine on rank 0 of `world`, None on others; a collective of a world of several ranks, which measures links.

    The device and its layers are measured by rank 0 alone, once the others have nothing more to do; but on CPUs, where ranks
    share memory and caches in a run, by all ranks at once.
    """
    if world.device.type == "cpu" and (plan is None or plan.run.keep_freed_memory):
        keep_freed_memory()  # as a run does: else layers and copies pay for pages that a run has
    links = measure_links(world, timeout_s) if world.size > 1 else None
    together = world.size > 1 and world.device.type == "cpu"

    def alone() -> dict[str, Any]:
        found: dict[str, Any] = {"device": measure_device(world.device), "host": measure_host(world.device)}
        return found | ({} if plan is None else {"layers": measure_layers(plan, world.device)})

    tables: dict[str, Any] = {"format": MACHINE_FORMAT}
    if together or world.rank == 0:
        tables |= world.on_all(alone, "measure its device and layers") if together else alone()
    if world.rank != 0:
        return None
    if links is not None:
        tables["links"] = links
    return machine_from_dict(tables)
