"""The gradient store: the only owner of accumulated gradients, and the only place that knows when a gradient is complete.

Each trainable parameter of the registry has a slot: a view into a flat buffer in `precision.gradients`. Contributions come from
autograd (through the store's post-accumulate hook on each parameter) or from code that computes weight gradients itself
(`add`). With `StepState` the store reports each parameter ready once per step:

    begin_step ──> contribution* ──> ready, in the order of `order` ──> finish_step
                                       ^ in the chunk's last gradient action: as soon as autograd (which counts the uses of
                                         a parameter per graph) or W's weight queue says so, else when that action ends.
                                         A parameter without a contribution is then completed as zeros

Other code does not say when it is done: the store expects as many contributions as in the first step or, if their number
varies, waits for the end of the action. A contribution after `ready` is refused: within a step, and in a user's own backward
between two steps. All ranks of a reduce group report in the same order: collectives started in different orders would sum the
wrong tensors without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sley_core.actions.action import Action
from sley_core.engine.buffers import GradientBuffer, GradientMemory, Piece, Planner, Span, by_reduce_group
from sley_core.engine.canonical.tree import Arrival, CanonicalOrder, CanonicalSlot
from sley_core.engine.registry import Param, ParameterRegistry, TrainedSet
from sley_core.engine.slot import Autograd, Habit, LooseSlot, Slot, State, check_not_sharded, mark_irregular
from sley_core.engine.step_state import StepState
from sley_core.errors import RunError, closed
from sley_core.memory.state import is_away


class GradientStore:
    """Holds slots for all trainable parameters of `registry`, in `dtype` on `device`.

    A reducer calls `lay_out` with its own planner when it attaches; until then `planner` is used. `on_ready` is called once per
    parameter and step, `on_chunk_done` once per chunk. `begin_step` makes a new layout if parameters were frozen or unfrozen
    between steps; with a fixed layout it cannot, and sets `refusal` to the error `shards-fixed`. canonical: the numbering
    of micro-batches if gradients are summed in one order whatever the layout; else None.
    """

    def __init__(
        self,
        registry: ParameterRegistry,
        dtype: torch.dtype,
        device: torch.device,
        state: StepState,
        planner: Planner | None = None,
        canonical: CanonicalOrder | None = None,
    ) -> None:
        self.registry = registry
        self.dtype = dtype
        self.device = device
        self.state = state
        self.canonical = canonical
        for param in registry:
            param.num_sums = len(param.layers) if canonical is not None else 1
        self.buffers: list[GradientBuffer] = []
        self.on_ready: list[Callable[[Param], None]] = []
        self.on_chunk_done: list[Callable[[int], None]] = []
        self.refusal: RunError | None = None
        self.num_layouts = 0
        self._memory = GradientMemory(dtype, device)
        self._apart: list[GradientBuffer] = []
        self._slots: dict[Param, Slot] = {}
        self._order: list[Slot] = []
        self._cut: dict[Param, GradientBuffer] = {}
        self._seen: list[Param] = []
        self._products: set[Param] = set()
        self._next = 0
        self._are_freed = False
        self._is_watching = False
        self._is_closed = False
        self._is_built = True
        self._learned = False
        self._tasks: dict[Slot, tuple[Action | None, int]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.lay_out(planner or by_reduce_group)

    # Reading

    def __contains__(self, param: Param) -> bool:
        """Whether `param` has a slot: it is trainable, or was when this step began."""
        return param in self._slots

    @property
    def params(self) -> list[Param]:
        """The parameters that have a slot, in the order in which they are reported ready."""
        return [slot.param for slot in self._order]

    @property
    def seen_order(self) -> list[Param]:
        """The parameters in the order in which the first step completed them; empty before. Local to this rank."""
        return list(self._seen)

    def gradient(self, param: Param) -> Tensor:
        """Returns the gradient of `param`, a view: its parameter's shape, the store's dtype. Raises RunError if it is frozen or
        was discarded by an offload, and `gradient-sharded` once a reducer leaves only a part of it to this rank.
        """
        if param not in self._slots:
            raise RunError(
                "gradient-frozen",
                f"the parameter {param.name!r} is frozen, so it has no gradient in this step",
                hint="ask `param in store` first: parameters may be frozen and trained again between steps",
            )
        self._check_there()
        if param in self._cut:
            self._cut[param].check_whole(param)
        return self._slots[param].view

    def part(self, param: Param) -> Tensor:
        """Returns this rank's part of the gradient, a view: all of it, or the elements of `span`, in its shape."""
        self._check_there()
        return self._cut[param].parts[param] if param in self._cut else self.gradient(param)

    def parts(self, params: Sequence[Param]) -> list[Tensor | None]:
        """Returns `part` of each of `params`, None for a frozen one; one call, since every step reads all of them."""
        self._check_there()
        cut, slots = self._cut, self._slots
        return [cut[param].parts[param] if param in cut else slots[param].view if param in slots else None for param in params]

    def span(self, param: Param) -> Span | None:
        """Returns which elements of its gradient this rank gets, maybe none; None if each rank gets the whole gradient."""
        return self._cut[param].spans[param] if param in self._cut else None

    def num_shards(self, param: Param) -> int:
        """Returns how many ranks of the reduce group share one copy of the reduced gradient; 1 if each has all of it."""
        return self._cut[param].num_shards if param in self._cut else 1

    def partial(self, param: Param) -> list[Tensor]:
        """Returns the partial sums that a reducer combines with other ranks', if sums are canonical: one per node of each use
        of the parameter, in the order of `canonical.nodes`; the first is the gradient's view.
        """
        slot = self._slots[param]
        assert isinstance(slot, CanonicalSlot), f"{param.name} is summed in any order"
        return slot.rows

    def pieces(self) -> Iterator[Piece]:
        """Yields all gradients in as few tensors as possible: this rank's part of each buffer, then lists of the others."""
        for buffer in (*self.buffers, *self._apart):
            yield Piece([buffer.own], buffer.reduce_group, buffer.num_holders, buffer.num_shards, buffer.stages)
        families: dict[tuple[str, int], list[Tensor]] = {}
        for slot in self._order:
            if isinstance(slot, LooseSlot):
                slot.check_nothing_came_late()
                family = slot.param.reduce_group, len(slot.param.stages)
                families.setdefault(family, []).append(slot.view)
        for (reduce_group, num_holders), tensors in families.items():
            yield Piece(tensors, reduce_group, num_holders)

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients; those outside the buffers, and partial sums, count while they exist."""
        loose = sum(slot.view.nbytes for slot in self._order if isinstance(slot, LooseSlot))
        partial_sums = 0 if self.canonical is None else self.canonical.spares.num_bytes
        return sum(buffer.num_bytes for buffer in (*self.buffers, *self._apart)) + loose + partial_sums

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and view of each gradient, whether or not it has memory, and partial sums."""
        yield from ((slot.param.name, slot.view) for slot in self._order)
        if self.canonical is not None:
            yield from ((f"partial sum {at}", one) for at, one in enumerate(self.canonical.spares.made))

    # Contributions of code outside autograd. Each `add` is a `put` that counts the pass too, and may report the parameter
    # ready; after a `put`, autograd or a later call of `passed` says that it was the last. `layer` is the layer whose use of
    # the parameter a contribution comes from: needed only if several hold it and sums are canonical.

    def check_open(self, param: Param) -> None:
        """Raises RunError `gradient-complete` if no step runs and the gradient of `param` is that of the step before."""
        self._slots[param].check_open(self.state)

    def expect_products(self, param: Param) -> None:
        """Records that from now on `param` gets contributions by `add_product` and the like, besides any from autograd."""
        self._products.add(param)
        if param in self._slots and self._slots[param].autograd is Autograd.IN_VIEW:
            self._slots[param].autograd = Autograd.COPIED

    def passed(self, param: Param) -> None:
        """Counts a pass: the running action has contributed to `param`, once or for the last time. May report parameters
        ready.
        """
        self._passed(self._slots[param])

    def add(self, param: Param, gradient: Tensor) -> None:
        """Adds a contribution of the parameter's shape and any floating dtype."""
        self.put(param, gradient)
        self.passed(param)

    def add_product(self, param: Param, left: Tensor, right: Tensor) -> None:
        """Adds left^T right, for left [n, out] and right [n, in] in the store's dtype, without allocating."""
        self.put_product(param, left, right)
        self.passed(param)

    def add_rows(self, param: Param, indices: Tensor, rows: Tensor) -> None:
        """Adds `rows` [n, width], of any floating dtype, at their `indices` [n] of an embedding table's gradient."""
        self.put_rows(param, indices, rows)
        self.passed(param)

    def add_of_micros(self, param: Param, gradients: Mapping[int, Tensor], layer: str) -> None:
        """Adds contributions keyed by the global number of their micro-batch. For canonical sums: a communicator brings the
        contributions of other ranks' micro-batches to this rank's shard.
        """
        slot = self._slots[param]
        slot.check_open(self.state)
        for micro, gradient in gradients.items():
            slot.enter(Arrival(param.layers.index(layer), micro))
            slot.take(gradient)
            slot.contributions += 1
        self._passed(slot)

    def put(self, param: Param, gradient: Tensor, layer: str = "") -> None:
        slot = self._entered(param, layer)
        slot.take(gradient)
        slot.contributions += 1

    def put_product(self, param: Param, left: Tensor, right: Tensor, layer: str = "") -> None:
        slot = self._entered(param, layer)
        slot.take_product(left, right)
        slot.contributions += 1

    def put_rows(self, param: Param, indices: Tensor, rows: Tensor, layer: str = "") -> None:
        slot = self._entered(param, layer)
        slot.take_rows(indices, rows)
        slot.contributions += 1

    # Layouts and steps

    def lay_out(self, planner: Planner) -> None:
        """Makes the buffers anew, as `planner` says from now on. Discards all gradients, and a step in flight. Nothing may
        write into the old buffers any more: the new ones reuse their memory. After `free`, they have memory only
        within this call, until `build`.
        """
        if not self._is_built:
            self._memory.build()
        self._planner = planner
        trainable = self.registry.trainable
        layout = planner(trainable[::-1])
        layout.check(trainable)
        self._is_fixed = layout.is_fixed
        known = {param: replace(slot.habit) for param, slot in self._slots.items()}
        self._forget()
        # Canonical sums need a buffer's view to end in, even if nobody reduces the parameter.
        apart = by_reduce_group(list(layout.loose)).cut_lists if self.canonical else []
        buffers = self._memory.buffers([*layout.cut_lists, *apart])
        self.buffers, self._apart = buffers[: len(buffers) - len(apart)], buffers[len(buffers) - len(apart) :]
        for buffer in buffers:
            self._cut |= dict.fromkeys(buffer.params, buffer) if buffer.cut else {}
            for param, view in zip(buffer.params, buffer.views, strict=True):
                habit = known.get(param, Habit())
                if self.canonical is None:
                    self._slots[param] = Slot(param, view, habit, self._autograd(param))
                else:
                    self._slots[param] = CanonicalSlot(param, view, habit, Autograd.COPIED, self.canonical)
        for param in layout.loose if self.canonical is None else ():
            self._slots[param] = LooseSlot(param, self.dtype, known.get(param, Habit()), self._autograd(param))
        self._order = [self._slots[param] for param in layout.order]
        self._trained = TrainedSet(self.registry)
        self.num_layouts += 1
        self._learned = self._learned and self._slots.keys() <= known.keys()
        if self._is_watching:
            self.watch()
        if not self._is_built:
            self.free()

    def watch(self) -> None:
        """Installs the autograd hooks, now and in later layouts; the first `begin_step` calls it if nobody did. Gradients that
        no handler reduces, and that have the store's dtype, get no hook: autograd sums them itself, without a Python call.
        """
        self._is_watching = True
        for slot in self._order:
            if isinstance(slot, LooseSlot):
                is_whole = slot.param.shard is None and slot.parameter.dtype == self.dtype
                if not self.buffers and slot.autograd is Autograd.IN_VIEW and is_whole:
                    slot.autograd = Autograd.UNWATCHED
                    continue
            accumulated = partial(self._accumulated, slot)
            hook = slot.parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]  # torch's
            self._hooks.append(hook)

    def free(self) -> None:
        """Discards all gradients, between two steps, and frees their memory; `build` must be called before the next step."""
        self._are_freed, self._is_built = True, False
        for slot in self._order:
            slot.reset()
            slot.state = State.REPORTED  # a backward by hand is refused until the next step begins
        self._memory.free()

    def build(self) -> None:
        """Allocates the gradients' memory again after `free`, zeroed; `gradient` raises until a step has begun."""
        self._memory.build()
        self._is_built = True

    def begin_step(self) -> None:
        """Starts a step: discards the previous step's gradients, complete or not. The first contribution overwrites them."""
        if self._is_closed:
            raise closed("gradient store")
        if not self._is_built:
            raise is_away("gradients", "a step")
        self._are_freed = False
        self.refusal = None
        if name := self._trained.first_change():
            if self._is_fixed:
                self.refusal = RunError(
                    "shards-fixed",
                    f"the parameter {name!r} was frozen or unfrozen, but a sharded optimizer lays out its states when the "
                    "run is made",
                    hint="freeze it in the plan (`freeze = true` in a group of [optimizer]), or take a reducer such as "
                    "`dp.bucketed`",
                )
            else:
                self._memory.forget()  # a reduction that a failed step began may still write into it
                self.lay_out(self._planner)
        for buffer in self.buffers:
            buffer.is_whole = True
        if not self._is_watching:
            self.watch()
        self._next = 0
        if self.canonical is not None:
            self.canonical.spares.clear()
        if not self._learned:
            self._seen = []
        for slot in self._order:
            slot.reset()

    def pause(self) -> None:
        """Ends a call of the step that other calls follow, which add to the same gradients; nothing is reported."""
        for slot in self._order:
            self._take_assigned(slot)
            slot.pause()

    def resume(self) -> None:
        """Begins the next call of the step. Sets `refusal` to the error `frozen-within-step` if parameters were frozen or
        unfrozen since `pause`, `gradient-reached` if a program's own backward has added to a gradient.
        """
        if name := self._trained.first_change():
            self.refusal = RunError(
                "frozen-within-step",
                f"the parameter {name!r} was frozen or unfrozen between two calls of one step, whose gradients add up",
                hint="freeze and unfreeze parameters after a step outside `run.accumulate()`",
            )
        for slot in self._order:
            if not slot.resume():
                self.refusal = RunError(
                    "gradient-reached",
                    f"a backward between two calls of one step reached the parameter {slot.param.name!r}, so its gradient is "
                    "no longer their sum",
                    hint="use `torch.autograd.grad`, which adds to no parameter, or do it after a step outside "
                    "`run.accumulate()`",
                )

    def scale(self, factor: float) -> None:
        """Multiplies all that has been added in this step by `factor`."""
        sums = [found for slot in self._order if (found := slot.sum()) is not None]
        if sums:
            torch._foreach_mul_(sums, factor)

    def chunk_done(self, chunk: int) -> None:
        """Ends the chunk's last gradient action of this step: parameters without a contribution are zero, all are reported."""
        if not self.state.is_last:
            return
        done, are_all_complete = self.state.done, True
        for slot in self._order:
            if slot.chunks <= done:
                self._take_assigned(slot)
            if slot.is_open:
                if chunk in slot.chunks and slot.chunks <= done:
                    slot.complete()
                else:
                    are_all_complete = False
        if are_all_complete:
            self._learn()
        self._report()
        if self.canonical is not None and self._next == len(self._order):
            self.canonical.spares.clear()
        for notify in self.on_chunk_done:
            notify(chunk)

    def close(self) -> None:
        """Removes hooks and gradients from the parameters, and frees the store's memory; no step may begin after it."""
        self._is_closed = True
        self._forget()
        self._memory.forget()

    def _check_there(self) -> None:
        if self._are_freed:
            raise RunError(
                "gradients-freed",
                "gradients were freed by an offload, and no step has made new ones",
                hint="read them before `run.memory.offload()`, or leave them where they are: `run.memory.offload(...)` with "
                "the names of other parts",
            )

    def _entered(self, param: Param, layer: str) -> Slot:
        """Returns the slot of `param`, prepared for a contribution of `layer`. Raises RunError `gradient-complete`."""
        slot = self._slots[param]
        slot.check_open(self.state)
        if self.canonical is not None:
            slot.enter(self.canonical.arrival(param, layer))
        return slot

    def _learn(self) -> None:
        """Records, once all gradients are complete, how often and in which backward each one came."""
        for slot in self._order:
            slot.habit.learn(slot.final)
        if not self._learned and self._tasks:
            mark_irregular(self._tasks)
            self._tasks.clear()
        self._learned = True

    def _accumulated(self, slot: Slot, parameter: Tensor) -> None:
        """Takes autograd's gradient into the slot; the post-accumulate hook, called once per backward after every use of the
        parameter in it.

        Copies the first contribution; autograd adds later ones into the view itself. Finds no `grad` if everything was added
        elsewhere, and another than the view if a backward of a user's own assigned it. Raises RunError `sparse-gradient`, and
        `sharded-weight-read` if code used a shard as if it were the full weight.
        """
        gradient = parameter.grad
        if slot.param.shard is not None and (gradient is None or gradient is slot.view):
            return  # a communicator gives autograd no gradient; a `grad` here was set for the optimizer's step
        if gradient is not None:
            check_not_sharded(slot.param)
            slot.check_open(self.state)
            if self.canonical is not None:
                if slot.param in self._products:
                    raise RunError(
                        "canonical-autograd",
                        f"the parameter {slot.param.name!r} of a linear or an embedding is used in another way too, or has a "
                        "hook, is used under autocast or differentiated twice: the order in which its gradients are added is "
                        "then the layout's",
                        hint='use [parallel] reduction = "fast"',
                    )
                slot.enter(self.canonical.arrival(slot.param))
            slot.take_over()
        if not self._learned:
            self._tasks[slot] = self.state.action, torch._C._current_graph_task_id()
        self._passed(slot)

    def _take_assigned(self, slot: Slot) -> None:
        """Takes a gradient that a backward assigned without a hook being called, as for a weight that is not in the graph.
        Raises RunError `gradient-assigned` if it comes too late, or if nobody knows of which micro-batch it is.
        """
        if not slot.is_assigned:
            return
        if self.canonical is not None or slot.state is State.REPORTED:
            raise RunError(
                "gradient-assigned",
                f"a backward assigns the gradient of the parameter {slot.param.name!r} itself (`weight.grad = ...`), after it "
                "was complete or where sums are canonical",
                hint="let the backward return the gradient, for a weight that is an argument of its `apply`",
            )
        check_not_sharded(slot.param)
        slot.take_over()
        slot.habit.is_irregular = True  # it is complete at the end of the chunk only

    def _passed(self, slot: Slot) -> None:
        """Counts one pass if no later action can add to the gradient; reports the parameter if it is complete and next."""
        if self.canonical is not None and self.state.action is not None:
            slot.leave()  # as early as possible, so that sums are combined and their memory is reused
        if slot.autograd is Autograd.UNWATCHED or not self.state.gradients_final(slot.chunks):
            return
        slot.passed(learning=not self._learned)
        if not self._learned and slot.final == 1:
            self._seen.append(slot.param)
        if not slot.is_open and slot is self._order[self._next]:
            self._report()

    def _report(self) -> None:
        """Reports complete parameters up to the first open one, in the store's order, whatever order autograd had."""
        while self._next < len(self._order) and not self._order[self._next].is_open:
            slot = self._order[self._next]
            slot.settle()
            slot.state = State.REPORTED
            self._next += 1
            for notify in self.on_ready:
                notify(slot.param)

    def _autograd(self, param: Param) -> Autograd:
        return Autograd.COPIED if param in self._products else Autograd.IN_VIEW

    def _forget(self) -> None:
        """Removes hooks, gradients, slots and buffers."""
        for hook in self._hooks:
            hook.remove()
        for slot in self._order:
            slot.parameter.grad = None
        self._hooks, self._slots, self._order, self.buffers, self._apart, self._cut = [], {}, [], [], [], {}
        self._next = 0
