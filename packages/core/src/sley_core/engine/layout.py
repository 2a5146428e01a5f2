"""Where gradients lie, and in which order they are reported: what a reducer plans and the store follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from sley_core.engine.book import Entry


class Layout(NamedTuple):
    """How a reducer wants the gradients: which lie side by side, and in which order they are reported ready.

    buffers: lists of entries of one family. order: the same entries; where buffers of several reduce groups
    fill up side by side it is not their concatenation. Equal on all ranks of every reduce group.
    loose: entries of `order` that lie in no buffer, because nobody reduces them.
    """

    buffers: list[list[Entry]]
    order: list[Entry]
    loose: Sequence[Entry] = ()


class Piece(NamedTuple):
    """Gradients that count alike: tensors of one dtype, their reduce group, and how many stages hold a copy."""

    tensors: list[Tensor]
    reduce_group: str
    num_holders: int


Planner = Callable[[list[Entry]], Layout]
"""Lays out the given entries, which come in reverse order of use."""


def loose(entries: list[Entry]) -> Layout:
    """Returns a layout without buffers: for a run without a reduction."""
    return Layout([], entries, entries)


def by_reduce_group(entries: list[Entry]) -> Layout:
    """Returns a layout with one buffer for each family of entries, in the order given."""
    families: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        families.setdefault(entry.family, []).append(entry)
    return Layout(list(families.values()), entries)
