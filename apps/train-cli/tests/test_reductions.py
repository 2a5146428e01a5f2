"""Reducers with stages, ties and shards: when a bucket is reduced, how ties are summed, gradient norms, and sums in bf16."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn_model import VOCABULARY
from torch import Tensor, nn

from sley_testing.collectives import collectives
from sley_testing.habits import Embed
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import BF16_SUMS, GRADIENTS, assert_parity_of_parts, record, running

FOLDER = Path(__file__).parent
BUCKETED = {"use": "dp.bucketed", "bucket_mb": 0.0005}
TIES = {"use": "pp.shared_modules"}
PLAN = small_plan(batch__micro_size=1, model__ffn_hidden=27, model__vocab_size=257, data__sequence=16)
TIED = changed(PLAN, model__tie_embeddings=True)
FEW = {"global_size": 4, "micro_size": 1}
ISP = {"use": "isp.communicator"}


def in_stages(schedule: str, *handlers: Tables, **sizes: int) -> Tables:
    return {"parallel": {"pp": 2, **sizes}, "pipeline": {"use": schedule}, "gradient_handlers": list(handlers)}


def reductions(tables: Tables, folder: Path) -> tuple[list[int], list[int], list[str]]:
    """Returns the sizes of this stage's buckets, and the sizes and the actions of the second step's reductions."""
    with running(tables, folder) as run:
        reducer: Any = run.stepper.handlers[0]
        actions: list[str] = []
        start = reducer.sums.start

        def record_action(*arguments: Any) -> None:
            action = run.store.state.action
            actions.append("after" if action is None else f"{action.kind.value}{action.chunk}.{action.micro}")
            start(*arguments)

        reducer.sums.start = record_action
        run.step()
        actions.clear()
        with collectives() as calls:
            run.step()
        stage = run.groups["stage"].ranks
        sizes = [call.numel for call in calls if call.op == "all_reduce" and call.ranks == stage and call.numel > 1]
        return sorted(buffer.data.numel() for buffer in run.store.buffers), sorted(sizes), actions


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "last_actions"),
    [
        ("pp.zero_bubble_v", {"W0.3", "W1.3", "after"}),
        ("pp.interleaved", {"B0.3", "B1.3"}),
        ("pp.one_f_one_b", {"B0.3"}),
        ("pp.zero_bubble_h1", {"W0.3", "after"}),
    ],
)
def test_each_bucket_is_reduced_once_after_its_last_gradient(
    ranks: Callable[..., Any], texts: Path, schedule: str, last_actions: set[str]
) -> None:
    for buckets, sizes, actions in ranks(4)(reductions, TIED | in_stages(schedule, BUCKETED, TIES, dp=2), texts):
        assert len(buckets) > 1
        assert sizes == buckets
        assert len(actions) == len(buckets)
        assert set(actions) <= last_actions


HIDDEN = 8


class Pair(nn.Module):
    """Two linear layers, registered in the order of their names or in reverse."""

    def __init__(self, left: nn.Linear, right: nn.Linear, is_reversed: bool) -> None:
        super().__init__()
        linears = {"left": left, "right": right}
        for name in sorted(linears, reverse=is_reversed):
            self.add_module(name, linears[name])

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.right(F.gelu(self.left(hidden)))


def layers() -> list[tuple[str, nn.Module]]:
    """Returns a model whose two blocks share both linear layers, but register them in opposite orders."""
    left, right = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    blocks = [(f"blocks.{index}", Pair(left, right, is_reversed=bool(index))) for index in range(2)]
    return [("embed", Embed(VOCABULARY, HIDDEN)), *blocks, ("head", nn.Linear(HIDDEN, VOCABULARY, bias=False))]


def test_ties_in_opposite_orders_are_summed_by_name(ranks: Any) -> None:
    optimizer = {"use": "core.sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}
    model, data = {"factory": "test_reductions:layers"}, {"factory": "drawn_model:Rows"}
    plan = small_plan(model=model, data=data, optimizer=optimizer, batch=FEW)
    reducer = {"use": "dp.sharded", "bucket_mb": 0.001}
    layout = plan | in_stages("pp.one_f_one_b", reducer, TIES, dp=2)
    recorded = ranks(4, 120)(record, layout, 2, folder=FOLDER)
    assert_parity_of_parts(record(plan, 2, folder=FOLDER), recorded, "fp64")
    for name in ("blocks.0.left.weight", "blocks.0.right.bias"):
        assert all(torch.equal(recorded[0].weights[name], rank.weights[name]) for rank in recorded[1:])


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [{"pp": 2, "dp": 2, "wp": 2}, {"dp": 2, "wp": 2}], ids=str)
def test_the_norm_of_each_gradient_equals_one_process(ranks: Any, texts: Path, parallel: dict[str, int]) -> None:
    """A table tied over two stages, shards, and full weights count once. Every rank has all names."""
    norms = {"use": "core.gradient_norms"}
    reference = record(changed(TIED, batch=FEW, gradient_handlers=[{"use": "core.each"}, norms]), 2, folder=texts)
    stages = {"pipeline": {"use": "pp.one_f_one_b"}} if "pp" in parallel else {}
    handlers = [{"use": "core.each"}, *([TIES] if stages else []), norms]
    tables = changed(TIED, batch=FEW, parallel=parallel, gradient_handlers=handlers, weights=ISP) | stages
    for rank in ranks(4 if stages else 2, 180)(record, tables, 2, folder=texts):
        for expected, row in zip(reference.rows, rank.rows, strict=True):
            names = [name for name in expected if name.startswith("gradient_norm/")]
            assert len(names) > 10
            assert names == [name for name in row if name.startswith("gradient_norm/")]
            assert {name: row[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision__accumulation": "direct"},
        {"optimizer__clip_kind": "inf", "optimizer__clip_norm": 0.1},
        {"offload": [{"use": "memory.host_optimizer", "bucket_mb": 0.01}]},
    ],
)
def test_a_step_with_sums_in_bf16(texts: Path, changes: Tables) -> None:
    """The norm is computed in fp64, the clip factor has more than 8 bits, and master weights are updated in fp32."""
    sums = {"compute": "bf16", "gradients": "bf16"}
    tables = changed(PLAN, **{"precision": sums, "optimizer__clip_norm": 0.37, "optimizer__weight_decay": 0.0, **changes})
    with running(tables, texts) as run:
        exact = record(changed(tables, precision__gradients="fp32"), 1, folder=texts)
        masters = run.stepper.update.masters.local_params
        copies = [torch.nn.Parameter(master.parameter.detach().clone()) for master in masters]
        adam: Any = torch.optim.AdamW(copies, lr=3e-3, weight_decay=0.0)
        row = run.step()
        gradients = [run.store.gradient(master.param) for master in masters]
        assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
        norm_type = float(changes.get("optimizer__clip_kind", 2.0))
        norm = torch.linalg.vector_norm(torch.cat([gradient.double().flatten() for gradient in gradients]), norm_type)
        tolerance = 2**-10 if norm_type == 2 else 2**-8  # each element is rounded, but not the factor
        assert float(norm) == pytest.approx(run.plan.optimizer.config.clip_norm, rel=tolerance)
        assert row["grad_norm"] == pytest.approx(exact.rows[0]["grad_norm"], rel=GRADIENTS[BF16_SUMS])
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.float()
        adam.step()
        for copy, master in zip(copies, masters, strict=True):
            torch.testing.assert_close(copy, master.parameter, rtol=1e-6, atol=1e-8)
        assert run.memory.bytes["gradients"] <= sum(2 * copy.numel() + 256 for copy in copies)
