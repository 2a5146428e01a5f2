"""A run that is closed, or could not be assembled, leaves its model as the factory built it: ordinary modules."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.comm.world import World
from sley_core.data.dataset import DataInfo, Field
from sley_core.engine.shards import refuse_unregistered
from sley_core.engine.step_batch import StepBatch
from sley_core.errors import RunError
from sley_core.model.build import HostModel, build_on_meta
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import assert_untouched, record_built_models
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

DIRECT = {"compute": "fp64", "accumulation": "direct"}


def output(run: Run) -> Tensor:
    hidden: Any = torch.arange(12)[None]
    with torch.no_grad():
        for layer in run.layers:
            hidden = layer.module(hidden)
    return hidden


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_closed_run(small, own, monkeypatch, is_compiled):
    """And the model computes what it did in the run; calls of a layer go through the compiler no more."""
    compiled_forwards = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled_forwards.append(forward) or forward)
    direct = {"precision": DIRECT, "activations": {"use": "core.recompute"}}
    changes = {"model__compile": True} if is_compiled else direct
    plan = plan_from_dict(small(evaluation={"every": 9, "steps": 1}, **changes), own)
    with record_built_models() as kept, assemble(plan, World.alone("cpu")) as run:
        assert len(compiled_forwards) == (len(run.layers) + 1 if is_compiled else 0), "the layers and the loss"
        run.step()
        run.evaluate()
        assert ("compile" in run.counts) == is_compiled
        before = output(run)
    ((model, traces),) = kept
    assert_untouched(traces, model.layers)
    run.close()
    assert output(run).equal(before)
    run.layers[-1].module(torch.ones(1, 8, dtype=before.dtype)).sum().backward()
    assert run.registry["head.weight"].parameter.grad is not None, "autograd's, as of any module"


@pytest.mark.parametrize(
    "at", ["sley_trainer.attach.Stepper", "sley_trainer.assemble.build_samples", "sley_trainer.assemble.Run"]
)
def test_an_assembly_that_fails(small, own, monkeypatch, at):
    """However late."""

    def fail(*args: Any, **more: Any) -> None:
        raise ValueError("asked to")

    monkeypatch.setattr(at, fail)
    plan = plan_from_dict(small(precision=DIRECT), own)
    with record_built_models() as kept, pytest.raises(ValueError, match="asked to"):
        assemble(plan, World.alone("cpu"))
    ((model, traces),) = kept
    assert_untouched(traces, model.layers)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.scale = self.linear.weight.norm()

    def forward(self, tokens):
        return F.linear(tokens, self.linear.weight)


class Second(First):
    def __init__(self, first):
        super().__init__()
        self.others = [first]

    def forward(self, hidden):
        return self.others[0].linear(hidden)


class Given:
    name = "given"

    def build(self, data):
        first = First()
        return [("first", first), ("second", Second(first))]


def rank_of(owned):
    model = build_on_meta(Given(), DataInfo({"tokens": Field("float32")}), 0)
    host = HostModel(model)
    host.drop_other_layers(host.load_values(owned, dtype=torch.float32, device=torch.device("cpu")), owned)
    refuse_unregistered(model, [layer for layer in model.layers if layer.name in owned])
    return model


def test_a_hidden_module_of_another_rank_refuses_to_be_read():
    """torch's product of a tensor with one on meta has any numbers at all, without an error."""
    second = rank_of({"second"})["second"].module
    with pytest.raises(RunError, match=r"'first.linear.weight' of a layer on another rank") as raised:
        second(torch.ones(2, 4))
    assert raised.value.diagnostics[0].code == "weight-unregistered"
    assert raised.value.diagnostics[0].hint
    with pytest.raises(RunError, match=r"first.linear.weight"):
        torch.stack([second.others[0].linear.weight])


def test_a_result_with_a_graph_refuses_to_be_read():
    first = rank_of({"first"})["first"].module
    for read in (lambda: torch.ones(2) * first.scale, first.scale.item, lambda: first.scale.backward()):
        with pytest.raises(RunError, match=r"a forward reads `first.scale`, which .* with its autograd graph"):
            read()


def test_a_closed_run_does_nothing_and_says_so(alone, small):
    with alone(small(evaluation={"every": 9, "steps": 1})) as run:
        run.step()
    weights = [param.parameter.detach().clone() for param in run.registry]
    calls = (run.step, run.train, run.evaluate, lambda: run.stepper.step(1, StepBatch([{}], [{}])), run.store.begin_step)
    for call in calls:
        with pytest.raises(RunError, match=r"error\[run-closed\]: the (run|stepper|gradient store) is used after") as caught:
            call()
        assert caught.value.diagnostics[0].hint
    run.stop()
    for close in (run.close, run.stepper.close, run.store.close):
        close()
    assert all(param.parameter.equal(was) for param, was in zip(run.registry, weights, strict=True))
    assert run.num_steps_done == 1
    assert run.counts["core.each"] == {"sent_bytes_per_step": 0}
