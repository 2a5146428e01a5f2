"""Tables that are cut by columns change no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import assert_parity, record, same_on_all

HIDDEN = {"embedding": "hidden"}
FOREIGN = {"data": {"factory": "isp_parts:Points"}, "loss": {"factory": "isp_parts:Squares"}}
LOOKED_UP = FOREIGN | {"evaluation": {"every": 9, "steps": 1}}
SPLIT = {"sequence": {"use": "isp.all_to_all"}, "parallel": {"sp": 2}}


def a_model(**options: Any) -> dict[str, Any]:
    return {"model": {"factory": "looked_up:layers", "options": options}}


def test_every_rank_looks_up_its_columns(parities):
    """Of four micro-batches; with a head whose vocabulary is shared, and where gradients go once per step."""
    parities(2, [(2, 2, {"batch__micro_size": 1})], HIDDEN)
    parities(2, [(2, 1, SPLIT)], HIDDEN | {"head": "vocabulary", "reduce": "step"})


@pytest.mark.campaign
def test_of_two_micro_batches(parities):
    parities(2, [(2, 2, {})], HIDDEN)
    parities(2, [(2, 2, {})], HIDDEN | {"head": "vocabulary", "reduce": "step"})


@pytest.mark.campaign
def test_modules_without_overlap_and_by_sockets(parities):
    apart = {"parallel": {"cross_memory_attach": False}}
    parities(2, [(2, 2, {}), (2, 2, apart)], HIDDEN | {"overlap": False, "unit": "module"})
    parities(2, [(2, 2, apart)], HIDDEN)


def test_tables_of_uneven_width_that_are_read_twice(parities, own):
    """Three columns and two; of four ranks one has none; padding, positions, a table in two layers."""
    again = {"activations": {"use": "core.recompute", "fraction": 1.0}}
    parities(2, [(2, 2, a_model() | again)], HIDDEN, **LOOKED_UP)
    parities(4, [(4, 4, a_model())], HIDDEN, **LOOKED_UP)


@pytest.mark.parametrize("frozen", ["again", pytest.param("embed", marks=pytest.mark.campaign)])
def test_frozen_tables(parities, own, frozen):
    """A table that is not trained has no backward; the layers behind it have theirs."""
    parities(2, [(2, 2, a_model(frozen=frozen))], HIDDEN, **LOOKED_UP)


@pytest.mark.campaign
def test_copies_of_shards(parities):
    """Two copies of two shards, whose gradients the reducer sums over `wdp`; with sequences in two, one process more."""
    parities(4, [(2, 4, {}), (2, 2, SPLIT)], HIDDEN)


@pytest.mark.campaign
@pytest.mark.parametrize("unit", ["layer", "module"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("head", ["gather", "vocabulary"])
def test_options_together(parities, unit, fraction, head):
    again = {"activations": {"use": "core.recompute", "fraction": fraction}}
    cases = [(2, 4, again), (4, 4, again), (4, 2, again | SPLIT), (2, 2, again | SPLIT | {"data__documents": "cut"})]
    for reduce in ("micro_batch", "step"):
        parities(4, cases, HIDDEN | {"unit": unit, "head": head, "reduce": reduce}, batch__micro_size=1)


def test_single_precision(ranks, texts, sharded):
    changes = {"precision__compute": "fp32"}
    reference = record(sharded(1, 1, **changes), 3, folder=texts)
    assert_parity(reference, ranks(2)(record, sharded(2, weights=HIDDEN, **changes), 3, folder=texts), "fp32")


@pytest.mark.parametrize("model", [{}, {"model": {"factory": "isp_parts:autocast"}, **FOREIGN}])
def test_half_precision(ranks, texts, sharded, own, model):
    """In bf16 storage, and in a model that computes in bf16 by itself."""
    changes = model or {"precision__compute": "bf16"}
    reference = record(sharded(1, 1, **changes), 1, folder=texts)
    for layout in ranks(2)(record, sharded(2, weights=HIDDEN, **changes), 1, folder=texts):
        assert_close_gradients(reference.gradients[0], layout.gradients[0], 2**-7)
        assert layout.rows[0]["loss"] == pytest.approx(reference.rows[0]["loss"], rel=2**-7)


def batches(num_steps: int) -> list[list[dict[str, torch.Tensor]]]:
    """Micro-batches of one sample of every length: at the same time, ranks have unequal ones."""
    found = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        micros = []
        for length in (5, 8, 7, 3, 2, 2, 1, 6):
            tokens = torch.randint(11, (1, length), generator=generator)
            y = torch.randn(1, length, 6, generator=generator, dtype=torch.float64)
            micros.append({"tokens": tokens, "y": y})
        found.append(micros)
    return found


def test_unequal_numbers_of_tokens(ranks, texts, sharded, own):
    """What one rank has more than another is padded where they meet; the padding row's gradient stays zero."""
    changes = LOOKED_UP | a_model() | {"batch": {"global_size": 8, "micro_size": 1}}
    reference = record(sharded(1, 1, **changes), 3, folder=texts, batches=batches(3))
    layouts = ranks(2)(record, sharded(2, weights=HIDDEN, **changes), 3, folder=texts, batches=batches(3))
    assert_parity(reference, layouts, "fp64")
    same_on_all(layouts)
    assert not layouts[0].gradients[0]["embed.positions.weight"][8:].any(), "no sample is as long"


VARIANTS: dict[str, dict[str, Any]] = {
    "not overlapped": {"overlap": False},
    "by module": {"unit": "module"},
    "far ahead": {"ahead": 3},
    "not ahead": {"ahead": 0},
    "by sockets": {},
}


def all_recorded(plans: dict[str, Any], folder: Any) -> dict[str, Any]:
    return {name: record(tables, 3, folder=folder) for name, tables in plans.items()}


@pytest.mark.campaign
def test_no_option_changes_a_bit(ranks, texts, sharded):
    """fp32, three steps on three ranks, of which the last has four columns and two of padding."""
    changes = {"precision__compute": "fp32", "batch": {"global_size": 6, "micro_size": 1}}
    changes["evaluation"] = {"every": 100, "steps": 1}
    plans = {"": sharded(3, weights=HIDDEN, **changes)}
    for name, options in VARIANTS.items():
        apart = {"parallel": {"cross_memory_attach": name != "by sockets"}}
        plans[name] = sharded(3, weights=HIDDEN | options, **changes, **apart)
    for found in ranks(3, 120)(all_recorded, plans, texts):
        wanted = found.pop("")
        for name, other in found.items():
            assert [row["loss"] for row in other.rows] == [row["loss"] for row in wanted.rows], name
            assert_same_bits(wanted.weights, other.weights)
