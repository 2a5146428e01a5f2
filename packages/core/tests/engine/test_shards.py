"""Shards of any size cover the whole once, and padding is zero."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sley_core.engine.shards import Shard


@given(st.integers(1, 9), st.integers(1, 6), st.lists(st.integers(1, 3), max_size=2))
def test_shards_cover_the_whole_once(rows, count, rest):
    shape = (rows, *rest)
    whole = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    shards = [Shard(shape, count, index) for index in range(count)]
    cuts = [shard.cut(whole) for shard in shards]
    assert {tuple(cut.shape) for cut in cuts} == {(shards[0].rows, *rest)}, "alike on every rank"
    assert torch.equal(torch.cat(cuts)[:rows], whole)
    assert sum(shard.own_rows for shard in shards) == rows
    assert sum(cut.numel() - shard.padding for cut, shard in zip(cuts, shards, strict=True)) == whole.numel()
    assert all(not cut[shard.own_rows :].any() for cut, shard in zip(cuts, shards, strict=True))
