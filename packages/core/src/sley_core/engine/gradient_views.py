"""Read access to this rank's gradients: of one entry, of all together, and which part of an entry this rank gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from sley_core.engine.book import Entry
from sley_core.engine.buffers import GradientBuffer, Piece, Span, pieces_of
from sley_core.engine.canonical.slot import CanonicalSlot
from sley_core.engine.slot import LooseSlot, Slot, frozen, without_gradients


class GradientViews:
    """Gives readers access to the gradients; the subclass `GradientStore` lays them out and fills them."""

    def __init__(self) -> None:
        self.buffers: list[GradientBuffer] = []
        self._apart: list[GradientBuffer] = []
        self._slots: dict[Entry, Slot] = {}
        self._order: list[Slot] = []
        self._cut: dict[Entry, GradientBuffer] = {}
        self._seen: list[Entry] = []
        self._are_freed = False

    def __contains__(self, entry: Entry) -> bool:
        """Whether `entry` has a slot: it is trainable, or was when this step began."""
        return entry in self._slots

    def gradient(self, entry: Entry) -> Tensor:
        """Returns the gradient of `entry`, a view: its parameter's shape, the store's dtype.

        Raises RunError if it is frozen or was discarded by an offload, and `gradient-sharded` once a reducer leaves only a part
        of it to this rank.
        """
        if entry not in self._slots:
            raise frozen(entry)
        if self._are_freed:
            raise without_gradients()
        if entry in self._cut:
            self._cut[entry].check_whole(entry)
        return self._slots[entry].view

    def part(self, entry: Entry) -> Tensor:
        """Returns the part of the gradient of `entry` that this rank gets, a view: all of it, or the elements of `span`, in its
        shape.
        """
        if self._are_freed:
            raise without_gradients()
        return self._cut[entry].parts[entry] if entry in self._cut else self.gradient(entry)

    def parts(self, entries: Sequence[Entry]) -> list[Tensor | None]:
        """Returns `part` of each of `entries`, None for a frozen one; one call, since every step reads all of them."""
        if self._are_freed:
            raise without_gradients()
        cut, slots = self._cut, self._slots
        return [
            cut[entry].parts[entry] if entry in cut else slots[entry].view if entry in slots else None
            for entry in entries
        ]

    def span(self, entry: Entry) -> Span | None:
        """Returns which elements of its gradient this rank gets, maybe none; None if the reducer leaves the whole gradient to
        each rank.
        """
        return self._cut[entry].spans[entry] if entry in self._cut else None

    def num_shards(self, entry: Entry) -> int:
        """Returns how many ranks of the entry's reduce group share one copy of its reduced gradient; 1 if each has all of
        it.
        """
        return self._cut[entry].num_shards if entry in self._cut else 1

    def partial(self, entry: Entry) -> list[Tensor]:
        """Returns the partial sums that a reducer combines with other ranks', if sums are canonical: one per node of each use
        of the parameter, in the order of `canonical.nodes`; the first is the gradient's view.
        """
        slot = self._slots[entry]
        assert isinstance(slot, CanonicalSlot), f"{entry.name} is summed in any order"
        return slot.rows

    @property
    def entries(self) -> list[Entry]:
        """The entries that have a slot, in the order in which they are reported ready."""
        return [slot.entry for slot in self._order]

    @property
    def seen_order(self) -> list[Entry]:
        """The entries in the order in which the first step completed them; empty before. Local to this rank."""
        return list(self._seen)

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients; those outside the buffers count while they exist."""
        loose = sum(slot.view.nbytes for slot in self._order if isinstance(slot, LooseSlot))
        return sum(buffer.num_bytes for buffer in (*self.buffers, *self._apart)) + loose

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and view of each gradient, whether or not it has memory."""
        return ((slot.entry.name, slot.view) for slot in self._order)

    def pieces(self) -> Iterator[Piece]:
        """Yields all gradients in as few tensors as possible: this rank's part of each buffer, then lists of the unbuffered
        ones.
        """
        return pieces_of([*self.buffers, *self._apart], (slot for slot in self._order if isinstance(slot, LooseSlot)))
