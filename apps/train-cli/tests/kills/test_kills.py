"""A run that is killed at random moments and continued ends with the numbers of the run that nobody disturbed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import End, end, kill_anywhere, kill_in_a_save, live, start, undisturbed

from sley_testing.plans import Tables, changed, small_plan, write_texts

STEPS = 12
PLAN = small_plan(
    run={"name": "killed", "steps": STEPS, "device": "cpu", "seed": 7, "log_every": 100},
    model__num_layers=2,
    model__heads=2,
    model__kv_heads=None,
    data__sequence=16,
    batch={"global_size": 4, "micro_size": 1},
    optimizer__clip_norm=0.5,
    precision={"compute": "fp64"},
    checkpoint={"every_steps": 1, "keep": 2},
)
OF_A_RANK = "ranks/"
"""How the names begin under which checkpoints have what parts of one rank keep."""

EACH = [{"use": "core.each"}]
PIPELINE = {"use": "pp.one_f_one_b"}
LAYOUTS: dict[str, tuple[int, Tables]] = {
    "one": (1, {}),
    "dp 2": (2, {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed"}]}),
    "dp 4": (4, {"parallel": {"dp": 4}, "gradient_handlers": EACH}),
    "pp 2": (2, {"parallel": {"pp": 2}, "pipeline": PIPELINE, "gradient_handlers": EACH}),
    "pp 2 x dp 2": (4, {"parallel": {"pp": 2, "dp": 2}, "pipeline": PIPELINE, "gradient_handlers": EACH}),
    "wp 2": (2, {"parallel": {"dp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}}),
    "wp 2 x sp 2": (
        2,
        {"parallel": {"sp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}, "sequence": {"use": "isp.all_to_all"}},
    ),
    "sharded": (2, {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded"}]}),
    "interleaved": (2, {"parallel": {"pp": 2}, "pipeline": {"use": "pp.interleaved"}, "gradient_handlers": EACH}),
}
LONGEST_S = 2.5
"""About what a life takes from its first line to its last step."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_texts(tmp_path)
    return tmp_path


def laid_out(tables: Tables, layout: str) -> tuple[int, Tables]:
    """Returns how many ranks `layout` has, and the plan `tables` in it; how they sum stays."""
    world, changes = LAYOUTS[layout]
    parallel = tables.get("parallel", {}) | changes.get("parallel", {})
    return world, tables | changes | ({"parallel": parallel} if parallel else {})


def lives(folder: Path, draw: random.Random, layouts: list[str], num_kills: int, tables: Tables) -> Iterator[str]:
    """Lets the run live, in each life in one of `layouts`, until it has ended by itself; yields how each life ended.

    After `num_kills` kills nobody disturbs it any more.
    """
    number = killed = 0
    ended = False
    while not ended:
        layout = draw.choice(layouts)
        mode = draw.choice(["async", "sync"])
        is_time: Any = kill_anywhere(folder, draw, LONGEST_S, STEPS - 3)
        if draw.random() < 0.5:
            is_time = kill_in_a_save(folder, draw)
        if killed == num_kills:
            is_time = lambda _: False  # noqa: E731 - one of three rules
        world, plan = laid_out(changed(tables, checkpoint__mode=mode), layout)
        with start(folder, plan, world, number) as life:
            was_killed = live(life, draw, is_time)
        number += 1
        killed += was_killed
        ended = not was_killed
        yield f"life {number} on {layout}, {mode}: {'killed' if was_killed else 'ended'}"


def assert_same(wanted: End, found: End, *, bits: bool, layouts: int) -> None:
    """Rows of all steps once and in order; weights and optimizer states of the last checkpoint."""
    assert [row["step"] for row in found.rows] == [row["step"] for row in wanted.rows]
    # what a rank keeps for itself, such as the order of its buckets, another layout has not
    shared, also = (
        {name: tensor for name, tensor in one.tensors.items() if layouts == 1 or not name.startswith(OF_A_RANK)}
        for one in (wanted, found)
    )
    assert shared.keys() == also.keys()
    if bits:
        assert found.rows == wanted.rows
        assert all(torch.equal(shared[name], also[name]) for name in shared)
        return
    for one, other in zip(wanted.rows, found.rows, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10)
    for name, tensor in shared.items():
        error = torch.linalg.vector_norm(also[name] - tensor) / torch.linalg.vector_norm(tensor)
        assert error < 1e-10 or torch.equal(also[name], tensor), (name, float(error))


def killed(folder: Path, seed: int, layouts: list[str], num_kills: int, tables: Tables = PLAN) -> list[str]:
    """Kills a run `num_kills` times, or less if it ends before, and compares; returns how its lives ended.

    Bit for bit where it has one layout, or sums are canonical.
    """
    print(f"seed {seed}")
    draw = random.Random(seed)
    world, plan = laid_out(tables, layouts[0] if len(layouts) == 1 else "one")
    wanted = undisturbed(folder / "undisturbed", changed(plan, data__files=_of(folder, tables)), world)
    told = []
    for line in lives(folder, draw, layouts, num_kills, tables):
        print(line)
        told.append(line)
    is_canonical = "reduction" in tables.get("parallel", {})
    assert_same(wanted, end(folder), bits=len(layouts) == 1 or is_canonical, layouts=len(layouts))
    return told


def _of(folder: Path, tables: Tables) -> list[str]:
    return [str(folder / name) for name in tables["data"]["files"]]


@pytest.mark.sample(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "layout"), [(1, "sharded"), (2, "interleaved")])
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(folder: Path, seed: int, layout: str) -> None:
    assert any("killed" in line for line in killed(folder, seed, [layout], 2))


@pytest.mark.timeout(300)
def test_a_killed_run_ends_in_other_layouts_with_the_same_numbers(folder: Path) -> None:
    assert any("killed" in line for line in killed(folder, 3, ["dp 2", "pp 2", "wp 2"], 2))


@pytest.mark.campaign
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_six_kills_in_one_layout(folder: Path, layout: str) -> None:
    killed(folder, 100 + list(LAYOUTS).index(layout), [layout], 6)


@pytest.mark.campaign
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("seed", range(200, 208))
def test_six_kills_and_a_layout_drawn_for_each_life(folder: Path, seed: int) -> None:
    killed(folder, seed, list(LAYOUTS), 6)


@pytest.mark.campaign
@pytest.mark.timeout(1100)
@pytest.mark.parametrize("seed", range(300, 304))
def test_canonical_sums_end_with_the_bits_of_one_process_whatever_the_layouts(folder: Path, seed: int) -> None:
    layouts = [layout for layout in LAYOUTS if "sp" not in layout]
    killed(folder, seed, layouts, 6, changed(PLAN, parallel={"reduction": "canonical"}))
