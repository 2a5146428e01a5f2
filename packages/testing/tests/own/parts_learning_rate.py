"""Schedules of the learning rate: one that holds its contract, and some that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count


def naive(config, num_steps: int) -> Callable[[int], float]:
    """Falls by half over the run, and stays there."""
    return lambda step: 1.0 - 0.5 * min(step, num_steps) / num_steps


def counting(config, num_steps: int) -> Callable[[int], float]:
    """Counts its calls in place of the steps."""
    calls = count(1)
    return lambda step: 1.0 / next(calls)


def negative(config, num_steps: int) -> Callable[[int], float]:
    """Goes below 0 after the run's end."""
    return lambda step: 1.0 - step / num_steps


def short(config, num_steps: int) -> Callable[[int], float]:
    """Divides by the steps that are left after the first."""
    return lambda step: max(0.1, 1.0 - step / (num_steps - 1))


def nothing(config, num_steps: int) -> Callable[[int], float]:
    """Takes whole numbers for shares."""
    return lambda step: 1 - -(-(step + 1) // (num_steps + 100))


def none(config, num_steps: int) -> Callable[[int], float | None]:
    """Has no rate for the steps after the run's end."""
    return lambda step: 1.0 if step < num_steps else None
