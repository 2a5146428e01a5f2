"""A training that moves its memory between all steps, on a device that reorders its copies."""

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from parking import state_digest

from sley_core.api.memory import Where
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_memory.movers import HostCopyMover
from sley_testing.drawn_copies import DrawnDevice
from sley_testing.plans import Tables
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

NUM_STEPS = 3


def train_digest(tables: Tables, folder: Path, order: int | None = None) -> str:
    """Returns a digest of this rank's weights, buffers, master weights and optimizer states after three steps.

    order: the seed of the order of copies and of the moves between steps, or None for a plain CPU without moves.
    """
    if order is None:
        return _train(tables, folder, None, random.Random())
    takes_more = random.Random(order).random() < 0.5  # all ranks alike
    rank = dist.get_rank() if dist.is_initialized() else 0
    draw = random.Random(f"{order} {rank}")  # ranks need not make the same moves
    device = DrawnDevice(copy_seed=random.Random(f"{order} {rank}").randrange(2**31))
    with device.watching():
        found = _train(tables, folder, device, draw, takes_more=takes_more)
        gc.collect()  # the run, and with it host memory whose copies nobody may have waited for
    return found


def _train(tables: Tables, folder: Path, device: DrawnDevice | None, draw: random.Random, *, takes_more: bool = False) -> str:
    plan = plan_from_dict(tables, folder)
    with World.join(device or "cpu") as world, assemble(plan, world) as run:
        masters = run.stepper.update.masters
        for _, master in masters.named_tensors() if device and masters.device else ():
            device.mark_host_memory(master)
        for number in range(NUM_STEPS):
            if device is not None and number:
                move(run, draw)
            run.step()
        found = state_digest(run)
        if takes_more:
            run.step()
        elif device is not None:
            run.memory.offload()  # and close while it leaves
        return found


def move(run: Run, draw: random.Random) -> None:
    """Offloads some parts or all, and onloads them, once or twice. Sometimes waits for it."""
    parts = [part for manager in run.memory.managers for part in manager.parts]
    for _ in range(draw.choice((1, 1, 2))):
        chosen = draw.sample(parts, draw.randint(1, len(parts))) if draw.random() < 0.5 else []
        for moves in (run.memory.offload, run.memory.onload):
            moved = moves(*chosen)
            if draw.random() < 0.3:
                moved.wait()
                read_on_host(run)
            if draw.random() < 0.3:
                assert set(run.memory.where) >= set(parts)  # asks the streams


def read_on_host(run: Run) -> None:
    """Reads offloaded memory on the host, as a program may after it has waited."""
    for manager in run.memory.managers:
        for part in manager.parts:
            mover = getattr(manager, "_movers", {}).get(part)
            if isinstance(mover, HostCopyMover) and run.memory.where[part] is Where.AWAY:
                for host in mover._host_memory.values():
                    host.sum()


def train_digests(plain: Tables, moving: Tables, folder: Path, orders: range) -> tuple[str, list[str]]:
    """Returns the digest without offload, and those with offload in each of `orders`, on the same ranks."""
    return train_digest(plain, folder), [train_digest(moving, folder, order) for order in orders]


@pytest.fixture
def train() -> Callable[..., str]:
    """`train(tables, folder, order)` calls `train_digest`."""
    return train_digest


@pytest.fixture
def train_all() -> Callable[..., tuple[str, list[str]]]:
    """Returns `train_digests`, for `ranks`."""
    return train_digests
