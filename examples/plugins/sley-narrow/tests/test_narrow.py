"""`narrow.reducer` against `core.each`, which sums exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_narrow.plugin import sley_gradient_handlers

MIN_NUMEL = 64
(RECORD,) = sley_gradient_handlers()


def gradients(dp: int, handlers: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The reduced gradients of a first step on this rank, by parameter."""
    tables = {
        "plan": 1,
        "run": {"name": "narrow", "steps": 1, "device": "cpu"},
        "model": {"use": "core.llama", "num_layers": 1, "hidden": 16, "heads": 2},
        "data": {"use": "core.text", "source": "python-stdlib", "sequence": 32},
        "batch": {"global_size": 4, "micro_size": 1},
        "optimizer": {"use": "core.sgd", "lr": 0.1},
        "parallel": {"dp": dp},
        "gradient_handlers": handlers,
    }
    with World.join("cpu") as world, assemble(plan_from_dict(tables), world) as run:
        run.step()
        return {entry.name: run.store.gradient(entry).clone() for entry in run.store.entries}


def test_sums_are_those_of_each_within_the_tolerance_of_the_record(ranks: Callable[..., Any]) -> None:
    exact, _ = ranks(2)(gradients, 2, [{"use": "core.each"}])
    narrow, other = ranks(2)(gradients, 2, [{"use": "narrow.reducer", "min_numel": MIN_NUMEL}])
    for name, gradient in exact.items():
        assert narrow[name].equal(other[name]), f"{name} differs between the ranks"
        if gradient.numel() < MIN_NUMEL:
            assert narrow[name].equal(gradient), f"{name} was small and should have travelled as it is"
        else:
            error = (narrow[name] - gradient).norm() / gradient.norm()
            assert 0 < error <= RECORD.tolerance, f"{name} is off by {error:.1e}"


def test_a_group_of_one_rank_is_left_alone(ranks: Callable[..., Any]) -> None:
    (exact,) = ranks(1)(gradients, 1, [])
    (narrow,) = ranks(1)(gradients, 1, [{"use": "narrow.reducer", "min_numel": 0}])
    assert all(narrow[name].equal(gradient) for name, gradient in exact.items())
