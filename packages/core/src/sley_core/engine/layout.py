"""The layout of gradients: their buffers, and the order in which they are reported; planned by a reducer, followed by the
store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from sley_core.engine.book import Entry
from sley_core.engine.cuts import Cut


class Layout(NamedTuple):
    """Says how a reducer wants the gradients: which lie side by side, and in which order they are reported ready.

    buffers: lists of entries of one family. order: the same entries; not their concatenation if buffers of several reduce
    groups are filled side by side. Equal on all ranks of every reduce group. loose: entries of `order` that lie in no buffer,
    because nobody reduces them. cuts: for each buffer, the part whose sum this rank gets; None, or no list at all, for the
    whole. is_fixed: whether it must not change, since masters and optimizer states follow it: then no parameter may be frozen
    or unfrozen.
    """

    buffers: list[list[Entry]]
    order: list[Entry]
    loose: Sequence[Entry] = ()
    cuts: Sequence[Cut | None] = ()
    is_fixed: bool = False

    @property
    def cut_lists(self) -> list[tuple[list[Entry], Cut | None]]:
        """The buffers that are not empty, each with its cut."""
        cuts = self.cuts or [None] * len(self.buffers)
        return [(entries, cut) for entries, cut in zip(self.buffers, cuts, strict=True) if entries]

    def check(self, trainable: Sequence[Entry]) -> None:
        """Asserts that `order`, and `buffers` with `loose`, name each of `trainable` (in the order of the book) exactly
        once.
        """
        for entries in (self.order, [entry for buffer in (*self.buffers, self.loose) for entry in buffer]):
            named = sorted(entry.index for entry in entries)
            assert named == [entry.index for entry in trainable], "a layout names every trainable entry once"


class Piece(NamedTuple):
    """Groups gradients that enter a norm with the same factor: tensors of one dtype, their reduce group, and how many stages
    hold a copy.

    num_shards: how many ranks of the reduce group share one copy, each with other elements. stages: those that hold a copy, if
    the tensors are of a buffer.
    """

    tensors: list[Tensor]
    reduce_group: str
    num_holders: int
    num_shards: int = 1
    stages: tuple[int, ...] = ()


Planner = Callable[[list[Entry]], Layout]
"""Lays out the given entries, which come in reverse order of use."""


def loose(entries: list[Entry]) -> Layout:
    """Returns a layout without buffers, for a run without a reduction."""
    return Layout([], entries, entries)


def by_reduce_group(entries: list[Entry]) -> Layout:
    """Returns a layout with one buffer for each family of entries, in the order given."""
    families: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        families.setdefault(entry.family, []).append(entry)
    return Layout(list(families.values()), entries)
