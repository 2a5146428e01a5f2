"""Shards of any size cover the whole once, along either dim, and padding is zero."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sley_core.engine.shards import Shard


@given(st.integers(1, 9), st.integers(1, 6), st.lists(st.integers(1, 3), max_size=2), st.integers(0, 2))
def test_shards_cover_the_whole_once(length, count, rest, dim):
    dim = min(dim, len(rest))
    shape = (*rest[:dim], length, *rest[dim:])
    whole = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    shards = [Shard(shape, count, index, dim) for index in range(count)]
    cuts = [shard.cut(whole) for shard in shards]
    assert {tuple(cut.shape) for cut in cuts} == {shards[0].own_shape}, "alike on every rank"
    assert all(cut.is_contiguous() for cut in cuts)
    assert torch.equal(torch.cat(cuts, dim).narrow(dim, 0, length), whole)
    assert sum(shard.own_size for shard in shards) == length
    assert sum(cut.numel() - shard.padding for cut, shard in zip(cuts, shards, strict=True)) == whole.numel()
    assert all(
        not cut.narrow(dim, shard.own_size, shard.size - shard.own_size).any() for cut, shard in zip(cuts, shards, strict=True)
    )
    joined = shards[0].joined(torch.stack(cuts))
    assert torch.equal(joined, whole)
    assert joined.is_contiguous()
