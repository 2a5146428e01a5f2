"""Sums loss, loss weight and gradient norm of a step over ranks, with the same bits in every layout.

The loss weight is a sum of digits, integers that float64 adds exactly in any order. The losses of microbatches are summed in
the order of the tree.

Adding multiples of one unit is exact as long as the sum fits, so the norm depends on no order. The unit comes from the largest
element of the whole model, below 2^e: every (|g| / 2^e)^2 is below 1 and is cut into three digits of 24 bits.

    |g| / 2^e, squared  =  0.d1 d2 d3 | rest below 2^-72, dropped        sum of d1, sum of d2, sum of d3: int64, over all ranks

The dropped rests of n elements are below n 2^-72 of the largest square: less than float64 shows. This is the pre-rounding of
Demmel and Nguyen (2013), Fast Reproducible Floating-Point Summation, with a maximum that is known beforehand, and digits as in
Collange, Defour, Graillat, Iakymchuk (2015), Numerical Reproducibility for the Parallel Reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.engine.reduction import Totals

if TYPE_CHECKING:
    from sley_core.comm.group import Groups
    from sley_core.engine.buffers import NormGroup

NUM_DIGITS = 4
"""The integer part, and three digits of 24 bits after the point."""

_BASE = 2.0**24


def weight_digits(weights: Iterable[float]) -> list[float]:
    """Returns the summed digits of `weights` [NUM_DIGITS], to add over ranks. The first has the non-finite weights."""
    sums = [0.0] * NUM_DIGITS
    for weight in weights:
        if not math.isfinite(weight):
            sums[0] += weight
            continue
        remainder = weight
        for index in range(NUM_DIGITS):
            digit = math.floor(remainder)
            sums[index] += digit
            remainder = (remainder - digit) * _BASE
    return sums


def weight_of(digits: Sequence[float]) -> float:
    """Returns the weight from the sum of its digits over ranks."""
    total = 0.0
    for digit in reversed(digits):
        total = total / _BASE + digit
    return total


def tree_sum(values: Tensor) -> Tensor:
    """Returns the sum of `values` [n], n at least 1, in the order of `tree.Node(0, n)`: level by level, from the leaves."""
    while values.numel() > 1:
        pairs = values.numel() // 2
        joined = values[: 2 * pairs : 2] + values[1 : 2 * pairs : 2]
        values = torch.cat([joined, values[2 * pairs :]])
    return values[0]


_DIGIT = 24
_NUM_DIGITS = 3
_CHUNK = 1 << 18
"""The number of elements converted to float64 at a time. The sum of their digits is below 2^53, so exact."""
_HALF = 26
"""The number of low bits of a digit's sum, which are sent in a separate float64; sums over up to 2^27 ranks are exact."""


def max_abs(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the largest |g| as a float64 scalar: 0 without tensors, inf if an element is not finite."""
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        largest = torch.maximum(largest, torch.linalg.vector_norm(tensor, math.inf).double())
    return torch.where(largest.isfinite(), largest, math.inf)


def digit_sums(tensors: Iterable[Tensor], largest: Tensor, norm_type: float) -> Tensor:
    """Returns the digit sums of |g|^p, float64 [6] with integer values. largest: the largest |g| of all ranks. norm_type: p."""
    shrink = _power_of_two(-_exponent(largest))
    sums = torch.zeros(_NUM_DIGITS, dtype=torch.int64, device=largest.device)
    for tensor in tensors:
        for chunk in torch.split(tensor.reshape(-1), _CHUNK):
            remainder = chunk.to(torch.float64, copy=True).mul_(shrink)
            remainder = remainder.square_() if norm_type == 2 else remainder.abs_()
            for number in range(_NUM_DIGITS):
                digit = remainder.mul_(2.0**_DIGIT).floor()
                sums[number] += digit.sum().to(torch.int64)
                remainder.sub_(digit)
    high = sums >> _HALF
    return torch.cat([high, sums - (high << _HALF)]).double()


def norm_from_digits(summed: Tensor, largest: Tensor, norm_type: float) -> Tensor:
    """Returns the norm as a float64 scalar, inf if a gradient is not finite. summed: the sum of all ranks' `digit_sums`."""
    halves = summed.to(torch.int64).view(2, _NUM_DIGITS)
    total = torch.zeros((), dtype=torch.float64, device=largest.device)
    for number in reversed(range(_NUM_DIGITS)):
        value = halves[0, number].double() * 2.0**_HALF + halves[1, number].double()
        total = total + value * 2.0 ** (-_DIGIT * (number + 1))
    root = total.sqrt() if norm_type == 2 else total
    return torch.where(largest.isfinite(), root * _power_of_two(_exponent(largest)), math.inf)


def _exponent(largest: Tensor) -> Tensor:
    """Returns the smallest e with `largest` < 2^e; 0 if `largest` is 0 or not finite."""
    exponent: Tensor = torch.frexp(torch.where(largest.isfinite(), largest, 0.0)).exponent
    return exponent


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones((), dtype=torch.float64, device=exponent.device), exponent)


class ExactTotals(Totals):
    """Computes the exact norm and loss. Its construction is a collective over all ranks. loss: float64 [microbatches]."""

    def __init__(self, groups: Groups, gradients: Sequence[NormGroup], loss: Tensor, norm_type: float) -> None:
        self._norm_type = norm_type
        self._loss = loss
        stage = groups["pp"].coord
        # Among the ranks with copies of the same elements, one counts them.
        self._counted = [
            tensor
            for group in gradients
            if groups[group.reduce_group].coord < group.num_shards and stage == group.stages[0]
            for tensor in group.tensors
        ]
        self._largest = max_abs((tensor for group in gradients for tensor in group.tensors), loss.device)
        # A collective over all ranks, at the end of every step, before the totals are summed.
        groups["all"].all_reduce(self._largest, "max", label="the largest gradient").wait()

    def terms(self) -> Tensor:
        norm_terms = [] if math.isinf(self._norm_type) else [digit_sums(self._counted, self._largest, self._norm_type)]
        return torch.cat([*norm_terms, self._loss])

    def result(self, summed: Tensor) -> tuple[Tensor, Tensor]:
        num_losses = self._loss.numel()
        loss = tree_sum(summed[-num_losses:])
        if math.isinf(self._norm_type):
            return loss, self._largest
        return loss, norm_from_digits(summed[:-num_losses], self._largest, self._norm_type)
