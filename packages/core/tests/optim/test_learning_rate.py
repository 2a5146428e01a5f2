"""Learning rates: exact at their ends, rising in the warm-up, falling after it, never outside [min_ratio, 1]."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.errors import PlanError
from sley_core.optim.config import ConstantConfig, CosineConfig, LinearConfig, WarmupStableDecayConfig
from sley_core.optim.learning_rate import SHAPES, Factor, check_learning_rate, constant, cosine, linear, warmup_stable_decay
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_testing.plans import small_plan

FALLING: list[tuple[Any, Any]] = [
    (linear, LinearConfig),
    (cosine, CosineConfig),
    (warmup_stable_decay, WarmupStableDecayConfig),
]
falling = pytest.mark.parametrize(("build", "table"), FALLING)


def curve(factor: Factor, num_steps: int) -> list[float]:
    return [factor(step) for step in range(num_steps)]


def test_constant_is_1_from_the_first_step() -> None:
    assert curve(constant(ConstantConfig(), 5), 5) == [1.0] * 5


def test_a_warm_up_starts_above_0_and_ends_at_1() -> None:
    assert curve(constant(ConstantConfig(warmup_steps=4), 6), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_between_exact_ends() -> None:
    assert curve(linear(LinearConfig(min_ratio=0.0), 5), 5) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert curve(linear(LinearConfig(warmup_steps=2, min_ratio=0.5), 6), 6) == [0.5, 1.0, 0.875, 0.75, 0.625, 0.5]


def test_cosine_is_half_way_in_the_middle() -> None:
    values = curve(cosine(CosineConfig(min_ratio=0.1), 101), 101)
    assert (values[0], values[-1]) == (1.0, 0.1)
    assert values[50] == pytest.approx(0.55)
    assert values[25] == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)


def test_warmup_stable_decay_has_all_three_parts() -> None:
    table = WarmupStableDecayConfig(warmup_steps=2, decay_steps=4, min_ratio=0.0)
    assert curve(warmup_stable_decay(table, 10), 10) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_the_fall_is_a_tenth_of_the_run_where_nothing_is_said() -> None:
    values = curve(warmup_stable_decay(WarmupStableDecayConfig(), 95), 95)
    assert sum(value < 1.0 for value in values) == 10


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_the_shape_of_the_fall(shape: str, middle: float) -> None:
    table = WarmupStableDecayConfig.model_validate({"decay_steps": 4, "shape": shape, "min_ratio": 0.0})
    values = curve(warmup_stable_decay(table, 8), 8)
    assert (values[3], values[7]) == (1.0, 0.0)
    assert values[5] == pytest.approx(middle)


@pytest.mark.parametrize(("build", "table"), FALLING[:2])
def test_after_its_fall_a_rate_stays(build: Any, table: Any) -> None:
    values = curve(build(table(decay_steps=3, min_ratio=0.25), 8), 8)
    assert values[0] == 1.0
    assert 0.25 < values[2] < values[1] < 1.0
    assert values[3:] == [0.25] * 5


@falling
def test_beyond_the_run_the_rate_stays(build: Any, table: Any) -> None:
    assert build(table(min_ratio=0.25), 10)(1000) == 0.25


@falling
def test_no_step_is_spent_at_rate_0_unless_asked_for(build: Any, table: Any) -> None:
    assert min(curve(build(table(warmup_steps=3), 20), 20)) == 0.1


@falling
def test_a_run_of_one_step(build: Any, table: Any) -> None:
    assert 0.0 <= build(table(), 1)(0) <= 1.0


def test_a_run_shorter_than_its_warm_up_never_reaches_1() -> None:
    assert curve(cosine(CosineConfig(warmup_steps=10), 4), 4) == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("values", "key"), [({"warmup_steps": 6, "decay_steps": 5}, "decay_steps"), ({"warmup_steps": 10}, "warmup_steps")]
)
def test_parts_that_do_not_fit_into_the_run_are_refused(values: dict[str, Any], key: str) -> None:
    with pytest.raises(PlanError, match="> 10 steps") as error:
        warmup_stable_decay(WarmupStableDecayConfig(**values), 10)
    assert error.value.diagnostics[0].path == ("learning_rate", key)


@settings(deadline=None)
@given(progress=st.lists(st.floats(0, 1), min_size=2), shape=st.sampled_from(sorted(SHAPES)))
def test_a_shape_goes_from_1_to_0_and_never_rises(progress: list[float], shape: str) -> None:
    values = [SHAPES[shape](at) for at in (0.0, *sorted(progress), 1.0)]
    assert (values[0], values[-1]) == (1.0, 0.0)
    assert values == sorted(values, reverse=True)


@falling
@settings(deadline=None)
@given(data=st.data())
def test_any_rate_rises_then_falls_between_its_ends(build: Any, table: Any, data: st.DataObject) -> None:
    num_steps = data.draw(st.integers(1, 200))
    decay_steps = data.draw(st.integers(1, num_steps))
    warmup_steps = data.draw(st.integers(0, num_steps - decay_steps))
    min_ratio = data.draw(st.floats(0, 1))
    config = table(warmup_steps=warmup_steps, decay_steps=decay_steps, min_ratio=min_ratio)
    values = curve(build(config, num_steps), num_steps)
    rise, fall = values[:warmup_steps], values[warmup_steps:]
    assert rise == [(step + 1) / warmup_steps for step in range(warmup_steps)]
    assert fall == sorted(fall, reverse=True)
    assert all(min_ratio <= value <= 1.0 for value in fall)
    if table is WarmupStableDecayConfig:
        assert values[-1] == min_ratio
        assert all(value == 1.0 for value in fall[: len(fall) - decay_steps])


def plan_with(schedule: dict[str, Any]) -> Plan:
    return plan_from_dict(small_plan(run__steps=10, learning_rate=schedule))


def test_the_plans_check_finds_parts_that_do_not_fit() -> None:
    plan = plan_with({"use": "core.warmup_stable_decay", "warmup_steps": 8, "decay_steps": 3})
    (problem,) = check_learning_rate(plan)
    assert (problem.code, problem.path) == ("learning-rate-steps", ("learning_rate", "decay_steps"))
    assert "8 + 3 > 10" in problem.message


@pytest.mark.parametrize(
    "schedule",
    [
        {"use": "core.warmup_stable_decay", "warmup_steps": 8, "decay_steps": 2},
        {"use": "core.cosine", "warmup_steps": 100},
        {"use": "core.constant"},
    ],
)
def test_the_plans_check_is_silent_about_what_fits(schedule: dict[str, Any]) -> None:
    assert list(check_learning_rate(plan_with(schedule))) == []
