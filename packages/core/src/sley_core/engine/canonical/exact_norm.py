"""The norm of all gradients, bit for bit the same however their elements lie on ranks, in buffers, shards and slices.

Adding multiples of one unit is exact as long as the sum fits, and so does not depend on the order. The unit comes from the
largest element of the whole model, below 2^e: every (|g| / 2^e)^2 is below 1 and is cut into three digits of 24 bits, whose
sums are integers.

    |g| / 2^e, squared  =  0.d1 d2 d3 | rest below 2^-72, dropped        sum of d1, sum of d2, sum of d3: int64, over all ranks

The dropped rest depends on the element and on e only. It is below n 2^-72 of the largest square, for n elements: less than
float64 shows. This is the pre-rounding of Demmel and Nguyen (2013), Fast Reproducible Floating-Point Summation, with a maximum
that is known beforehand, and digits as in Collange, Defour, Graillat, Iakymchuk (2015), Numerical Reproducibility for the
Parallel Reduction. The squares of float32 elements within 2^-24 of the largest are not rounded at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_DIGIT = 24
_NUM_DIGITS = 3
_CHUNK = 1 << 18
"""Elements converted to float64 at a time; a sum of as many digits is below 2^53, so exact."""
_HALF = 26
"""Low bits of a digit's sum that are sent in one float64, apart from the high ones; sums over up to 2^27 ranks are exact."""


def largest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the largest |g|, a float64 scalar; 0 if there is none, inf if an element is not finite."""
    most = torch.zeros((), dtype=torch.float64, device=device)
    for one in tensors:
        most = torch.maximum(most, torch.linalg.vector_norm(one, math.inf).double())
    return torch.where(most.isfinite(), most, math.inf)


def digits(tensors: Iterable[Tensor], most: Tensor, kind: float) -> Tensor:
    """Returns the sums of the digits of |g|^kind in units of `most`, the largest |g| of all ranks: float64 [6], whole numbers
    that may be added over ranks in any order.
    """
    shrink = _power_of_two(-_exponent(most))
    sums = torch.zeros(_NUM_DIGITS, dtype=torch.int64, device=most.device)
    for one in tensors:
        for chunk in torch.split(one.reshape(-1), _CHUNK):
            left = chunk.to(torch.float64, copy=True).mul_(shrink)
            left = left.square_() if kind == 2 else left.abs_()
            for number in range(_NUM_DIGITS):
                digit = left.mul_(2.0**_DIGIT).floor()
                sums[number] += digit.sum().to(torch.int64)
                left.sub_(digit)
    high = sums >> _HALF
    return torch.cat([high, sums - (high << _HALF)]).double()


def norm_of(summed: Tensor, most: Tensor, kind: float) -> Tensor:
    """Returns the norm, a float64 scalar, from the sum of all ranks' `digits`; inf if a gradient is not finite."""
    halves = summed.to(torch.int64).view(2, _NUM_DIGITS)
    total = torch.zeros((), dtype=torch.float64, device=most.device)
    for number in reversed(range(_NUM_DIGITS)):
        value = halves[0, number].double() * 2.0**_HALF + halves[1, number].double()
        total = total + value * 2.0 ** (-_DIGIT * (number + 1))
    root = total.sqrt() if kind == 2 else total
    return torch.where(most.isfinite(), root * _power_of_two(_exponent(most)), math.inf)


def _exponent(most: Tensor) -> Tensor:
    """Returns the least e with `most` < 2^e; 0 if `most` is 0 or not finite."""
    exponent: Tensor = torch.frexp(torch.where(most.isfinite(), most, 0.0)).exponent
    return exponent


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones((), dtype=torch.float64, device=exponent.device), exponent)
