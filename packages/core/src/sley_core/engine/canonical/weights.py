"""The loss weight of the global batch as a sum that does not depend on the order: of digits, integers that float64 adds
exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

NUM_DIGITS = 4
"""The integer part, and three digits of 24 bits after the point."""

_BASE = 2.0**24


def weight_digits(weights: Iterable[float]) -> list[float]:
    """Returns the sum of the digits of `weights`, one per micro-batch: [NUM_DIGITS], to be added over ranks.

    Bits below 2^-72 are dropped. A weight that is not finite is added to the first digit.
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
    """Returns the weight whose digits' sum is `digits`."""
    total = 0.0
    for digit in reversed(digits):
        total = total / _BASE + digit
    return total
