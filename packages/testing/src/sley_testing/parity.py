"""Compares two sets of gradients (or weights) by name, and says which parameter is worst.

The error of a parameter is ||other - reference|| / ||reference|| in float64: one number per parameter, so that a small
parameter that is wrong does not drown among large ones that are right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_SHOWN = 5


def relative_errors(reference: Mapping[str, Tensor], other: Mapping[str, Tensor], *, floor: float = 0.0) -> dict[str, float]:
    """Returns the error of every parameter, in the order of `reference`; infinite where a value is not finite.

    floor: a norm of the reference below it counts as `floor`, for gradients that are zero but for rounding.
    Raises AssertionError when the two do not have the same names and shapes.
    """
    _assert_same_layout(reference, other)
    return {name: _error(value, other[name], floor) for name, value in reference.items()}


def assert_close_gradients(
    reference: Mapping[str, Tensor], other: Mapping[str, Tensor], relative: float, *, floor: float = 0.0
) -> None:
    """Asserts that every parameter of `other` is within `relative` of `reference`; the message lists the worst with their
    errors.
    """
    errors = relative_errors(reference, other, floor=floor)
    wrong = sorted(((error, name) for name, error in errors.items() if not error <= relative), reverse=True)
    if wrong:
        lines = [f"  {name} {tuple(reference[name].shape)}: {error:.3g}" for error, name in wrong[:_SHOWN]]
        more = [f"  and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        title = f"{len(wrong)} of {len(errors)} differ by more than {relative:g}, the worst first"
        raise AssertionError("\n".join([title, *lines, *more]))


def assert_same_bits(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Asserts that every tensor of `other` equals that of `reference` in each bit; the message lists those that do not."""
    _assert_same_layout(reference, other)
    wrong = [name for name, value in reference.items() if not _same_bits(value, other[name])]
    if wrong:
        lines = [f"  {name}: {_count_differing(reference[name], other[name])}" for name in wrong[:_SHOWN]]
        raise AssertionError("\n".join([f"{len(wrong)} of {len(reference)} differ", *lines]))


def _assert_same_layout(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Asserts that both have tensors of the same names and shapes."""
    unmatched = sorted(reference.keys() ^ other.keys())
    assert not unmatched, f"not the same names: {', '.join(unmatched)}"
    shapes = {name: (tuple(reference[name].shape), tuple(other[name].shape)) for name in reference}
    wrong = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    assert not wrong, f"not the same shapes: {wrong}"


def _error(reference: Tensor, other: Tensor, floor: float) -> float:
    """Returns the norm of the difference relative to the reference's norm, at least `floor`; inf if it is not finite."""
    expected, found = (tensor.detach().to("cpu", torch.float64) for tensor in (reference, other))
    difference = (found - expected).norm().item()
    if difference == 0.0:
        return 0.0
    scale = max(expected.norm().item(), floor)
    error = difference / scale if scale else math.inf
    return error if math.isfinite(error) else math.inf


def _same_bits(reference: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same dtype and the same bytes."""
    if reference.dtype != other.dtype:
        return False
    pair = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (reference, other)]
    return torch.equal(*pair)


def _count_differing(reference: Tensor, other: Tensor) -> str:
    """Returns in words how many elements differ, and the relative error."""
    if reference.dtype != other.dtype:
        return f"{reference.dtype} against {other.dtype}"
    unequal = reference.detach().cpu() != other.detach().cpu()
    return f"{int(unequal.sum())} of {unequal.numel()} elements, error {_error(reference, other, 0.0):.3g}"
