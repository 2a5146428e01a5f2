"""Learning-rate schedules: a correct one, and some with one bug each."""

from collections.abc import Callable
from itertools import count


def naive(config, num_steps: int) -> Callable[[int], float]:
    """Decreases to one half over the run."""
    return lambda step: 1.0 - 0.5 * min(step, num_steps) / num_steps


def counting(config, num_steps: int) -> Callable[[int], float]:
    """Counts its calls instead of using the step."""
    calls = count(1)
    return lambda step: 1.0 / next(calls)


def negative(config, num_steps: int) -> Callable[[int], float]:
    """Is negative after the end of the run."""
    return lambda step: 1.0 - step / num_steps


def short(config, num_steps: int) -> Callable[[int], float]:
    """Divides by zero in a run of one step."""
    return lambda step: max(0.1, 1.0 - step / (num_steps - 1))


def nothing(config, num_steps: int) -> Callable[[int], float]:
    """Rounds to integers, so that all rates are 0."""
    return lambda step: 1 - -(-(step + 1) // (num_steps + 100))
