"""Which samples ranks train on: every one of the data, whatever dp and accumulation are."""

from __future__ import annotations

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict


def samples_of_steps(tables, folder, num_steps):
    """The numbers of this rank's samples in each step."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        seen = []
        for _ in range(num_steps):
            run.step()
            seen.append(run.feed.samples)
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "num_micros"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_no_sample_is_dropped_or_doubled(ranks, small, own, size, num_micros):
    """An epoch that is no multiple of a step's samples goes on in the next; none is short."""
    tables = small(data__options={"num_samples": 10}, batch__global_size=size * num_micros)
    by_rank = ranks(size)(samples_of_steps, tables, own, 20 // (size * num_micros))
    seen = [sample for step in zip(*by_rank, strict=True) for rank in step for sample in rank]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert all(len(rank) == num_micros for step in by_rank for rank in step)


def test_a_stream_without_length(ranks, small, own):
    """Its samples are dealt to the ranks in its order."""
    by_rank = ranks(2)(samples_of_steps, small(data__factory="dp_parts:Stream"), own, 3)
    assert by_rank == [[(0, 1), (4, 5), (8, 9)], [(2, 3), (6, 7), (10, 11)]]
