"""Counts the pieces in which a reducer sums the gradients of each layer: what its record says of buckets, filled as it fills
them.

backward   |---- layer 3 ----|---- layer 2 ----|---- layer 1 ----|
gradients   a  b    c         a  b    c         a  b    c
buckets    [a  b] [ c         a] [b   c] [      a  b]  [c]           a bucket is of the layer that completes it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sley_core.records import GradientHandlerRecord

if TYPE_CHECKING:
    from sley_estimate.search.choices import Choice


class Pieces(NamedTuple):
    """Holds what is exchanged once each layer's gradients are there: how many elements, and in how many exchanges. Both
    [layers].
    """

    elements: NDArray[np.float64]
    counts: NDArray[np.float64]


def bucket_bytes(reducer: Choice | None) -> float | None:
    """Returns how many bytes of gradients a reducer sums at once, at most; None if it sums those of each layer by themselves,
    or there is no reducer.
    """
    record = reducer.record if reducer else None
    return record.bucket_bytes(reducer.config) if reducer and isinstance(record, GradientHandlerRecord) else None


def per_layer(elements: np.ndarray) -> Pieces:
    """Returns the pieces of a reducer that sums the gradients of each layer by themselves: one for each layer that has any.
    Pure.
    """
    return Pieces(elements.astype(np.float64), (elements > 0).astype(np.float64))


def fewest(sizes: Sequence[Sequence[float]], most: float) -> Pieces:
    """Returns no more pieces than any cut into stages has with buckets of at most `most` elements, all with the last layer:
    full buckets, and one for each gradient that is larger. Pure. sizes: elements of each gradient, by layer.
    """
    every = [size for layer in sizes for size in layer]
    small = [size for size in every if size <= most]
    counts = np.zeros(len(sizes))
    counts[-1] = len(every) - len(small) + (np.ceil(sum(small) / most) if small else 0)
    return Pieces(np.array([float(sum(layer)) for layer in sizes]), counts)


def filled(sizes: Sequence[Sequence[float]], stages: Iterable[Sequence[tuple[int, int]]], most: float) -> Pieces:
    """Returns the pieces of a reducer that fills buckets of at most `most` elements in the order of a backward. Pure.

    sizes: elements of each gradient, by layer. stages: of each stage the first layer of each of its chunks and the one behind
    its last, from the first chunk on; no bucket is of two stages. A gradient that is larger has a bucket of its own.
    """
    elements, counts = np.zeros(len(sizes)), np.zeros(len(sizes))
    for chunks in stages:
        inside, room, at = 0.0, -1.0, None
        for first, last in reversed(chunks):
            for layer in range(last - 1, first - 1, -1):
                for size in reversed(sizes[layer]):
                    if size > room:
                        if at is not None:
                            elements[at] += inside
                            counts[at] += 1
                        inside, room = 0.0, most
                    inside += size
                    room -= size
                    at = layer
        if at is not None:
            elements[at] += inside
            counts[at] += 1
    return Pieces(elements, counts)
