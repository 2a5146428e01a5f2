"""What code outside autograd can add to gradients, and how it says that a contribution was the last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from sley_core.engine.book import Entry
from sley_core.engine.canonical.order import Arrival, CanonicalOrder
from sley_core.engine.gradient_views import GradientViews
from sley_core.engine.slot import Autograd, Slot, by_autograd
from sley_core.engine.step_state import StepState


class Contributions(GradientViews):
    """Takes contributions to gradients; the subclass `GradientStore` decides what each makes ready.

    canonical: the numbering of micro-batches if gradients are summed in one order whatever the layout; else None.
    """

    def __init__(self, state: StepState, canonical: CanonicalOrder | None) -> None:
        super().__init__()
        self.state = state
        self.canonical = canonical
        self._products: set[Entry] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients, and of the partial sums that exist during a step."""
        return super().num_bytes + (self.canonical.spares.num_bytes if self.canonical is not None else 0)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors held for gradients, by name: those of `GradientViews.held`, and partial sums."""
        yield from super().held()
        if self.canonical is not None:
            yield from ((f"partial sum {at}", one) for at, one in enumerate(self.canonical.spares.made))

    def check_open(self, entry: Entry) -> None:
        """Raises RunError `gradient-complete` if no step runs and the gradient of `entry` is that of the step before."""
        self._slots[entry].check_open(self.state)

    def add(self, entry: Entry, gradient: Tensor) -> None:
        """Adds a contribution computed outside autograd, of the parameter's shape and any floating dtype; may report the entry
        ready.
        """
        self.put(entry, gradient)
        self.passed(entry)

    def put(self, entry: Entry, gradient: Tensor, layer: str = "") -> None:
        """Adds as `add` does, but does not count the pass: autograd, or a later call of `passed`, says that it was the last.

        layer: the layer whose use of the parameter it comes from; only needed if several hold it and sums are canonical.
        """
        slot = self._entered(entry, layer)
        slot.take(gradient)
        slot.contributions += 1

    def add_of_micros(self, entry: Entry, gradients: Mapping[int, Tensor], layer: str) -> None:
        """Adds contributions keyed by the global number of their micro-batch, and may report the entry ready. For canonical
        sums: a communicator brings the contributions of other ranks' micro-batches to this rank's shard.
        """
        slot = self._slots[entry]
        slot.check_open(self.state)
        for micro, gradient in gradients.items():
            slot.enter(Arrival(entry.layers.index(layer), micro))
            slot.take(gradient)
            slot.contributions += 1
        self._passed(slot)

    def add_product(self, entry: Entry, left: Tensor, right: Tensor) -> None:
        """Adds left^T right, for left [n, out] and right [n, in] in the store's dtype, without allocating; may report the entry
        ready.
        """
        self.put_product(entry, left, right)
        self.passed(entry)

    def put_product(self, entry: Entry, left: Tensor, right: Tensor, layer: str = "") -> None:
        """Adds as `add_product` does, but does not count the pass, as `put`."""
        slot = self._entered(entry, layer)
        slot.take_product(left, right)
        slot.contributions += 1

    def passed(self, entry: Entry) -> None:
        """Counts a pass: the running action has contributed to `entry`, once or for the last time. May report entries ready."""
        self._passed(self._slots[entry])

    def add_rows(self, entry: Entry, indices: Tensor, rows: Tensor) -> None:
        """Adds `rows` [n, width], of any floating dtype, at their `indices` [n] of an embedding table's gradient; may report it
        ready.
        """
        self.put_rows(entry, indices, rows)
        self.passed(entry)

    def put_rows(self, entry: Entry, indices: Tensor, rows: Tensor, layer: str = "") -> None:
        """Adds as `add_rows` does, but does not count the pass, as `put`."""
        slot = self._entered(entry, layer)
        slot.take_rows(indices, rows)
        slot.contributions += 1

    def expect_products(self, entry: Entry) -> None:
        """Records that from now on `entry` gets contributions by `add_product` and the like, besides any from autograd."""
        self._products.add(entry)
        if entry in self._slots and self._slots[entry].autograd is Autograd.IN_VIEW:
            self._slots[entry].autograd = Autograd.COPIED

    def _entered(self, entry: Entry, layer: str) -> Slot:
        """Returns the slot of `entry`, prepared for a contribution of `layer`. Raises RunError `gradient-complete` if it is
        complete.
        """
        slot = self._slots[entry]
        slot.check_open(self.state)
        if self.canonical is not None:
            slot.enter(self.canonical.arrival(entry, layer))
        return slot

    def _enter_autograd(self, slot: Slot, order: CanonicalOrder) -> None:
        if slot.entry in self._products:
            raise by_autograd(slot.entry)
        slot.enter(order.arrival(slot.entry))

    def _passed(self, slot: Slot) -> None:
        """Counts a pass; may report entries ready."""
        raise NotImplementedError
