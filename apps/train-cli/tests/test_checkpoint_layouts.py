"""A checkpoint is the same run in every layout: what one wrote, any other goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from sley_checkpoint.reader import read
from sley_core.weight_files.read import WeightFiles
from sley_testing.checkpointer_contract import Stretch, assert_goes_on, assert_same_stretch, stretch
from sley_testing.plans import Tables, changed, small_plan

PLAN = small_plan(
    run__steps=4,
    model__num_layers=2,
    model__ffn_hidden=27,
    model__vocab_size=257,
    model__tie_embeddings=True,
    learning_rate={"use": "core.cosine"},
)
"""257 tokens and 27 channels divide by no number of ranks: shards are padded."""

BUCKETED = [{"use": "dp.bucketed", "bucket_mb": 0.01}]
SHARDED = [{"use": "dp.sharded", "bucket_mb": 0.01}]
OVER_WP = {"use": "isp.communicator"}

LAYOUTS: dict[str, tuple[int, Tables]] = {
    "alone": (1, {}),
    "dp 2": (2, {"parallel": {"dp": 2}, "gradient_handlers": BUCKETED}),
    "sharded 2": (2, {"parallel": {"dp": 2}, "gradient_handlers": SHARDED}),
    "pp 2": (2, {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.one_f_one_b"}}),
    "interleaved": (2, {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.interleaved"}}),
    "wp 2": (2, {"parallel": {"dp": 2, "wp": 2}, "weights": OVER_WP}),
    "wp 2 x wdp 2, sharded": (4, {"parallel": {"dp": 4, "wp": 2}, "weights": OVER_WP, "gradient_handlers": SHARDED}),
    "pp 2 x dp 2, sharded": (
        4,
        {
            "parallel": {"pp": 2, "dp": 2},
            "pipeline": {"use": "pp.one_f_one_b"},
            "gradient_handlers": [*SHARDED, {"use": "pp.shared_modules"}],
        },
    ),
    "wp 2 x sp 2": (2, {"parallel": {"dp": 1, "sp": 2, "wp": 2}, "weights": OVER_WP, "sequence": {"use": "isp.all_to_all"}}),
}


def plan(layout: str, **changes: Any) -> Tables:
    return changed(PLAN, **LAYOUTS[layout][1], **changes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["sharded 2", "wp 2"])
def test_torch_puts_the_pieces_of_a_layout_together(texts: Path, tmp_path: Path, ranks: Any, layout: str) -> None:
    """Its reader and its consolidation, of tensors that are cut in the middle of rows, or padded in memory.

    Of numbers without dims, as an optimizer's count of steps, the consolidation of torch 2.13 writes zeros.
    """
    world = LAYOUTS[layout][0]
    ranks(world)(stretch, plan(layout), 1, folder=texts, save=tmp_path / "saved")
    wanted = read(tmp_path / "saved")
    assert any(len(facts.pieces) > 1 for facts in wanted.index.tensors.values()), "or else nothing would be shown"
    state = {name: torch.zeros_like(wanted[name]) for name in wanted}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "saved")), no_dist=True)
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    (tmp_path / "whole").mkdir()
    files = {name: 1 + number % 2 for number, name in enumerate(wanted)}
    consolidate_safetensors_files(str(tmp_path / "saved"), str(tmp_path / "whole"), files)
    found = WeightFiles(tmp_path / "whole")
    assert set(found.names) == set(wanted)
    assert all(torch.equal(found.tensor(name), wanted[name]) for name in wanted if wanted.facts(name).shape)


def stopped_and_not(tables: Tables, texts: Path, path: Path) -> list[Stretch]:
    """Takes four steps; then two, with a checkpoint; then two from there."""
    whole = stretch(tables, 4, folder=texts)
    return [whole, stretch(tables, 2, folder=texts, save=path), stretch(tables, 2, folder=texts, load=path)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [*list(LAYOUTS)[::-1]])
def test_the_same_layout_goes_on_bit_for_bit(ranks, texts, tmp_path, layout):
    tables = plan(layout, precision={"compute": "bf16", "gradients": "bf16"})
    every = ranks(LAYOUTS[layout][0], 120)(stopped_and_not, tables, texts, tmp_path / "saved")
    assert_same_stretch([rank[0] for rank in every], [rank[2] for rank in every])


def others(layouts: list[Tables], texts: Path, path: Path) -> list[Stretch]:
    """Two steps from a checkpoint, in each of these layouts, one after the other in the same ranks."""
    return [stretch(tables, 2, folder=texts, load=path) for tables in layouts]


SAMPLE = ("sharded 2", "wp 2 x wdp 2, sharded")
"""Of those whose checkpoints are read in other layouts in every run of the tests; the others in the campaign."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("written", "num_others"),
    [(name, 1) for name in SAMPLE] + [pytest.param(name, 2, marks=pytest.mark.campaign) for name in LAYOUTS],
)
def test_another_layout_goes_on_within_parity(ranks, texts, tmp_path, written, num_others):
    """As many layouts of each number of ranks go on from it."""
    (whole,) = ranks(1).once(stretch, plan("alone"), 4, folder=texts)
    size = LAYOUTS[written][0]
    ranks(size, 120)(stretch, plan(written), 2, folder=texts, save=tmp_path / "saved")
    for size in (1, 2, 4):
        found = [name for name, (world, _) in LAYOUTS.items() if world == size and name != written]
        chosen = found[(list(LAYOUTS).index(written)) % len(found) :][:num_others] if found else []
        every = ranks(size, 120)(others, [plan(name) for name in chosen], texts, tmp_path / "saved")
        for at in range(len(chosen)):
            assert_goes_on(whole, [one[at] for one in every], "fp64")
