"""One rank does something else than the others: all of them stop with an error that says so, or it is right as it is.

Each thing that can differ, in each layout; transport, rank and step are drawn. A run that goes on must
have the losses and gradient norms of one process on the same samples.
"""

import os
import random
import time
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from drawn_model import VOCABULARY, sample
from torch import Tensor, nn

from sley_core.errors import SleyError
from sley_core.plan.load import plan_from_dict
from sley_isp.attention import SequenceAttention
from sley_testing.habits import Embed
from sley_testing.plans import Tables, small_plan
from sley_testing.runs import running
from sley_trainer.run import Run

HIDDEN, HEADS = 8, 2
FROZEN_VARIABLE = "SLEY_TEST_FROZEN"
"""The environment variable with which one rank's factory freezes a parameter."""


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)


class Block(nn.Module):
    """Attention, two linears in either order, and the first of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.attend = SequenceAttention(attend)
        self.left = nn.Linear(HIDDEN, HIDDEN)
        self.right = nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.turned = False
        self.causal = True

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(hidden)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        hidden = hidden + self.attend(q, k, v, causal=self.causal).flatten(-2)
        first, second = (self.right, self.left) if self.turned else (self.left, self.right)
        output = first(hidden).tanh()
        hidden = hidden + (output + second(hidden).tanh())
        return hidden + self.experts[0](hidden).tanh()


def layers(tied: bool = False) -> list[tuple[str, nn.Module]]:
    embed, head = Embed(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    if tied:
        head.weight = embed.weight
    blocks = [Block(), Block()]
    if os.environ.get(FROZEN_VARIABLE):
        for block in blocks:
            block.left.bias.requires_grad_(False)
    return [("embed", embed), ("blocks.0", blocks[0]), ("blocks.1", blocks[1]), ("head", head)]


FOLDER = Path(__file__).parent
NUM_STEPS = 3
LIMIT_S = 10.0
TOTAL = 4
"""Samples of a global batch, in microbatches of one."""

PLAN = small_plan(
    model={"factory": "test_ranks_that_differ:layers"},
    data={"factory": "drawn_model:Rows"},
    batch={"global_size": TOTAL, "micro_size": 1},
    optimizer={"use": "core.sgd", "lr": 0.1},
    limits={"collective_timeout_s": LIMIT_S},
)

SHARDED = {"parallel": {"dp": 2, "wp": 2}}
PIPELINE = {"pipeline": {"use": "pp.one_f_one_b"}, "model": {"options": {"tied": True}}}
TIE = {"use": "pp.shared_modules"}
LAYOUTS: dict[str, Tables] = {
    "each": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]},
    "bucketed": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed"}]},
    "powersgd": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "powersgd.reducer", "rank": 1}]},
    "tied stages": {"parallel": {"pp": 2, "dp": 1}, **PIPELINE},
    "replicated stages": {"parallel": {"pp": 2, "dp": 2}, **PIPELINE, "gradient_handlers": [{"use": "dp.bucketed"}, TIE]},
    "shards": {**SHARDED, "weights": {"use": "isp.communicator"}},
    "modules alone": {**SHARDED, "weights": {"use": "isp.communicator", "unit": "module"}},
    "modules gathered": {**SHARDED, "weights": {"use": "isp.communicator", "unit": "module", "reduce": "step"}},
    "one after another": {**SHARDED, "weights": {"use": "isp.communicator", "unit": "module", "overlap": False}},
    "slices": {"parallel": {"sp": 2, "dp": 1}, "sequence": {"use": "isp.all_to_all", "positions": False}},
}
FROZEN = ("frozen by the factory", "frozen later", "layer frozen")
KINDS = (*FROZEN, "first value", "microbatches", "longer", "samples", "fields", "dtype", "order", "expert", "attention")


class Case(NamedTuple):
    """What differs, where, from which step on."""

    kind: str
    layout: str
    memory: bool
    odd: int
    step: int


class Outcome(NamedTuple):
    """How a rank ended: the code and message of its error, "" where there was none, what it computed, and how long it took."""

    code: str
    message: str
    rows: list[tuple[float, float]]
    seconds: float


def tables_of(layout: str, memory: bool) -> Tables:
    tables = deepcopy(PLAN)
    for table, values in deepcopy(LAYOUTS[layout]).items():
        tables[table] = tables.get(table, {}) | values if isinstance(values, dict) else values
    tables["parallel"]["cross_memory_attach"] = memory
    return tables


def may_differ(kind: str, layout: str) -> bool:
    """Whether that is a difference between ranks which they can see."""
    match kind:
        case "attention":
            return layout == "slices"  # code that differs by rank and moves nothing cannot be seen
        case "expert":
            return layout in ("modules alone", "one after another", "modules gathered")  # nor can this elsewhere
        case "samples":
            return layout == "slices" or "stages" in layout  # replicas have others
        case "layer frozen" | "frozen by the factory":
            return layout != "tied stages"  # one rank alone has the layer
    return True


def is_right(kind: str, layout: str) -> bool:
    """Whether that is no difference: replicas may have other numbers of samples, of other lengths; experts are the data's."""
    split, staged = layout == "slices", "stages" in layout
    match kind:
        case "microbatches":
            return layout in ("each", "bucketed", "powersgd")
        case "longer" | "dtype":
            return not split and not staged
        case "order":
            return not layout.startswith(("modules", "one after"))
    return False


def own_batch(case: Case, coord: int, num_dp: int, step: int, is_odd: bool) -> list[dict[str, torch.Tensor]]:
    """The microbatches of one rank. The odd one's are longer, more, or others, from `case.step` on."""
    kind = case.kind if is_odd and step >= case.step else ""
    first = 100 * step + 10 * coord + (5 if kind == "samples" else 0)
    num = TOTAL // num_dp * (2 if kind == "microbatches" else 1)
    samples = [sample(at, 12 if kind == "longer" else 8) for at in range(first, first + num)]
    batch = [{name: value[None] for name, value in one.items()} for one in samples]
    for micro in batch:
        if kind == "fields":
            del micro["labels"]
        if kind == "dtype":
            micro["tokens"] = micro["tokens"].int()
    return batch


def change(run: Run, case: Case) -> None:
    """Makes this rank the odd one."""
    blocks = [layer for layer in run.layers if layer.name.startswith("blocks")]
    tied = [param for param in run.registry if param.tie_axis is not None]
    first = (tied or list(run.registry))[0].parameter
    match case.kind:
        case "frozen later":
            first.requires_grad_(False)
        case "layer frozen":
            blocks[0].module.requires_grad_(False)
        case "first value":
            with torch.no_grad():
                first.view(-1)[0] += 1e-6
        case "order":
            blocks[0].module.turned = True
        case "expert":
            blocks[0].module.experts = blocks[0].module.experts[::-1]
        case "attention":
            blocks[0].module.causal = False


def attempt(tables: Tables, case: Case) -> Outcome:
    """Steps until an error; on the odd rank with the difference."""
    begin = time.monotonic()
    rows: list[tuple[float, float]] = []
    rank = int(os.environ["RANK"])
    if case.kind == "frozen by the factory" and rank == case.odd:
        os.environ[FROZEN_VARIABLE] = "1"
    try:
        with running(tables, FOLDER) as run:
            for step in range(NUM_STEPS):
                if step == case.step and rank == case.odd:
                    change(run, case)
                coord, size = run.groups["dp"].coord, run.groups["dp"].size
                row = run.step(own_batch(case, coord, size, step, rank == case.odd))
                rows.append((float(row["loss"]), float(row["grad_norm"])))
    except SleyError as error:
        found = error.diagnostics[0]
        return Outcome(found.code, found.message, rows, time.monotonic() - begin)
    return Outcome("", "", rows, time.monotonic() - begin)


def alone(case: Case, tables: Tables, world: int) -> list[tuple[float, float]]:
    """The rows of one process on the samples of all ranks."""
    rows = []
    num_dp = tables["parallel"]["dp"]
    with running(PLAN | {"model": tables["model"]}, FOLDER) as run:
        for step in range(NUM_STEPS):
            batches = (own_batch(case, rank, num_dp, step, rank == case.odd and world == num_dp) for rank in range(num_dp))
            row = run.step([micro for batch in batches for micro in batch])
            rows.append((float(row["loss"]), float(row["grad_norm"])))
    return rows


SEED = int(os.environ.get("SLEY_TEST_SEED", "38"))
CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS if may_differ(kind, layout)]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_rank_that_differs(ranks: Any, monkeypatch: pytest.MonkeyPatch, kind: str, layout: str) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    draw = random.Random(f"{SEED} {kind} {layout}")
    memory, step = draw.random() < 0.5, 0 if kind in ("first value", "frozen by the factory") else draw.randrange(2)
    tables = tables_of(layout, memory)
    world = plan_from_dict(tables, FOLDER).world_size()
    case = Case(kind, layout, memory, draw.randrange(world), step)
    print(f"seed {SEED}: {case}")
    outcomes = ranks(world, 4 * LIMIT_S)(attempt, tables, case)
    if is_right(kind, layout):
        assert all(one.code == "" for one in outcomes), outcomes
        expected = alone(case, tables, world)
        for one in outcomes if layout != "powersgd" else ():
            assert one.rows == [pytest.approx(row, rel=1e-9) for row in expected]
        return
    assert all(one.code for one in outcomes), outcomes
    assert max(one.seconds for one in outcomes) < 3 * LIMIT_S, outcomes
    if kind == "fields":  # refused on that rank alone; the others miss it
        assert outcomes[case.odd].code not in ("ranks-differ", "collective-failed"), outcomes
    else:
        assert {one.code for one in outcomes} == {"ranks-differ"}, outcomes
