"""Measures a machine and returns its file: the device, its links where several ranks measure, and the layers of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sley_core.estimate.calibrate.device import measure_device, measure_host
from sley_core.estimate.calibrate.layers import check_whole_sequences, measure_layers
from sley_core.estimate.calibrate.links import measure_links
from sley_core.estimate.machine.read import machine_from_dict
from sley_core.estimate.machine.tables import MACHINE_FORMAT

if TYPE_CHECKING:
    from sley_core.comm.world import World
    from sley_core.estimate.machine.tables import MachineFile
    from sley_core.plan.plan import Plan


def measure(world: World, plan: Plan | None, timeout_s: float) -> MachineFile | None:
    """Returns the machine on rank 0 of `world`, None on others; a collective of a world of several ranks, which measures links.

    The device is measured by rank 0 alone, once the others have nothing more to do; layers too, but on CPUs, where ranks share
    memory and caches in a run, all ranks time them at once. Raises PlanError `calibrate-sequence`, on all ranks and before
    anything is measured, for a plan with `sp`.
    """
    if plan is not None:
        check_whole_sequences(plan)
    links = measure_links(world, timeout_s) if world.size > 1 else None
    together = world.size > 1 and world.device.type == "cpu"
    layers = measure_layers(plan, world.device) if plan is not None and (world.rank == 0 or together) else None
    if layers is not None and together:
        dist.barrier()  # all ranks have timed layers, and come here once
    if world.rank != 0:
        return None
    tables: dict[str, Any] = {"format": MACHINE_FORMAT, "device": measure_device(world.device)}
    if links is not None:
        tables["links"] = links
    if (host := measure_host(world.device)) is not None:
        tables["host"] = host
    if layers is not None:
        tables["layers"] = layers
    return machine_from_dict(tables)
