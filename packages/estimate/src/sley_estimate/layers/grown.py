"""Finds the work of a layer on any number of samples, from its work on one and on two.

Shapes are linear in the number of samples, and so are bytes and FLOPs of every operator, but for what belongs to weights.
A slice of a sequence over n ranks is 1/n of a sample: of its positions, and in attention of the heads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from sley_estimate.layers.operators import PHASES, LayerWork, Operator

ATTENTION = "attention"
"""The operator as which `FusedKernels` notes an attention."""

TENSORS, COPIED = 4, 3
"""q, k, v and the context, and how often a copy moves what it copies: as `OperatorRecorder` counts it."""


def grown(one: LayerWork, two: LayerWork, samples: float) -> LayerWork:
    """Returns the work on `samples` samples, a whole number or a share of one: bytes and FLOPs of each operator lie on the line
    through those of one sample and of two. Pure.

    one, two: the same layer's work on so many samples. Operators of a name that came more often with two of them than with one,
    as those of a loss that is taken in pieces, are in proportion to those on two.
    """
    phases = {name: _operators(one.of(name), two.of(name), samples) for name in PHASES}
    return LayerWork(
        **phases,
        num_parameters=one.num_parameters,
        output_bytes=_line(one.output_bytes, two.output_bytes, samples),
        kept_bytes=_line(one.kept_bytes, two.kept_bytes, samples),
        passing_bytes=_line(one.passing_bytes, two.passing_bytes, samples),
    )


def with_copies(work: LayerWork) -> LayerWork:
    """Returns the work of a layer whose attentions swap what they read and write between ranks: every forward, recomputation
    and backward of an attention has a copy more of each of q, k, v and the context, which are laid out anew for the swap. Pure.
    """
    forward = work.forward
    return replace(
        work,
        forward=_with_copies(forward, forward),
        recompute=_with_copies(work.recompute, work.recompute),
        backward=_with_copies(work.backward, forward),
        input_gradient=_with_copies(work.input_gradient, forward),
    )


def _with_copies(operators: Sequence[Operator], attending: Sequence[Operator]) -> tuple[Operator, ...]:
    """Returns `operators` and behind them four copies for each attention in `attending`: of q, k, v and the context."""
    each = [one.num_bytes for one in attending if one.name == ATTENTION]
    copies = [Operator("copy", COPIED * num_bytes // TENSORS) for num_bytes in each for _ in range(TENSORS)]
    return (*operators, *copies)


def _operators(one: Sequence[Operator], two: Sequence[Operator], samples: float) -> tuple[Operator, ...]:
    """Returns the operators on `samples` samples, in the order of those on two. They are paired by name; a name that is not as
    often in both has no pair.
    """
    firsts: dict[str, list[Operator]] = defaultdict(list)
    for each in one:
        firsts[each.name].append(each)
    counts = Counter(each.name for each in two)
    beside = {name: iter(some) for name, some in firsts.items() if len(some) == counts[name]}
    return tuple(_operator(next(beside[of.name]) if of.name in beside else None, of, samples) for of in two)


def _operator(first: Operator | None, second: Operator, samples: float) -> Operator:
    """Returns one operator on `samples` samples; where there is none on one sample (None), in proportion to that on two."""
    if first is None:
        share = samples / 2
        return replace(second, num_bytes=round(second.num_bytes * share), flops=round(second.flops * share))
    num_bytes = _line(first.num_bytes, second.num_bytes, samples)
    return replace(second, num_bytes=num_bytes, flops=_line(first.flops, second.flops, samples))


def _line(one: int, two: int, samples: float) -> int:
    """Returns the value at `samples` of the line through (1, one) and (2, two)."""
    return round(one + (two - one) * (samples - 1))
