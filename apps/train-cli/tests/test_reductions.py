"""Reducers beside stages, ties and shards: when a bucket is reduced, which elements a rank steps, and which bits stay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn_model import VOCABULARY
from torch import Tensor, nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.update import states_of
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import collectives
from sley_testing.habits import Embed
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import BF16_SUMS, GRADIENTS, assert_parity_of_parts, record, running, weights

FOLDER = Path(__file__).parent
BUCKETED = {"use": "dp.bucketed", "bucket_mb": 0.0005}
SHARDED = {"use": "dp.sharded", "bucket_mb": 0.005}
TIES = {"use": "pp.shared_modules"}
ISP = {"use": "isp.communicator"}
SIZES: dict[str, Any] = {"batch__micro_size": 1, "model__ffn_hidden": 27, "model__vocab_size": 257, "data__sequence": 16}
PLAN = small_plan(**SIZES)
TIED = changed(PLAN, model__tie_embeddings=True)


def piped(schedule: str, *handlers: Tables, **sizes: int) -> Tables:
    return {"parallel": {"pp": 2, **sizes}, "pipeline": {"use": schedule}, "gradient_handlers": list(handlers)}


def reductions(tables: Tables, folder: Path) -> tuple[list[int], list[int], list[list[str]]]:
    """Returns of two steps: the elements of this stage's buckets, those of the last step's reductions, and where each began."""
    with running(tables, folder) as run:
        reducer: Any = run.stepper.handlers[0]
        began: list[list[str]] = []
        start = reducer.sums.start

        def started(*arguments: Any) -> None:
            action = run.store.state.action
            began[-1].append("after" if action is None else f"{action.kind.value}{action.chunk}.{action.micro}")
            start(*arguments)

        reducer.sums.start = started
        stage = run.groups["stage"].ranks
        sizes: list[int] = []
        for _ in range(2):
            began.append([])
            with collectives() as calls:
                run.step()
            sizes = [call.numel for call in calls if call.op == "all_reduce" and call.ranks == stage and call.numel > 1]
        return sorted(buffer.data.numel() for buffer in run.store.buffers), sorted(sizes), began


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        ("pp.zero_bubble_v", {"W0.3", "W1.3", "after"}),
        ("pp.interleaved", {"B0.3", "B1.3"}),
        ("pp.one_f_one_b", {"B0.3"}),
        ("pp.zero_bubble_h1", {"W0.3", "after"}),
    ],
)
def test_each_bucket_is_reduced_once_in_the_last_gradient_action(
    ranks: Callable[..., Any], texts: Path, schedule: str, last: set[str]
) -> None:
    """As many collectives as buckets, whatever the microbatches; of a split backward, none before its last W."""
    for buckets, reduced, began in ranks(4)(reductions, TIED | piped(schedule, BUCKETED, TIES, dp=2), texts):
        assert len(buckets) > 1
        assert reduced == buckets
        for step in began[1:]:
            assert len(step) == len(buckets)
            assert set(step) <= last


def test_ties_are_summed_after_the_reducer(texts: Path) -> None:
    """A list without their handler is refused, and one in which it comes first; if left out, core adds it."""
    plan = TIED | piped("pp.one_f_one_b", BUCKETED, TIES, dp=2)
    assert check_plan(plan_from_dict(plan, texts), 4) == []
    plan["gradient_handlers"] = [BUCKETED]
    with World.fake(0, 4) as world, pytest.raises(PlanError, match="stages \\[0, 1\\] share a parameter"):
        assemble(plan_from_dict(plan, texts), world)
    plan["gradient_handlers"] = [TIES, BUCKETED]
    assert [problem.code for problem in check_plan(plan_from_dict(plan, texts), 4)] == ["handler-order"]
    del plan["gradient_handlers"]
    assert [handler.name for handler in plan_from_dict(plan, texts).gradient_handlers] == ["core.each", "pp.shared_modules"]


HIDDEN = 8


class Pair(nn.Module):
    """Two linears, in the order of their names or in the opposite one."""

    def __init__(self, one: nn.Linear, two: nn.Linear, turned: bool) -> None:
        super().__init__()
        linears = {"one": one, "two": two}
        for name in sorted(linears, reverse=turned):
            self.add_module(name, linears[name])

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.two(F.gelu(self.one(hidden)))


def layers() -> list[tuple[str, nn.Module]]:
    """The second and third share both linears, and declare them in opposite orders."""
    one, two = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    blocks = [(f"blocks.{at}", Pair(one, two, turned=bool(at))) for at in range(2)]
    return [("embed", Embed(VOCABULARY, HIDDEN)), *blocks, ("head", nn.Linear(HIDDEN, VOCABULARY, bias=False))]


@pytest.mark.parametrize("bucket_mb", [0.001, 25.0])
def test_ties_that_stages_declare_in_opposite_orders(ranks: Any, bucket_mb: float) -> None:
    """They are laid out by name on both stages, in one bucket or in several, so that the summed parts are the same elements."""
    alone = {
        "run": {"name": "ties", "steps": 3, "device": "cpu", "seed": 11},
        "model": {"factory": "test_reductions:layers"},
        "data": {"factory": "drawn_model:Rows"},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"use": "core.sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5},
        "precision": {"compute": "fp64"},
    }
    layout = alone | piped("pp.one_f_one_b", SHARDED | {"bucket_mb": bucket_mb}, TIES | {"drift_check_steps": 1}, dp=2)
    found = ranks(4, 120)(record, layout, 3, folder=FOLDER)
    assert_parity_of_parts(record(alone, 3, folder=FOLDER), found, "fp64")
    for name in ("blocks.0.one.weight", "blocks.0.two.bias"):
        assert all(torch.equal(found[0].weights[name], other.weights[name]) for other in found[1:])


def sharded_states(tables: Tables, folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns the spans of this rank by name, and how many ranks share a copy of each parameter."""
    with running(tables, folder) as run:
        run.step()
        spans = {one.name: one.elements for one in states_of(run.stepper.update) if one.state == "exp_avg"}
        expected = sum(buffer.data.numel() // buffer.num_shards for buffer in run.store.buffers) * 4
        assert run.stepper.update.masters.num_bytes == expected
        return spans, {param.name: run.store.num_shards(param) for param in run.store.params}


def test_norms_are_shared_by_all_ranks_and_linears_by_those_with_the_same_shard(ranks: Any, texts: Path) -> None:
    tables = changed(PLAN, parallel={"dp": 4, "wp": 2}, weights=ISP, gradient_handlers=[SHARDED], precision__compute="bf16")
    for _, num_shards in ranks(4, 120)(sharded_states, tables, texts):
        for name, count in num_shards.items():
            assert count == (4 if "norm" in name else 2), name


def test_holders_of_a_tie_step_the_same_elements_of_it(ranks: Any, texts: Path) -> None:
    tables = changed(TIED, precision__compute="bf16") | piped("pp.one_f_one_b", SHARDED, TIES, dp=2)
    first, second, third, fourth = (spans["embed.tokens.weight"] for spans, _ in ranks(4, 120)(sharded_states, tables, texts))
    assert (first, second) == (third, fourth)
    assert first.last == second.first
    assert second.last == 257 * 16


def stepped(tables: Tables, folder: Path, at_once: bool) -> tuple[dict[str, Any], bool]:
    """Returns weights after `train`, or after single steps, and whether a first layer was called before they had come."""
    late: list[bool] = []
    with running(tables, folder) as run:
        handler: Any = run.stepper.handlers[0]
        buffers = range(len(handler.gathers.buffers))
        run.layers[0].module.register_forward_pre_hook(lambda *_: late.append(handler.gathers.is_due(buffers)))
        if at_once:
            run.train()
        else:
            for _ in range(run.plan.run.steps):
                run.step()
        return weights(run), any(late)


def both_ways(plans: list[Tables], folder: Path) -> list[Any]:
    return [(stepped(tables, folder, True), stepped(tables, folder, False)) for tables in plans]


def test_weights_that_come_late_are_awaited(ranks: Any, texts: Path) -> None:
    """By layers, by gathers of shards and by evaluations: the bits are those of steps with all weights there before."""
    sharded = {"parallel": {"dp": 4, "wp": 2}, "weights": ISP, "gradient_handlers": [SHARDED]}
    plans = [
        changed(TIED, evaluation={"every": 2, "steps": 1}) | piped("pp.zero_bubble_v", SHARDED, TIES, dp=2),
        TIED | sharded,
    ]
    for found in ranks(4, 400)(both_ways, plans, texts):
        for late, prompt in found:
            assert_same_bits(late[0], prompt[0])
            assert not prompt[1]
        assert any(late[1] for late, _ in found), "a first layer that already waits for all of them shows nothing"


def weights_of(plans: list[Tables], folder: Path) -> list[dict[str, torch.Tensor]]:
    return [record(tables, 2, folder=folder).weights for tables in plans]


def test_schedules_change_no_bit(ranks: Any, texts: Path) -> None:
    """Interleaved and with deferred weight gradients: the weights of 1F1B, with buckets smaller than a layer.

    All of them run the backwards of a chunk in the order of microbatches, and every sum over ranks joins two. Clipping is
    left out: the norm adds up a stage's weights first, and a stage has others of them with two chunks.
    """
    unclipped = changed(PLAN, optimizer__clip_norm=None)
    plans = [
        unclipped | piped(f"pp.{schedule}", BUCKETED, dp=2, wp=2) | {"weights": ISP}
        for schedule in ("one_f_one_b", "interleaved", "zero_bubble_h1")
    ]
    by_rank = ranks(4, 120)(weights_of, plans, texts)
    first, *others = [dict(chain.from_iterable(rank.items() for rank in parts)) for parts in zip(*by_rank, strict=True)]
    for other in others:
        assert_same_bits(first, other)


@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", [{"pp": 2, "dp": 2, "wp": 2}, {"dp": 2, "wp": 2}], ids=str)
def test_the_norm_of_each_gradient_is_that_of_one_process(ranks: Any, texts: Path, parallel: dict[str, int]) -> None:
    """A tied table on two stages, shards and whole weights count once; every rank has all names."""
    norms = {"use": "core.gradient_norms"}
    reference = record(changed(TIED, gradient_handlers=[{"use": "core.each"}, norms]), 2, folder=texts)
    stages = {"pipeline": {"use": "pp.one_f_one_b"}} if "pp" in parallel else {}
    handlers = [{"use": "core.each"}, *([TIES] if stages else []), norms]
    tables = changed(TIED, parallel=parallel, gradient_handlers=handlers, weights=ISP) | stages
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
def test_a_step_of_sums_in_bf16(texts: Path, changes: Tables) -> None:
    """The norm is computed in fp64, the clip factor has more than 8 bits, and masters are stepped in fp32."""
    sums = {"compute": "bf16", "gradients": "bf16"}
    tables = changed(PLAN, **{"precision": sums, "optimizer__clip_norm": 0.37, "optimizer__weight_decay": 0.0, **changes})
    with running(tables, texts) as run:
        exact = record(changed(tables, precision__gradients="fp32"), 1, folder=texts)
        stepped = run.stepper.update.masters.stepped
        copies = [torch.nn.Parameter(master.parameter.detach().clone()) for master in stepped]
        adam: Any = torch.optim.AdamW(copies, lr=3e-3, weight_decay=0.0)
        row = run.step()
        gradients = [run.store.gradient(master.param) for master in stepped]
        assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
        kind = float(changes.get("optimizer__clip_kind", 2.0))
        norm = torch.linalg.vector_norm(torch.cat([gradient.double().flatten() for gradient in gradients]), kind)
        limit = 2**-10 if kind == 2 else 2**-8  # each element is rounded, and the factor is not
        assert float(norm) == pytest.approx(run.plan.optimizer.config.clip_norm, rel=limit)
        assert row["grad_norm"] == pytest.approx(exact.rows[0]["grad_norm"], rel=GRADIENTS[BF16_SUMS])
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.float()
        adam.step()
        for copy, master in zip(copies, stepped, strict=True):
            torch.testing.assert_close(copy, master.parameter, rtol=1e-6, atol=1e-8)
        assert run.memory.bytes["gradients"] <= sum(2 * copy.numel() + 256 for copy in copies)
