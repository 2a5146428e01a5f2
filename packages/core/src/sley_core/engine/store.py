"""The only owner of accumulated gradients, and the only one that knows when a gradient is complete.

Each trainable entry of the book has a slot: a view into a flat buffer in `precision.gradients`. Contributions come from
autograd (a post-accumulate hook per parameter, the store's own) or from code that computes weight gradients itself
(`add`). With StepState the store reports each entry ready once per step:

    begin_step ──> contribution* ──> ready, in the order of `order` ──> finish_step
                                       ^ in the chunk's last gradient action, when autograd, which counts the uses of a
                                         parameter in each graph anew, says so, or the queue that a W empties; else when
                                         that action ends. What is untouched then is completed as zeros

Code that adds to a gradient says no such thing: as many contributions as in the first step complete it, or, where their number
varies, the end of the action. One that comes after `ready` is refused: ours within a step, a user's backward between two.

One order for all ranks of a reduce group is what makes it safe to start a collective at `ready`: two ranks that start two
reductions in opposite order sum the wrong tensors without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sley_core.actions.action import Action
from sley_core.engine.book import Entry, ParameterBook
from sley_core.engine.gradient_buffers import GradientBuffer, GradientMemory
from sley_core.engine.layout import Piece, Planner, by_reduce_group
from sley_core.engine.slot import Autograd, Habit, LooseSlot, Slot, State, check_not_sharded, dense, frozen
from sley_core.engine.step_state import StepState
from sley_core.errors import closed

Ready = Callable[[Entry], None]


class GradientStore:
    """Slots for all trainable entries of `book`, in `dtype` on `device`.

    The reducer gives its own planner when it attaches; until then it is `planner`. `on_ready` is called once per entry and
    step, `on_chunk_done` once per chunk. Parameters frozen or unfrozen between steps are followed at the next `begin_step`.
    """

    def __init__(
        self,
        book: ParameterBook,
        dtype: torch.dtype,
        device: torch.device,
        state: StepState,
        planner: Planner | None = None,
    ) -> None:
        self.book = book
        self.dtype = dtype
        self.device = device
        self.state = state
        self.buffers: list[GradientBuffer] = []
        self._memory = GradientMemory(dtype, device)
        self.on_ready: list[Ready] = []
        self.on_chunk_done: list[Callable[[int], None]] = []
        self._slots: dict[Entry, Slot] = {}
        self._products: set[Entry] = set()
        self._order: list[Slot] = []
        self._seen: list[Entry] = []
        self._next = 0
        self._is_watching = False
        self._is_closed = False
        self._learned = False
        self._tasks: dict[Slot, tuple[Action | None, int]] = {}
        self._parameters: list[Tensor] = []
        self._laid_out_for: list[bool] = []
        self.num_layouts = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.lay_out(planner or by_reduce_group)

    def lay_out(self, planner: Planner) -> None:
        """Makes the buffers anew, as `planner` says from now on. What they held, and a step under way, is forgotten.

        Nobody writes into those of before any more: their memory is taken over.
        """
        self._planner = planner
        trainable = self.book.trainable
        layout = planner(trainable[::-1])
        for entries in (layout.order, [entry for buffer in (*layout.buffers, layout.loose) for entry in buffer]):
            named = sorted(entry.index for entry in entries)
            assert named == [entry.index for entry in trainable], "a layout names every trainable entry once"
        known = {entry: replace(slot.habit) for entry, slot in self._slots.items()}
        self._forget()
        self.buffers = self._memory.buffers([entries for entries in layout.buffers if entries])
        for buffer in self.buffers:
            for entry, view in zip(buffer.entries, buffer.views, strict=True):
                self._slots[entry] = Slot(entry, view, known.get(entry, Habit()), self._autograd(entry))
        for entry in layout.loose:
            self._slots[entry] = LooseSlot(entry, self.dtype, known.get(entry, Habit()), self._autograd(entry))
        self._order = [self._slots[entry] for entry in layout.order]
        self._parameters = [entry.parameter for entry in self.book]
        self._laid_out_for = self._trainability()
        self.num_layouts += 1
        self._learned = self._learned and self._slots.keys() <= known.keys()
        if self._is_watching:
            self.watch()

    def watch(self) -> None:
        """From now on parameters are hooked, in every layout; the first `begin_step` does it where it was not done.

        Only when dtypes and products are settled is it known which gradients need no hook, and no Python call per backward:
        where nobody reduces, nobody waits for them, and what has the store's dtype autograd sums by itself.
        """
        self._is_watching = True
        for slot in self._order:
            if isinstance(slot, LooseSlot):
                is_whole = slot.entry.shard is None and slot.parameter.dtype == self.dtype
                if not self.buffers and slot.autograd is Autograd.IN_VIEW and is_whole:
                    slot.autograd = Autograd.UNWATCHED
                    continue
            accumulated = partial(self._accumulated, slot)
            hook = slot.parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]  # torch's
            self._hooks.append(hook)

    def __contains__(self, entry: Entry) -> bool:
        """Whether `entry` has a slot: it is trainable, or was when this step began."""
        return entry in self._slots

    def gradient(self, entry: Entry) -> Tensor:
        """The accumulated gradient of `entry`, a view: its parameter's shape, the store's dtype. RunError if it is frozen."""
        if entry not in self._slots:
            raise frozen(entry)
        return self._slots[entry].view

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
        """Of all gradients; those that lie in no buffer count while they are there."""
        loose = sum(slot.view.nbytes for slot in self._order if isinstance(slot, LooseSlot))
        return sum(buffer.num_bytes for buffer in self.buffers) + loose

    def pieces(self) -> Iterator[Piece]:
        """All gradients in as few tensors as possible."""
        for buffer in self.buffers:
            yield Piece([buffer.data], buffer.reduce_group, buffer.num_holders)
        families: dict[tuple[str, int], list[Tensor]] = {}
        for slot in self._order:
            if isinstance(slot, LooseSlot):
                slot.check_nothing_came_late()
                family = (slot.entry.reduce_group, len(slot.entry.stages))
                families.setdefault(family, []).append(slot.view)
        for (reduce_group, num_holders), tensors in families.items():
            yield Piece(tensors, reduce_group, num_holders)

    def begin_step(self) -> None:
        """Forgets the step before, complete or not: the first contribution of this one overwrites."""
        if self._is_closed:
            raise closed("gradient store")
        if self._trainability() != self._laid_out_for:
            self._memory.forget()  # a reduction that a failed step began may still write into it
            self.lay_out(self._planner)
        if not self._is_watching:
            self.watch()
        self._next = 0
        if not self._learned:
            self._seen = []
        for slot in self._order:
            slot.reset()

    def check_open(self, entry: Entry) -> None:
        """Raises RunError `gradient-complete` where no step runs and the gradient of `entry` is that of the one before."""
        self._slots[entry].check_open(self.state)

    def add(self, entry: Entry, gradient: Tensor) -> None:
        """A contribution computed outside autograd: shape of the parameter, any floating dtype."""
        slot = self._slots[entry]
        slot.check_open(self.state)
        slot.take(gradient)
        self._contributed(slot)

    def add_product(self, entry: Entry, left: Tensor, right: Tensor) -> None:
        """The contribution left^T right, for left [n, out] and right [n, in] in the store's dtype; allocates nothing."""
        self.put_product(entry, left, right)
        self.passed(entry)

    def put_product(self, entry: Entry, left: Tensor, right: Tensor) -> None:
        """As `add_product`, of a parameter of which autograd, or whoever calls `passed`, tells when its last one has come."""
        slot = self._slots[entry]
        slot.check_open(self.state)
        slot.take_product(left, right)
        slot.contributions += 1

    def passed(self, entry: Entry) -> None:
        """The running action has contributed to `entry` once, or for the last time."""
        self._passed(self._slots[entry])

    def add_rows(self, entry: Entry, indices: Tensor, rows: Tensor) -> None:
        """The contribution that is `rows` [n, width], any floating dtype, added at their `indices` [n] of a table."""
        slot = self._slots[entry]
        slot.check_open(self.state)
        slot.take_rows(indices, rows)
        self._contributed(slot)

    def expect_products(self, entry: Entry) -> None:
        """From now on `entry` gets contributions by `add_product` and the like, besides those of autograd if there are any."""
        self._products.add(entry)
        if entry in self._slots and self._slots[entry].autograd is Autograd.IN_VIEW:
            self._slots[entry].autograd = Autograd.COPIED

    def chunk_done(self, chunk: int) -> None:
        """The chunk's last gradient action is over: what no contribution reached is zero, and everything is ready."""
        for slot in self._order:
            if slot.is_open and chunk in slot.chunks and slot.chunks <= self.state.done:
                slot.complete()
        if not any(slot.is_open for slot in self._order):
            self._learn()
        self._report()
        for notify in self.on_chunk_done:
            notify(chunk)

    def close(self) -> None:
        """Leaves parameters as if there had been no store, and no memory of its own; no step begins after it."""
        self._is_closed = True
        self._forget()
        self._memory.forget()

    def _learn(self) -> None:
        """All is complete: what this step has shown of how gradients come."""
        for slot in self._order:
            slot.habit.learn(slot.final)
        if not self._learned and self._tasks:
            # Of an action, the backward itself began first; those within it come as often as they like.
            outermost: dict[Action | None, int] = {}
            for action, task in self._tasks.values():
                outermost[action] = min(task, outermost.get(action, task))
            for slot, (action, task) in self._tasks.items():
                slot.habit.is_irregular |= task != outermost[action]
            self._tasks.clear()
        self._learned = True

    def _accumulated(self, slot: Slot, parameter: Tensor) -> None:
        """Autograd's hook, once per backward, after every use of the parameter in it.

        The first contribution is copied in; later ones autograd adds into the view itself. There is none where all of it was
        added outside of autograd, or a function says that there is no gradient. Raises RunError `sparse-gradient`, and
        `sharded-weight-read` where code used a shard as if it were the whole weight.
        """
        gradient = parameter.grad
        if slot.entry.shard is not None and (gradient is None or gradient is slot.view):
            return  # the optimizer's, after a step; a communicator gives autograd nothing
        if gradient is not None:
            check_not_sharded(slot.entry)
            slot.check_open(self.state)
            if gradient is not slot.view:
                slot.adopt(dense(gradient, slot.entry))
                is_kept = slot.autograd is Autograd.IN_VIEW and parameter.dtype == slot.view.dtype
                parameter.grad = slot.view if is_kept else None
            slot.contributions += 1
        if not self._learned:
            self._tasks[slot] = self.state.action, torch._C._current_graph_task_id()
        self._passed(slot)

    def _contributed(self, slot: Slot) -> None:
        slot.contributions += 1
        self._passed(slot)

    def _passed(self, slot: Slot) -> None:
        if slot.autograd is Autograd.UNWATCHED or not self.state.gradients_final(slot.chunks):
            return
        slot.passed(learning=not self._learned)
        if not self._learned and slot.final == 1:
            self._seen.append(slot.entry)
        if not slot.is_open and slot is self._order[self._next]:
            self._report()

    def _report(self) -> None:
        """Reports ready entries up to the first that is not: one order, whatever autograd's was."""
        while self._next < len(self._order) and not self._order[self._next].is_open:
            slot = self._order[self._next]
            slot.state = State.REPORTED
            self._next += 1
            for notify in self.on_ready:
                notify(slot.entry)

    def _autograd(self, entry: Entry) -> Autograd:
        return Autograd.COPIED if entry in self._products else Autograd.IN_VIEW

    def _trainability(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for slot in self._order:
            slot.parameter.grad = None
        self._hooks, self._slots, self._order, self.buffers = [], {}, [], []
        self._next = 0
