"""Replicas start equal: the first one's values are given to all, or compared."""

from __future__ import annotations

import pytest
import torch

from sley_core.errors import RunError
from sley_core.testing.parity import assert_same_bits
from sley_core.testing.runs import record, same_on_all
from sley_dp.replicas import CHUNK_ELEMENTS, fingerprint


def test_other_values_on_every_rank_become_those_of_the_first(ranks, small, own):
    """Statement 3 (D11): parameters and buffers, whatever their format, saved or not, contiguous or not."""
    tables = small(model__factory="dp_parts:own_values")
    (alone,) = ranks(1)(record, tables, 0, folder=own)
    for rank in ranks(3)(record, tables | {"batch": {"global_size": 6, "micro_size": 1}}, 0, folder=own):
        assert len(rank.first) == 8
        assert_same_bits(alone.first, rank.first)


def test_trust_leaves_them_as_they_are(ranks, small, own):
    """The start's other forms are shown to matter: without one, replicas differ."""
    tables = small({"start": "trust"}, model__factory="dp_parts:own_values")
    first, second = ranks(2)(record, tables, 0, folder=own)
    for name in first.first:
        assert not torch.equal(first.first[name], second.first[name]), name


@pytest.mark.parametrize("handler", [{"start": "check"}, {"use": "dp.powersgd", "start": "check"}])
def test_check_names_what_differs(ranks, small, own, handler):
    """Statement 3: with `start = "check"` other values are an error on every rank, before the first step."""
    tables = small(handler, model__factory="dp_parts:own_values")
    with pytest.raises(RunError) as caught:
        ranks(2)(record, tables, 0, folder=own)
    (found,) = caught.value.diagnostics
    assert found.code == "replicas-differ"
    assert found.message == "replicas do not start equal: first.weight, first.bias, last.weight and 5 more"


def test_check_passes_equal_values_and_changes_no_bit(ranks, small, own):
    """And so does a broadcast: equal seeds give equal replicas without it."""
    tables = [small({"start": start}, model__factory="dp_parts:tables") for start in ("check", "broadcast", "trust")]
    checked, told, trusted = (ranks(2)(record, one, 2, folder=own) for one in tables)
    same_on_all([*checked, *told, *trusted])
    assert_same_bits(checked[0].first, trusted[1].first)


def test_a_fingerprint_sees_values_and_places():
    """Over more than one chunk; equal values in other memory have the same."""
    values = torch.randn(CHUNK_ELEMENTS // 4 + 100, generator=torch.Generator().manual_seed(0))
    swapped = values.clone()
    swapped[[0, -1]] = swapped[[-1, 0]]
    changed = values.clone()
    changed[-1] = -changed[-1]
    assert fingerprint(values) == fingerprint(values.clone())
    assert len({int(fingerprint(value)) for value in (values, swapped, changed)}) == 3
    assert fingerprint(values.view(-1, 4)[:, :2]) == fingerprint(values.view(-1, 4)[:, :2].clone())
