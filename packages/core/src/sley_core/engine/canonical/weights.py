"""The loss weight of the global batch as a sum without an order: of digits, whole numbers that float64 adds exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

NUM_DIGITS = 4
"""What is before the point, and three digits of 24 bits behind it."""

_BASE = 2.0**24


def weight_digits(weights: Iterable[float]) -> list[float]:
    """Returns the sum of the digits of `weights`, of one micro-batch each: [NUM_DIGITS], to be added over ranks.

    What is below 2^-72 is dropped. A weight that is not finite is in the first.
    """
    sums = [0.0] * NUM_DIGITS
    for weight in weights:
        if not math.isfinite(weight):
            sums[0] += weight
            continue
        left = weight
        for at in range(NUM_DIGITS):
            digit = math.floor(left)
            sums[at] += digit
            left = (left - digit) * _BASE
    return sums


def weight_of(digits: Sequence[float]) -> float:
    """Returns the weight that `digits` are the sum of."""
    total = 0.0
    for digit in reversed(digits):
        total = total / _BASE + digit
    return total
