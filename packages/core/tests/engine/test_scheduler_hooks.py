"""Scheduler hooks see every action in its place, recomputation and evaluation included."""

from __future__ import annotations

import importlib
from contextlib import contextmanager

import pytest
import torch

from sley_core.errors import is_foreign
from sley_testing.plans import loader_of

HOOK = {"scheduler_hooks": [{"use": "spy.spy"}]}


@pytest.fixture
def spy(own):
    """The plugin's module, as a loader gets it."""
    return importlib.import_module("own_hooks")


@pytest.fixture
def watched(alone, spy):
    """`with watched(tables) as run`: with the hook; what it saw is in `spy.Spy.latest.seen`."""
    return lambda tables: alone(tables | HOOK, loader=loader_of({"spy": spy}))


def told(spy):
    """(call, chunk, micro, phase, step, global_micro) in order; empties what was seen."""
    found = [(name, m.chunk, m.micro, str(m.phase), m.step, m.global_micro) for name, m, _ in spy.Spy.latest.seen]
    spy.Spy.latest.seen.clear()
    return found


def test_every_micro_batch_is_announced_in_its_place(watched, small, spy):
    forward = ["before_forward", "after_forward", "before_loss", "after_loss"]
    backward = ["before_backward", "after_backward"]
    with watched(small(batch__global_size=2)) as run:
        assert spy.Spy.latest.parts is run.parts
        for step in range(2):
            run.step()
            expected = [(call, 0, micro, "train", step, micro) for micro in range(2) for call in forward + backward]
            assert told(spy) == expected


def test_hooks_are_given_the_tensors_that_an_action_concerns(watched, small, spy):
    with watched(small(batch__global_size=2)) as run:
        row = run.step()
        seen = spy.Spy.latest.seen
        losses = [what.item() for name, _, what in seen if name == "after_loss"]
        weight = sum(what.item() for name, _, what in seen if name == "before_backward")
        outputs = [what for name, _, what in seen if name in ("after_forward", "before_loss")]
    assert row["loss"] == pytest.approx(sum(losses) * weight / 2, rel=1e-12)
    assert [tuple(output.shape) for output in outputs] == [(1, 12, 16)] * 4
    assert outputs[0] is outputs[1]
    assert outputs[0].requires_grad


def test_what_a_hook_raises_says_whose_it_is(watched, small, spy, monkeypatch):
    def fails(*_: object) -> None:
        raise ValueError("no good")

    monkeypatch.setattr(spy.Spy, "after_loss", fails, raising=False)
    with watched(small()) as run, pytest.raises(ValueError, match="no good") as caught:
        run.step()
    assert caught.value.__notes__ == ["in `after_loss` of the scheduler hook Spy"]
    assert is_foreign(caught.value)


def test_recomputation_is_reported_layer_by_layer(watched, small, spy):
    """Half of four blocks run again, last first, within the backward of their micro-batch."""
    recompute = {"use": "core.recompute", "fraction": 0.5}
    with watched(small(batch__global_size=2, activations=recompute)) as run:
        run.step()
        seen = [
            (name, micro.micro, micro.layer, str(micro.phase))
            for name, micro, _ in spy.Spy.latest.seen
            if name.endswith("_backward") or micro.layer
        ]
        inputs = [what for _, micro, what in spy.Spy.latest.seen if micro.layer]
    expected = []
    for micro in range(2):
        expected += [
            ("before_backward", micro, "", "train"),
            ("before_forward", micro, "blocks.1", "recompute"),
            ("before_forward", micro, "blocks.0", "recompute"),
            ("after_backward", micro, "", "train"),
        ]
    assert seen == expected
    assert all(isinstance(hidden, torch.Tensor) and hidden.shape == (1, 12, 8) for hidden in inputs)


def test_evaluation_is_seen_as_such_and_has_no_backward(watched, small, spy):
    tables = small(batch__global_size=2, evaluation={"every": 1, "steps": 2}, activations={"use": "core.recompute"})
    with watched(tables) as run:
        run.evaluate()
        seen = told(spy)
    calls = ["before_forward", "after_forward", "before_loss", "after_loss"]
    assert seen == [(call, 0, micro, "evaluate", batch, micro) for batch in range(2) for micro in range(2) for call in calls]


LAYERS = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


@pytest.fixture
def waited(alone, small):
    """`with waited(**changes) as (run, seen)`: every layer waits for two things and runs; `seen` has the order."""

    @contextmanager
    def waited(**changes):
        seen = []
        with alone(small(**{"batch__global_size": 1} | changes)) as run:
            for layer in run.layers:
                run.before_layer(layer.name, lambda name=layer.name: seen.append(f"first {name}"))
                run.before_layer(layer.name, lambda name=layer.name: seen.append(f"second {name}"))
                layer.module.register_forward_pre_hook(lambda *_, name=layer.name: seen.append(f"run {name}"))
            yield run, seen

    return waited


def uses(names):
    return [f"{what} {name}" for name in names for what in ("first", "second", "run")]


def test_in_recomputation_too(waited):
    with waited(activations={"use": "core.recompute", "fraction": 0.5}) as (run, seen):
        run.step()
    assert seen == uses([*LAYERS, "blocks.1", "blocks.0"])


def test_a_wait_comes_before_the_seed(alone, small):
    """What a wait draws must not shift the masks of the layer."""
    losses = []
    for draws in (0, 5):
        with alone(small(model__options={"dropout": 0.5})) as run:
            run.before_layer("blocks.1", lambda draws=draws: torch.rand(draws) if draws else None)
            losses.append(run.step()["loss"])
    assert losses[0] == losses[1]
