"""What is leased for tokens, of which micro-batches may have any number, comes from a few buffers."""

from __future__ import annotations

from typing import Any

import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.data.dataset import IGNORED
from sley_core.plan.load import plan_from_dict
from sley_isp.config import SlotsConfig
from sley_isp.pools import Slots
from sley_isp.tokens import Room

CPU = torch.device("cpu")


def test_one_size_is_leased_as_it_is():
    pool = Slots(SlotsConfig())
    room = Room(pool)
    for _ in range(3):
        with room.lease((5, 3), torch.float64, CPU) as tensor:
            assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == ((5, 3), torch.float64, True)
    assert (pool.num_allocations, pool.num_bytes) == (1, 5 * 3 * 8)


def test_two_at_once_do_not_overlap():
    room = Room(Slots(SlotsConfig()))
    with room.lease((4,), torch.float32, CPU) as one, room.lease((3,), torch.float32, CPU) as other:
        assert one.data_ptr() != other.data_ptr()


def allocations(tables: dict[str, Any], folder: Any, lengths: list[int]) -> tuple[int, int]:
    """Of steps of one micro-batch each, of these lengths."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for length in lengths:
            tokens = torch.arange(2 * length).view(2, length) % 4
            labels = tokens.roll(-1, 1)
            labels[:, -1] = IGNORED
            run.step([{"tokens": tokens, "labels": labels}])
        pool = run.stepper.executor.weights.pool
        return pool.num_allocations, pool.num_lent


def test_lengths_that_vary(ranks, sharded, texts, own):
    """The head's input gradients of 15 lengths: no more than the powers of two among them ask for."""
    tables = sharded(
        2,
        weights={"head": "vocabulary"},
        model={"factory": "scored:layers"},
        data={"factory": "scored:Labelled"},
        batch={"global_size": 4, "micro_size": 2},
    )
    lengths = list(range(4, 33, 2))
    fixed = ranks(2, 40)(allocations, tables, texts, [3] * 3)
    for (few, _), (found, lent) in zip(fixed, ranks(2, 40)(allocations, tables, texts, lengths), strict=True):
        assert found - few <= 4
        assert lent == 0
