"""The parity matrix of docs/parity.md: every schedule with every reducer, tied and not, and PyTorch's own alongside.

`nox -s campaign -- -k parity_matrix` measures the whole of it and writes the page; CI measures a sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_page import matrix, write_matrix

from sley_testing.parity import relative_errors
from sley_testing.runs import Recorded, record

OWN = Path(__file__).parent / "own"
SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]
REDUCERS = ["no dp", "core.each", "dp.bucketed"]
STOCK = ["no dp", "DDP", "FSDP2", "FSDP2 whole"]
LIMIT = 1e-6
"""How far any gradient of ours may be from the one-process run's, in fp32 (docs/internals.md, Parity)."""

Cell = tuple[str, str, bool]
"""Schedule, reducer, tied."""

EVERY: list[Cell] = [(schedule, reducer, tied) for schedule in SCHEDULES for tied in (False, True) for reducer in REDUCERS]
SAMPLE: list[Cell] = [
    ("pp.interleaved", "no dp", True),
    ("pp.one_f_one_b", "core.each", False),
    ("pp.zero_bubble_h1", "dp.bucketed", True),
    ("pp.zero_bubble_v", "dp.bucketed", True),
]

INTRODUCTION = """\
# Parity

<!-- Written by `nox -s campaign -- -k parity_matrix`; do not edit. -->

The largest relative error of any gradient compared with the one-process run of the same plan: two stages, and with a reducer
two replicas of each; an embedding, six blocks and a head in fp32, four micro-batches per replica. Sley's is the larger of two
steps' errors, since a reducer of buckets overlaps with the backward from the second step on. Errors above 1e-6 are bold: at 1
a gradient is missing, or another altogether. No run below raised an exception; a gradient that is `None` counts as zero.

PyTorch is {version} with gloo, and its most similar schedule: GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble,
ZBVZeroBubble. FSDP2 is `fully_shard` on each layer and on the stage, with its defaults and, in the last column, with
`reshard_after_forward=False`. PyTorch keeps a copy of tied weights on each stage and sums nothing, so for these only its plain
pipeline is shown.

Gradients in `[parallel] reduction = "canonical"` are not in the table: there every layout is bit-identical to one process.

| Schedule | Tied | Sley, no dp | `core.each` | `dp.bucketed` | PyTorch, no dp | DDP | FSDP2 | FSDP2, whole |
|---|---|---|---|---|---|---|---|---|
"""


def tables(tied: bool) -> dict[str, Any]:
    return {
        "run": {"name": "matrix", "steps": 2, "device": "cpu", "seed": 11},
        "model": {"factory": "matrix_parts:layers", "options": {"tied": tied}},
        "data": {"factory": "matrix_parts:Rows"},
        "batch": {"global_size": 16, "micro_size": 2},
        "optimizer": {"use": "core.sgd", "lr": 1e-3},
    }


def layout(cell: Cell) -> dict[str, Any]:
    schedule, reducer, tied = cell
    dp = 1 if reducer == "no dp" else 2
    found = tables(tied) | {"pipeline": {"use": schedule}, "parallel": {"pp": 2, "dp": dp}}
    found["batch"] = {"global_size": 16, "micro_size": 4 // dp}
    reducers = [] if dp == 1 else [{"use": reducer} | ({"bucket_mb": 0.0005} if reducer == "dp.bucketed" else {})]
    return found | {"gradient_handlers": [*reducers, {"use": "pp.shared_modules"}]}


def records(plans: Sequence[Mapping[str, Any]], folder: Path) -> list[Recorded]:
    return [record(plan, 2, folder=folder) for plan in plans]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(OWN)
    return OWN


def ours(ranks: Callable[..., Any], own: Path, cells: Sequence[Cell]) -> dict[Cell, float]:
    """The largest error of each cell, over both steps, all ranks and all parameters."""
    reference = {tied: record(tables(tied), 2, folder=own) for tied in (False, True)}
    found: dict[Cell, float] = {}
    for size in (2, 4):
        chosen = [cell for cell in cells if (cell[1] == "no dp") == (size == 2)]
        seen = ranks(size, 200)(records, [layout(cell) for cell in chosen], own) if chosen else []
        for at, cell in enumerate(chosen):
            steps = [
                largest(wanted, gradients)
                for rank in seen
                for wanted, gradients in zip(reference[cell[2]].gradients, rank[at].gradients, strict=True)
            ]
            found[cell] = max(steps)
    return found


def stock(ranks: Callable[..., Any], own: Path) -> dict[Cell, float]:
    from matrix_stock import gradients

    reference = {tied: record(tables(tied), 1, folder=own) for tied in (False, True)}
    values = {tied: recorded.first for tied, recorded in reference.items()}
    batch = first_batch(own)
    found: dict[Cell, float] = {}
    for size in (2, 4):
        wrappers = ["no dp"] if size == 2 else STOCK[1:]
        cells = [(s, w, tied) for s in SCHEDULES for w in wrappers for tied in (False, True) if size == 2 or not tied]
        seen = ranks(size, 200)(gradients, cells, values, batch)
        for at, cell in enumerate(cells):
            named = [
                {name.replace("head.weight", "embed.weight") if cell[2] else name: g for name, g in rank[at].items()}
                for rank in seen
            ]
            found[cell] = max(largest(reference[cell[2]].gradients[0], one) for one in named)
    return found


def first_batch(own: Path) -> dict[str, torch.Tensor]:
    """The samples of the first step, in any order of micro-batches."""
    from sley_core.assemble import assemble
    from sley_core.comm.world import World
    from sley_core.plan.load import plan_from_dict

    with World.alone("cpu") as world, assemble(plan_from_dict(tables(False), own), world) as run:
        assert run.feed is not None
        return dict(run.feed.next())


def largest(reference: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> float:
    return max(relative_errors({name: reference[name] for name in own}, own).values(), default=0.0)


def page(ours: Mapping[Cell, float], theirs: Mapping[Cell, float]) -> str:
    lines = []
    for schedule in SCHEDULES:
        for tied in (False, True):
            numbers = [ours[schedule, reducer, tied] for reducer in REDUCERS]
            others = [theirs.get((schedule, wrapper, tied)) for wrapper in STOCK]
            cells = [f"{number:.1e}" for number in numbers]
            cells += ["" if one is None else f"**{one:.1e}**" if one > LIMIT else f"{one:.1e}" for one in others]
            lines.append(f"| `{schedule}` | {'yes' if tied else 'no'} | {' | '.join(cells)} |")
    return INTRODUCTION.format(version=torch.__version__.partition("+")[0]) + "\n".join(lines) + "\n"


def read(text: str) -> dict[Cell, float]:
    """What the page says of ours."""
    found = {}
    for schedule, tied, *numbers in re.findall(r"^\| `(.+?)` \| (yes|no) \| (\S+) \| (\S+) \| (\S+) \|", text, re.MULTILINE):
        for reducer, number in zip(REDUCERS, numbers, strict=True):
            found[schedule, reducer, tied == "yes"] = float(number)
    return found


def test_a_sample_of_the_parity_matrix(ranks: Callable[..., Any], own: Path) -> None:
    found = ours(ranks, own, SAMPLE)
    assert set(found) == set(SAMPLE)
    assert max(found.values()) <= LIMIT, found


def test_the_page_has_every_row_and_no_error_beyond_the_limit() -> None:
    said = read(matrix())
    assert set(SAMPLE) <= set(EVERY) == set(said)
    assert max(said.values()) <= LIMIT


@pytest.mark.campaign
@pytest.mark.timeout(500)
def test_the_whole_parity_matrix_is_written(ranks: Callable[..., Any], own: Path) -> None:
    """Writes its part of the page. PyTorch's is shown, not asserted, but for what makes the comparison one of equals."""
    found, theirs = ours(ranks, own, EVERY), stock(ranks, own)
    assert max(found.values()) <= LIMIT, found
    assert max(theirs[schedule, "no dp", False] for schedule in SCHEDULES) <= LIMIT, "the same model, batch and scale"
    write_matrix(page(found, theirs))
