"""Layers run again but for their attention: the same bits, draws included, and less to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.errors import PlanError, RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_memory.config import SelectiveConfig
from sley_memory.selective import ATTENTION, SelectiveRecompute
from sley_testing.habits import HABITS
from sley_testing.plans import small_plan

pytestmark = pytest.mark.timeout(120)
SELECTIVE = {"use": "memory.selective"}
MODEL = {"factory": "attending:layers"}


class Attentions(TorchDispatchMode):
    """Counts attentions that are computed, and other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num, self.num_others = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_one = func in ATTENTION
        self.num, self.num_others = self.num + is_one, self.num_others + (not is_one)
        return func(*args, **(kwargs or {}))


def selectively(layer: nn.Module, hidden: torch.Tensor, policy: SelectiveRecompute | None = None) -> torch.Tensor:
    """The output of `layer`, called through the policy."""
    policy = policy or SelectiveRecompute(SelectiveConfig(), frozenset({"layer"}))
    output: torch.Tensor = policy.call("layer", layer, (hidden,), {}, MicroStep(0, 0, Phase.TRAIN, 0, 0))
    return output


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision__compute": "bf16"},
        {"precision__compute": "fp32", "precision__accumulation": "direct"},
        {"model": MODEL | {"options": {"dropout": 0.3}}},
    ],
    ids=["fp64", "bf16", "direct", "dropout"],
)
def test_the_same_bits_and_something_kept(as_kept: Any, changes: dict[str, Any]) -> None:
    counts = as_kept(SELECTIVE, 10, **changes)
    assert counts["kept_attentions"] > 0
    assert counts["kept_bytes"] >= counts["max_kept_bytes"] > 0
    assert counts["recompute_host_s"] > 0
    assert counts["recomputed_attentions"] == 0


def test_attention_that_draws_runs_again(as_kept: Any) -> None:
    """Kept, its draws would be missing from the generator, and dropout behind it would draw others, without a word."""
    model = MODEL | {"options": {"attention_dropout": 0.3, "dropout": 0.3}}
    assert as_kept(SELECTIVE, model=model, precision__compute="fp32")["kept_attentions"] == 0


@pytest.mark.sample(5)
@pytest.mark.parametrize("habit", [habit for habit in HABITS if habit not in ("AdaptiveAgain", "GradientWithin")])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # forward-mode derivatives
def test_habits_of_models(as_kept: Any, habit: str) -> None:
    """But those that `core.recompute` does not run either."""
    model = {"factory": "sley_testing.habits:model", "options": {"habit": habit}}
    as_kept(SELECTIVE | {"layers": ["*"]}, model=model, data__sequence=16, evaluation=None)


def test_attention_is_computed_once(own: Path, texts: Path) -> None:
    found = {}
    for policy in ("core.keep", "core.recompute", "memory.selective"):
        tables = small_plan(model=MODEL, activations={"use": policy}, batch__global_size=2)
        with assemble(plan_from_dict(tables, texts), World.alone("cpu")) as run, Attentions() as computed:
            run.step()
            found[policy] = computed.num, computed.num_others
    assert [found[policy][0] for policy in found] == [3, 6, 3]
    assert found["memory.selective"][1] > found["core.keep"][1], "nothing was recomputed"


def test_what_is_kept_is_let_go_with_the_graph(own: Path, texts: Path) -> None:
    tables = small_plan(model=MODEL, activations=SELECTIVE)
    with assemble(plan_from_dict(tables, texts), World.alone("cpu")) as run:
        for _ in range(2):
            run.step()
            tally = run.caller.policy.tally
            assert tally.num_bytes == 0
        # Three blocks, one micro-batch in flight: the output, fp64 [2, 2, 24, 8], and a number of each row.
        assert tally.max_bytes == 3 * (8 * 2 * 2 * 24 * 8 + 8 * 2 * 2 * 24)


def test_a_budget_is_kept(as_kept: Any) -> None:
    one = 8 * 2 * 2 * 24 * 8 + 8 * 2 * 2 * 24
    counts = as_kept(SELECTIVE | {"budget_bytes": 2 * one}, model=MODEL)
    assert counts["max_kept_bytes"] == 2 * one
    assert counts["recomputed_attentions"] == counts["kept_attentions"] / 2
    assert as_kept(SELECTIVE | {"budget_bytes": 0}, model=MODEL)["kept_attentions"] == 0


def test_attention_that_is_written_on_is_refused(own: Path, texts: Path) -> None:
    """It would be another in the second run."""
    tables = small_plan(model=MODEL | {"options": {"in_place": True}}, activations=SELECTIVE)
    with assemble(plan_from_dict(tables, texts), World.alone("cpu")) as run, pytest.raises(RunError) as caught:
        run.step()
    assert caught.value.diagnostics[0].code == "saved-in-place"


def test_a_step_that_fails_leaves_nothing(own: Path, texts: Path) -> None:
    import attending

    with assemble(plan_from_dict(small_plan(model=MODEL, activations=SELECTIVE), texts), World.alone("cpu")) as run:
        attending.FAILS[0] = True
        with pytest.raises(ValueError, match="asked to fail"):
            run.step()
        attending.FAILS[0] = False
        run.step()
        assert run.caller.policy.tally.num_bytes == 0


def test_a_backward_may_run_twice(own: Path) -> None:
    """With `retain_graph` the layer runs again each time, and is given its attention again."""
    from attending import Block

    block = Block(16, 2, 0.0, 0.0, False)
    hidden = torch.randn(2, 8, 16, requires_grad=True)
    policy = SelectiveRecompute(SelectiveConfig(), frozenset({"layer"}))
    output = selectively(block, hidden, policy)
    (first,) = torch.autograd.grad(output.sum(), hidden, retain_graph=True)
    (second,) = torch.autograd.grad(output.sum(), hidden)
    (wanted,) = torch.autograd.grad(block(hidden).sum(), hidden)
    assert torch.equal(first, wanted)
    assert torch.equal(second, wanted)
    assert policy.tally.num_kept == 1


@pytest.mark.parametrize("when", [1, 2])
def test_what_is_tried_aside_is_no_part_of_the_layer(own: Path, when: int) -> None:
    from attending import Trying

    layer = Trying(16, 0, is_aside=True)
    hidden = torch.randn(2, 8, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(hidden).sum(), hidden)
    layer.when, layer.num_runs = when, 0
    assert torch.equal(torch.autograd.grad(selectively(layer, hidden).sum(), hidden)[0], wanted)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen below"])
@pytest.mark.parametrize(("when", "how"), [(1, "less"), (2, "more")])
def test_attention_that_one_of_two_runs_has_is_refused(own: Path, when: int, how: str, is_frozen: bool) -> None:
    """The others would be given what it computed, in the same shape."""
    from attending import Trying

    layer = Trying(16, when, is_aside=False)
    layer.project.requires_grad_(not is_frozen)
    output = selectively(layer, torch.randn(2, 8, 16, requires_grad=not is_frozen))
    with pytest.raises(RunError, match=f"{2 + (when == 1)} attentions .* has {how}") as caught:
        output.sum().backward()
    assert caught.value.diagnostics[0].code == "attention-differs"


def test_a_second_run_that_stops_before_an_attention_is_no_other_one(own: Path) -> None:
    from attending import Nested

    hidden = torch.randn(2, 8, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(Nested()(hidden).sum(), hidden)
    assert torch.equal(torch.autograd.grad(selectively(Nested(), hidden).sum(), hidden)[0], wanted)


def test_compiled_layers_are_refused(texts: Path) -> None:
    plan = plan_from_dict(small_plan(model__compile=True, activations=SELECTIVE), texts)
    assert [problem.code for problem in check_plan(plan, 1)] == ["selective-compiled"]
    with pytest.raises(PlanError, match="a compiled layer"):
        assemble(plan, World.alone("cpu"))
