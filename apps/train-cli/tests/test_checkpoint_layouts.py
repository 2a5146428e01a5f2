"""A checkpoint is the same run in every layout: what one wrote, any other goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sley_core.testing.plans import Tables, changed, small_plan
from sley_core.testing.resumed import Stretch, assert_goes_on, assert_same_stretch, stretch

for plugin in ("sley_dp", "sley_isp", "sley_pp"):
    pytest.importorskip(plugin)

PLAN = small_plan(
    run__steps=6,
    model__num_layers=4,
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
    "wp 2 x sp 2": (
        2,
        {"parallel": {"dp": 1, "sp": 2, "wp": 2}, "weights": OVER_WP, "sequence": {"use": "isp.all_to_all"}},
    ),
}


def plan(layout: str, **changes: Any) -> Tables:
    return changed(PLAN, **LAYOUTS[layout][1], **changes)


def stopped_and_not(tables: Tables, texts: Path, path: Path) -> list[Stretch]:
    """Six steps; then three, with a checkpoint; then three from there."""
    whole = stretch(tables, 6, folder=texts)
    return [whole, stretch(tables, 3, folder=texts, save=path), stretch(tables, 3, folder=texts, load=path)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_goes_on_bit_for_bit(ranks, texts, tmp_path, layout, precision):
    tables = plan(layout, precision__compute=precision)
    every = ranks(LAYOUTS[layout][0], 120)(stopped_and_not, tables, texts, tmp_path / "saved")
    assert_same_stretch([one[0] for one in every], [one[2] for one in every])


def others(layouts: list[Tables], texts: Path, path: Path) -> list[Stretch]:
    """Three steps from a checkpoint, in each of these layouts, one after the other in the same ranks."""
    return [stretch(tables, 3, folder=texts, load=path) for tables in layouts]


SAMPLE = ("alone", "sharded 2", "wp 2 x wdp 2, sharded")
"""Of those whose checkpoints are read in other layouts in every run of the tests; the others in the campaign."""


@pytest.mark.parametrize(
    "written", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.campaign) for name in LAYOUTS]
)
def test_another_layout_goes_on_within_parity(ranks, texts, tmp_path, written):
    """Two layouts of each number of ranks go on from it."""
    whole = stretch(plan("alone"), 6, folder=texts)
    size = LAYOUTS[written][0]
    ranks(size, 120)(stretch, plan(written), 3, folder=texts, save=tmp_path / "saved")
    for size in (1, 2, 4):
        found = [name for name, (world, _) in LAYOUTS.items() if world == size and name != written]
        chosen = found[(list(LAYOUTS).index(written)) % len(found) :][:2] if found else []
        every = ranks(size, 120)(others, [plan(name) for name in chosen], texts, tmp_path / "saved")
        for at in range(len(chosen)):
            assert_goes_on(whole, [one[at] for one in every], "fp64")
