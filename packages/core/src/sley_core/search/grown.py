"""The work of a layer on any number of samples, from its work on one and on two.

Shapes are linear in the number of samples, and so are bytes and FLOPs of every operator, but for what belongs to weights.
A slice of a sequence over n ranks is 1/n of a sample: of its positions, and in attention of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from sley_core.estimate.layers.operators import PHASES, LayerWork, Operator


def grown(one: LayerWork, two: LayerWork, samples: float) -> LayerWork:
    """Returns the work on `samples` samples, a whole number or a share of one. Pure.

    one, two: the same layer's on so many. Where it ran other operators with two of them than with one, as a loss that is
    taken in pieces does, the work is in proportion to that on two.
    """
    phases = {name: _operators(one.of(name), two.of(name), samples) for name in PHASES}
    return LayerWork(
        **phases,
        num_parameters=one.num_parameters,
        output_bytes=_line(one.output_bytes, two.output_bytes, samples),
        kept_bytes=_line(one.kept_bytes, two.kept_bytes, samples),
    )


def _operators(one: Sequence[Operator], two: Sequence[Operator], samples: float) -> tuple[Operator, ...]:
    if [each.name for each in one] != [each.name for each in two]:
        share = samples / 2
        return tuple(Operator(of.name, round(of.num_bytes * share), round(of.flops * share), of.dtype) for of in two)
    return tuple(
        Operator(
            first.name,
            _line(first.num_bytes, second.num_bytes, samples),
            _line(first.flops, second.flops, samples),
            first.dtype,
        )
        for first, second in zip(one, two, strict=True)
    )


def _line(one: int, two: int, samples: float) -> int:
    """Returns the value at `samples` of the line through (1, one) and (2, two)."""
    return round(one + (two - one) * (samples - 1))
