"""Scheduler hooks see every action in its place, recomputation and evaluation included; layers wait for what they need."""

from types import SimpleNamespace

import pytest
import torch

from sley_core.errors import is_foreign
from sley_core.hookspecs import hookimpl
from sley_core.records import SchedulerHookRecord
from sley_core.table import Table
from sley_testing.plans import loader_of

FORWARD = ["before_forward", "after_forward", "before_loss", "after_loss"]
BACKWARD = ["before_backward", "after_backward"]


class Spy:
    """Keeps (name of the call, MicroStep, what it concerns) in `seen`, of the latest run."""

    latest: "Spy"

    def __init__(self, config, parts):
        self.parts, self.seen = parts, []
        Spy.latest = self

    def __getattr__(self, name):
        if name not in FORWARD + BACKWARD:
            raise AttributeError(name)
        return lambda micro, label: self.seen.append((name, micro, label))

    def told(self):
        """(call, chunk, micro, phase, step, global_micro) in order; empties what was seen."""
        found = [(name, m.chunk, m.micro, str(m.phase), m.step, m.global_micro) for name, m, _ in self.seen]
        self.seen.clear()
        return found


@hookimpl
def _records():
    return [SchedulerHookRecord(name="spy", config=Table, build=f"{__name__}:Spy")]


@pytest.fixture
def watched(alone, small):
    """`with watched(**changes) as run`: with the hook; what it saw is in `Spy.latest`."""
    loader = loader_of({"spy": SimpleNamespace(sley_scheduler_hooks=_records)})
    hook = {"scheduler_hooks": [{"use": "spy.spy"}], "batch__global_size": 2}
    return lambda **changes: alone(small(**hook, **changes), loader=loader)


def test_every_micro_batch_is_announced_in_its_place_and_an_evaluation_has_no_backward(watched):
    with watched(evaluation={"every": 9, "steps": 2}, activations={"use": "core.recompute", "fraction": 0.0}) as run:
        assert Spy.latest.parts is run.parts
        for step in range(2):
            run.step()
            expected = [(call, 0, micro, "train", step, micro) for micro in range(2) for call in FORWARD + BACKWARD]
            assert Spy.latest.told() == expected
        run.evaluate()
        expected = [(call, 0, micro, "evaluate", batch, micro) for batch in range(2) for micro in range(2) for call in FORWARD]
        assert Spy.latest.told() == expected


def test_hooks_are_given_the_tensors_that_an_action_concerns(watched):
    with watched() as run:
        row = run.step()
        seen = Spy.latest.seen
        losses = [label.item() for name, _, label in seen if name == "after_loss"]
        weight = sum(label.item() for name, _, label in seen if name == "before_backward")
        outputs = [label for name, _, label in seen if name in ("after_forward", "before_loss")]
    assert row["loss"] == pytest.approx(sum(losses) * weight / 2, rel=1e-12)
    assert [tuple(output.shape) for output in outputs] == [(1, 12, 16)] * 4
    assert outputs[0] is outputs[1]
    assert outputs[0].requires_grad


def test_what_a_hook_raises_says_whose_it_is(watched, monkeypatch):
    def fails(*_: object) -> None:
        raise ValueError("no good")

    monkeypatch.setattr(Spy, "after_loss", fails, raising=False)
    with watched() as run, pytest.raises(ValueError, match="no good") as caught:
        run.step()
    assert caught.value.__notes__ == ["in `after_loss` of the scheduler hook Spy"]
    assert is_foreign(caught.value)


def test_recomputation_is_reported_layer_by_layer(watched):
    """Half of four blocks run again, last first, within the backward of their microbatch."""
    with watched(activations={"use": "core.recompute", "fraction": 0.5}) as run:
        run.step()
        seen = [one for one in Spy.latest.seen if one[0].endswith("_backward") or one[1].layer]
    assert [(name, micro.micro, micro.layer, str(micro.phase)) for name, micro, _ in seen] == [
        (*call[:1], micro, *call[1:])
        for micro in range(2)
        for call in (
            ("before_backward", "", "train"),
            ("before_forward", "blocks.1", "recompute"),
            ("before_forward", "blocks.0", "recompute"),
            ("after_backward", "", "train"),
        )
    ]
    assert all(hidden.shape == (1, 12, 8) for _, micro, hidden in seen if micro.layer)


def test_a_wait_comes_before_the_seed(alone, small):
    """What a wait draws must not shift the masks of the layer."""
    losses = []
    for draws in (0, 5):
        with alone(small(model__options={"dropout": 0.5})) as run:
            run.parts.waits.before_layer("blocks.1", lambda draws=draws: torch.rand(draws) if draws else None)
            losses.append(run.step()["loss"])
    assert losses[0] == losses[1]
