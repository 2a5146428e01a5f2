"""`fake_world`: group maths for any world in one process, and nothing of it left."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


def test_groups_of_64_ranks_in_one_process(fake_world):
    for rank in range(64):
        with fake_world(rank, 64):
            groups = [dist.new_group(range(first, first + 8)) for first in range(0, 64, 8)]
            mine = groups[rank // 8]
            assert (dist.get_rank(), dist.get_world_size()) == (rank, 64)
            assert (dist.get_rank(mine), dist.get_world_size(mine)) == (rank % 8, 8)
            assert dist.get_process_group_ranks(mine) == list(range(rank // 8 * 8, rank // 8 * 8 + 8))


def test_collectives_do_not_wait_for_anyone_also_on_meta(fake_world):
    with fake_world(3, 64):
        dist.barrier()
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.empty(4, device="meta"), async_op=True).wait()
        dist.recv(torch.ones(4), src=9)


def test_a_failure_inside_leaves_no_group_and_the_next_world_starts_anew(fake_world):
    with pytest.raises(ValueError, match="inside"), fake_world(0, 2):
        raise ValueError("inside")
    assert not dist.is_initialized()
    with fake_world(1, 3):
        assert dist.get_world_size() == 3
