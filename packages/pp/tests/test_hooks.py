"""Tests that scheduler hooks get every action of every schedule in order, with chunk, micro-batch and phase."""

from __future__ import annotations

import pytest

from sley_core.actions.action import Kind
from sley_testing.runs import running

SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]
MICROS = 3
CALLS = [f"{when}_{what}" for what in ("forward", "loss", "backward") for when in ("before", "after")]


class Spy:
    """Records (call, chunk, micro-batch, phase, layer) of each call, and whether it has tensors."""

    def __init__(self):
        self.calls = []
        self.gave = []

    def __getattr__(self, name):
        if name not in CALLS:
            raise AttributeError(name)

        def note(micro, what):
            self.calls.append((name, micro.chunk, micro.micro, str(micro.phase), micro.layer))
            self.gave.append((name, str(micro.phase), what is not None))

        return note


def record_all_calls(plans, folder):
    return [record_calls(tables, folder) for tables in plans]


def record_calls(tables, folder):
    """Returns the hook's calls in a second step and in an evaluation, the schedule's list, and the layers per chunk."""
    spy = Spy()
    with running(tables, folder) as run:
        run.caller.hooks.append(spy)
        run.step()
        spy.calls.clear()
        spy.gave.clear()
        run.step()
        step = list(spy.calls)
        spy.calls.clear()
        run.evaluate()
        names = [[layer.name for layer in layers] for layers in run.stepper.executor.chunks]
        schedule = run.plan.pipeline.build()
        actions = schedule.lists(run.topology.pp, MICROS)[run.groups["pp"].coord]
        return step, list(spy.calls), actions, names, set(spy.gave)


def expected_calls(actions, names, *, again):
    """Returns the expected calls of a step's actions. again: the recomputed layers."""
    found = []
    for action in actions:
        place = action.chunk, action.micro
        match action.kind:
            case Kind.FORWARD:
                found += _around("forward", place, "train")
                if "head" in names[action.chunk]:
                    found += _around("loss", place, "train")
            case Kind.BACKWARD | Kind.INPUT_GRADIENT:
                before, after = _around("backward", place, "train")
                layers = [name for name in reversed(names[action.chunk]) if name in again]
                found += [before, *(("before_forward", *place, "recompute", name) for name in layers), after]
            case Kind.WEIGHT_GRADIENT:
                found += _around("backward", place, "weights")
    return found


def _around(what, place, phase):
    return [(f"{when}_{what}", *place, phase, "") for when in ("before", "after")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_hooks_get_every_action_in_the_order_of_the_schedule(ranks, small, own, fraction):
    """They get forward, loss, backward and separate weight gradients, and each recomputed layer once, in its backward."""
    changes = {"batch": {"global_size": 6, "micro_size": 2}, "evaluation": {"every": 9, "steps": 1}}
    changes |= {"activations": {"use": "core.recompute", "fraction": fraction}}
    plans = [small(schedule, 2, **changes) for schedule in SCHEDULES]
    for name, stages in zip(SCHEDULES, zip(*ranks(2)(record_all_calls, plans, own), strict=True), strict=True):
        check_order(name, stages, {f"blocks.{at}" for at in range(round(4 * fraction))})


def check_order(schedule, stages, again):
    whole = []
    for step, evaluation, actions, names, gave in stages:
        assert step == expected_calls(actions, names, again=again), schedule
        own = {layer for chunk in names for layer in chunk}
        whole += own
        recomputed = [(layer, micro) for _, _, micro, phase, layer in step if phase == "recompute"]
        assert len(recomputed) == len(set(recomputed)) == MICROS * len(again & own)
        assert all(phase == "evaluate" for *_, phase, _ in evaluation)
        forwards = [(action.chunk, action.micro) for action in actions if action.kind is Kind.FORWARD]
        assert [place[1:3] for place in evaluation if place[0] == "before_forward"] == forwards
        assert not any("backward" in call for call, *_ in evaluation)
        assert ("before_backward", "train", True) in gave
        assert ("before_backward", "train", False) not in gave
    assert sorted(whole) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "embed", "head"]
