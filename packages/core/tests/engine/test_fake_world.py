"""Every rank of a large world is assembled in this process by the code that runs, without memory for a parameter."""

from __future__ import annotations

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict

PLAN = {
    "run": {"name": "fake", "steps": 1},
    "model": {"use": "models.llama", "num_layers": 4, "hidden": 1024, "heads": 8},
    "data": {"use": "data.text", "source": "python-stdlib", "sequence": 64},
    "batch": {"global_size": 256, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 1e-3},
}


@pytest.mark.parametrize("size", [16])
def test_assemble_for_every_rank(size):
    tables = set()
    for rank in range(size):
        with World.fake(rank, size) as world, assemble(plan_from_dict(PLAN), world) as run:
            assert run.registry.num_parameters > 50_000_000
            assert all(param.parameter.is_meta for param in run.registry)
            assert all(buffer.data.is_meta for buffer in run.store.buffers)
            assert run.rows == slice(256 // size * rank, 256 // size * (rank + 1))
            assert run.groups["stage"].ranks == tuple(range(size))
            tables.add(tuple((axis, group.size, tuple(group.lanes)) for axis, group in run.groups.items()))
    assert len(tables) == 1


def test_a_fake_world_leaves_no_default_group_behind():
    with World.fake(0, 4):
        assert torch.distributed.get_world_size() == 4
    assert not torch.distributed.is_initialized()


def test_sizes_that_do_not_fit_are_refused_before_anything_is_made():
    with World.fake(0, 3) as world, pytest.raises(Exception, match="256 is no multiple of 3 x 2"):
        assemble(plan_from_dict(PLAN), world)
