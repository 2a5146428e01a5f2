"""Replicas start equal: others are refused before the first step, or given the first one's values."""

from __future__ import annotations

import pytest

from sley_core.errors import RunError
from sley_testing.parity import assert_same_bits
from sley_testing.runs import record, same_on_all


def test_other_values_on_every_rank_become_those_of_the_first(ranks, small, own):
    """Where the plan says so: parameters and buffers, whatever their format, saved or not, contiguous or not."""
    tables = small({"start": "broadcast"}, model__factory="dp_parts:own_values")
    (alone,) = ranks(1)(record, tables, 0, folder=own)
    for rank in ranks(3)(record, tables | {"batch": {"global_size": 6, "micro_size": 1}}, 1, folder=own):
        assert len(rank.first) == 8
        assert_same_bits(alone.first, rank.first)


def test_other_values_are_refused_by_name(ranks, small, own):
    """On every rank, before the first step, as `core.each` does."""
    tables = small(model__factory="dp_parts:own_values")
    with pytest.raises(RunError) as caught:
        ranks(2)(record, tables, 1, folder=own)
    (found,) = caught.value.diagnostics
    assert found.code == "ranks-differ"
    assert "first values differ between rank 0 and rank 1: first.bias, first.weight, last.bias and 5 more" in found.message


def test_neither_changes_a_bit_of_equal_values(ranks, small, own):
    tables = [small({"start": start}, model__factory="dp_parts:tables") for start in ("check", "broadcast")]
    checked, told = (ranks(2)(record, one, 2, folder=own) for one in tables)
    same_on_all([*checked, *told])
    assert_same_bits(checked[0].first, told[1].first)
