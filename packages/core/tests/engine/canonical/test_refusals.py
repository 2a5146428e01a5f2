"""What has no one order of sums is refused by name; and a program sees gradients as ever."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan

PLAN = small_plan(parallel={"reduction": "canonical"}, precision__compute="fp32")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, None),
        ({"parallel__sp": 2, "data__sequence": 24}, "parallel.sp"),
        ({"model__compile": True}, "model.compile"),
        ({"precision__accumulation": "autograd"}, "precision.accumulation"),
        ({"precision__accumulation": "direct"}, None),
        ({"optimizer__clip_kind": 3.0}, "optimizer.clip_kind"),
        ({"optimizer__clip_kind": "inf"}, None),
        ({"optimizer": {"factory": "torch.optim:Adam", "lr": 0.1, "options": {"fused": True}}}, "optimizer.options"),
        ({"gradient_handlers": [{"use": "core.each"}]}, None),
    ],
)
def test_a_plan_that_cannot_keep_the_order_is_refused_where_it_says_so(texts, changes, path):
    tables = changed(PLAN, **changes)
    world = tables["parallel"].get("sp", 1)
    found = [problem for problem in check_plan(plan_from_dict(tables, texts), world) if problem.code[:9] == "canonical"]
    assert [".".join(map(str, problem.path)) for problem in found] == ([path] if path else [])
    if path:
        tables["parallel"]["reduction"] = "fast"
        problems = check_plan(plan_from_dict(tables, texts), world)
        assert not [problem for problem in problems if problem.code[:9] == "canonical"]


class Embed(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(*sizes)

    def forward(self, tokens):
        return self.table(tokens)


class Twice(nn.Module):
    """A linear whose weight is also used as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, hidden):
        return self.linear(hidden) @ self.linear.weight


class Scaled(nn.Module):
    """A parameter that no linear holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, hidden):
        return hidden * self.scale


def with_embedding(*inner):
    return [Embed(256, 16), *inner, nn.Linear(16, 256)]


def twice():
    return with_embedding(Twice())


def shared():
    one, other = Scaled(), Scaled()
    other.scale = one.scale
    return with_embedding(one, other)


def tied():
    layers = with_embedding(nn.Linear(16, 16))
    layers[-1].weight = layers[0].table.weight
    return layers


def own(factory):
    return changed(PLAN, model={"factory": f"{__name__}:{factory.__name__}"})


def test_a_weight_that_autograd_sees_too_is_refused_in_its_first_backward(texts, monkeypatch, request):
    monkeypatch.syspath_prepend(request.path.parent)
    with (
        World.join("cpu") as world,
        assemble(plan_from_dict(own(twice), texts), world) as run,
        pytest.raises(RunError) as caught,
    ):
        run.step()
    assert caught.value.diagnostics[0].code == "canonical-autograd"
    assert "1.linear.weight" in str(caught.value)


@pytest.mark.parametrize(("factory", "name"), [(shared, "1.scale"), (tied, None)])
def test_ties_of_linears_and_embeddings_are_summed_apart_and_others_refused(texts, monkeypatch, request, factory, name):
    monkeypatch.syspath_prepend(request.path.parent)
    expected = pytest.raises(PlanError) if name else nullcontext()
    with World.join("cpu") as world, expected as caught, assemble(plan_from_dict(own(factory), texts), world) as run:
        run.step()
    if name:
        assert caught.value.diagnostics[0].code == "canonical-tie"
        assert name in str(caught.value)


def test_a_gradient_in_pieces_with_others_between_is_refused(texts):
    with World.join("cpu") as world, assemble(plan_from_dict(PLAN, texts), world) as run:
        run.step()
        run.store.begin_step()
        param = run.registry["blocks.0.attention.query.weight"]
        piece = torch.ones(param.shape)
        run.store.add_of_micros(param, {0: piece, 1: piece}, param.layers[0])
        with pytest.raises(RunError) as caught:
            run.store.add_of_micros(param, {0: piece}, param.layers[0])
    assert caught.value.diagnostics[0].code == "canonical-again"


def test_a_backward_by_hand_between_two_steps_is_summed(texts):
    with World.join("cpu") as world, assemble(plan_from_dict(PLAN, texts), world) as run:
        run.step()
        run.store.begin_step()
        param = next(param for param in run.registry if len(param.shape) == 1)
        for _ in range(2):
            (3 * param.parameter.sum()).backward()
        run.store.chunk_done(0)
        run.step()
        assert not run.store.reduction.partial_sums()


def unequal(tables, folder):
    """What a step says in which rank 1 has one micro-batch more than rank 0, and whether the run goes on."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        own = run.feed.next()
        micros = [{name: value[at : at + 2] for name, value in own.items()} for at in (0, 2)]
        try:
            run.step(micros[: 1 + world.rank])
        except RunError as error:
            return error.diagnostics[0].code, run.step()["step"]
        return "", 0


def test_ranks_with_other_numbers_of_micro_batches_are_refused_before_they_sum(ranks, texts):
    assert ranks(2)(unequal, changed(PLAN, parallel__dp=2), texts) == [("ranks-differ", 1)] * 2
    assert ranks(2)(unequal, changed(PLAN, parallel={"dp": 2}), texts) == [("", 0)] * 2


def test_sums_count_as_gradients_while_there_are_any(texts):
    with World.join("cpu") as world, assemble(plan_from_dict(PLAN, texts), world) as run:
        run.step()
        between = run.memory.bytes["gradients"]
        seen: list[int] = []
        run.store.on_ready.append(lambda _: seen.append(run.memory.bytes["gradients"]))
        run.step()
        assert run.memory.bytes["gradients"] == between
    assert max(seen) > between
