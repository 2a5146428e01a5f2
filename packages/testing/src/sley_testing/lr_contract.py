"""Tests what every learning-rate schedule must pass; the tests of a plugin inherit them.

    class TestRoot(LRScheduleContract):
        learning_rate = {"use": "root.schedule", "warmup_steps": 10}

A schedule is a pure function of the step: a resumed run asks it for the remaining steps, and must get the rates that an
uninterrupted run has.

Since core 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_core.errors import SleyError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan
from sley_testing.runs import record

NUM_LATE = 10
"""A program of one's own may take more steps than the plan says."""

LR = 0.01


class LRScheduleContract:
    """Tests a learning-rate schedule: inherit, set `learning_rate` to its table, and pytest does the rest. num_steps: of the
    run.
    """

    learning_rate: ClassVar[dict[str, Any]]
    num_steps: ClassVar[int] = 100

    def test_every_step_has_a_rate(self) -> None:
        """A finite number, not negative; also of the steps after the plan's last one. Some rate is above 0."""
        rates = self._rates(self.num_steps)
        for step, rate in enumerate(rates):
            is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
            assert is_number, f"the factor of step {step} is a {type(rate).__name__}, not a number"
            assert math.isfinite(rate), f"the factor of step {step} is {rate}"
            assert rate >= 0, f"the factor of step {step} is {rate}: the weights would go uphill"
        assert max(rates[: self.num_steps]) > 0, "no step of the run has a rate above 0: nothing is learnt"

    def test_a_rate_depends_on_its_step_alone(self) -> None:
        """Not on earlier calls: the steps are asked backwards, and of a new schedule, as after a restart."""
        rates = self._rates(self.num_steps)
        backwards = self._factor(self.num_steps)
        for step in reversed(range(self.num_steps)):
            found = backwards(step), self._factor(self.num_steps)(step) if step % 10 == 0 else rates[step]
            assert found == (rates[step], rates[step]), (
                f"the factor of step {step} is {rates[step]} when the steps are asked for in order, and {found} "
                "when it is asked for backwards or alone: a run that goes on from there has other rates"
            )

    @pytest.mark.parametrize("num_steps", [1, 2, 3])
    def test_a_short_run_has_rates_or_is_refused(self, num_steps: int) -> None:
        """By a SleyError that says why."""
        try:
            rates = self._rates(num_steps)
        except SleyError:
            return
        except Exception as error:
            raise AssertionError(f"with run.steps = {num_steps}: {type(error).__name__}: {error}") from error
        assert all(math.isfinite(rate) for rate in rates), f"with run.steps = {num_steps} the factors are {rates}"

    def test_a_run_takes_its_rates(self, texts: Path) -> None:
        """The rows of a run have the plan's rate times the factor."""
        plan = small_plan(optimizer__lr=LR, run__steps=self.num_steps, learning_rate=self.learning_rate)
        found = [row["lr"] for row in record(plan, 3, folder=texts).rows]
        wanted = [LR * rate for rate in self._rates(self.num_steps)[:3]]
        assert found == pytest.approx(wanted), f"a run has the rates {found}, not {wanted}"

    def _factor(self, num_steps: int) -> Callable[[int], float]:
        """Returns the schedule of a run of `num_steps`, made anew."""
        factor: Callable[[int], float] = plan_from_dict(small_plan(learning_rate=self.learning_rate)).learning_rate.build(
            num_steps
        )
        return factor

    def _rates(self, num_steps: int) -> list[float]:
        """Returns the factors of all steps of a run and of NUM_LATE more, asked for in order."""
        factor = self._factor(num_steps)
        return [factor(step) for step in range(num_steps + NUM_LATE)]
