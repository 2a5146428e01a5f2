"""The gradient store: the only owner of accumulated gradients, and the only place that knows when a gradient is complete.

Each trainable parameter has an accumulator, whose view lies in a flat buffer in `precision.gradients`. Contributions come from
autograd (through the store's post-accumulate hook on each parameter) or from code that computes weight gradients itself
(`add`). With `StepState` the store reports each parameter ready once per step:

    begin_step ──> contribution* ──> ready, in the order of `order` ──> finish_step
                                       ^ in the chunk's last gradient action: as soon as autograd (which counts the uses of
                                         a parameter per graph) or W's weight queue says so, else when that action ends.
                                         A parameter without a contribution is then completed as zeros

Other code does not say when it is done: the store expects as many contributions as in the first step or, if their number
varies, waits for the end of the action. It refuses a contribution after `ready`, both within a step and from a user's own
backward between two steps. All ranks of a reduce group report in the same order, since collectives that are started in
different orders would sum the wrong tensors without an error.

Core's own handlers follow the store. `Each` is slow and simple; faster reducers are tested against it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from sley_core.actions.action import Action
from sley_core.comm.device import free, reallocate
from sley_core.comm.exchanges import SentBytes
from sley_core.comm.transport import Work
from sley_core.engine.buffers import (
    SHARD_ALIGNMENT,
    ElementRange,
    GradientBuffer,
    Layout,
    NormGroup,
    Planner,
    allocate_buffers,
    group_by_reduce_group,
)
from sley_core.engine.parts import Parts, StepState
from sley_core.engine.reduction import Accumulator, GradientState, Reduction, Sums, UnbufferedAccumulator, mark_varying_passes
from sley_core.engine.registry import Param, ParameterRegistry
from sley_core.engine.shards import sharded_read_error
from sley_core.errors import RunError, StateError, run_closed_error
from sley_core.memory import ALIGNMENT_BYTES, round_up
from sley_core.plugin import EachConfig, GradientNormsConfig
from sley_core.protocols import GradientHandler


class GradientStore:
    """Accumulates the gradients of all trainable parameters of `registry`, in `dtype` on `device`. planner: makes the first
    layout; a reducer may call `lay_out` with another planner. on_ready: called with each parameter once per step, when its
    gradient is complete. on_chunk_done: called with each chunk once per step. refusal: the error that `begin_step` found,
    or None. num_layouts: the number of layouts so far.
    """

    def __init__(
        self,
        registry: ParameterRegistry,
        dtype: torch.dtype,
        device: torch.device,
        reduction: Reduction,
        planner: Planner = group_by_reduce_group,
    ) -> None:
        self.registry = registry
        self.dtype, self.device = dtype, device
        self.reduction, self.state = reduction, reduction.state
        for param in registry:
            param.num_sums = self.reduction.num_sums(param)
        self.on_ready: list[Callable[[Param], None]] = []
        self.on_chunk_done: list[Callable[[int], None]] = []
        self.refusal: RunError | None = None
        self.num_layouts = 0
        self._num_freed = 0
        self._are_freed = False
        self._is_watching = False
        self._is_closed = False
        self._has_memory = True
        self._has_learned_passes = False
        self._tasks: dict[Accumulator, tuple[Action | None, int]] = {}
        self._order: list[Accumulator] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._clear_layout()
        self.lay_out(planner)

    def _clear_layout(self) -> None:
        """Removes all buffers, accumulators and hooks, and the `grad` of each parameter."""
        for hook in self._hooks:
            hook.remove()
        for accumulator in self._order:
            accumulator.parameter.grad = None
        self.buffers: list[GradientBuffer] = []
        self._memory = torch.empty(0, dtype=self.dtype, device=self.device)
        self._accumulators: dict[Param, Accumulator] = {}
        self._unbuffered: list[Accumulator] = []
        self._buffer_of: dict[Param, GradientBuffer] = {}
        self._parts: dict[Param, Tensor] = {}
        self._hooks, self._order, self._next = [], [], 0
        self._without_hook: list[UnbufferedAccumulator] = []
        self._unchecked: list[UnbufferedAccumulator] = []

    # Reading

    def __contains__(self, param: Param) -> bool:
        """Returns whether `param` has a gradient, which means that it was trainable when the layout was made."""
        return param in self._accumulators

    @property
    def params(self) -> list[Param]:
        """Returns the parameters with a gradient, in the order of their reports."""
        return [accumulator.param for accumulator in self._order]

    def gradient(self, param: Param) -> Tensor:
        """Returns a view of the gradient of `param`, in its shape and the store's dtype. Raises RunError `gradient-frozen` if
        `param` is frozen, `gradients-freed` after an offload, and `gradient-sharded` after the reduction to shards.
        """
        if param not in self._accumulators:
            message = f"the parameter {param.name!r} is frozen, so it has no gradient in this step"
            hint = "check `param in store` first, since parameters may be frozen and unfrozen between steps"
            raise RunError("gradient-frozen", message, hint=hint)
        self._check_not_freed()
        if param in self._buffer_of and not self._buffer_of[param].has_full_gradients:
            message = f"the gradient of the parameter {param.name!r} has been reduced to shards, and this rank has only one"
            hint = "use `store.part(param)`, the gradient of the elements `store.elements(param)`"
            raise RunError("gradient-sharded", message, hint=hint)
        return self._accumulators[param].view

    def part(self, param: Param) -> Tensor:
        """Returns a view of the elements `elements(param)` of the gradient, or of all elements if that is None. Raises RunError
        if `param` is frozen or the gradient is freed.
        """
        self._check_not_freed()
        return self._parts[param] if param in self._parts else self.gradient(param)

    def parts(self) -> dict[Param, Tensor]:
        """Returns the `part` of each parameter with a gradient. Raises RunError `gradients-freed` after an offload."""
        self._check_not_freed()
        return {accumulator.param: self._parts.get(accumulator.param, accumulator.view) for accumulator in self._order}

    def elements(self, param: Param) -> ElementRange | None:
        """Returns the range of the gradient's elements whose sum this rank gets, or None if it gets the full gradient."""
        return self._buffer_of[param].ranges[param] if param in self._parts else None

    def num_shards(self, param: Param) -> int:
        """Returns the number of ranks that share one copy of the reduced gradient; 1 if each rank has the full gradient."""
        return self._buffer_of[param].num_shards if param in self._buffer_of else 1

    def buffer_of(self, param: Param) -> GradientBuffer | None:
        """Returns the buffer that holds the gradient; None if no reducer reduces this gradient."""
        return self._buffer_of.get(param)

    def partial_sums(self, param: Param) -> list[Tensor]:
        """Returns the partial sums of the gradient of `param`, one per use and node of the tree. The first one is the
        parameter's view of the gradient buffer. Requires a fixed order of sums.
        """
        return self._accumulators[param].rows

    def norm_groups(self) -> Iterator[NormGroup]:
        """Yields all gradients in a few groups: this rank's part of each buffer, then the gradients outside buffers."""
        for buffer in self.buffers:
            yield NormGroup([buffer.local_part], buffer.reduce_group, buffer.stages, buffer.num_shards)
        families: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}
        for accumulator in self._unbuffered:
            if isinstance(accumulator, UnbufferedAccumulator):
                accumulator.check_no_late_gradient()
            family = accumulator.param.reduce_group, accumulator.param.stages
            families.setdefault(family, []).append(accumulator.view)
        for (reduce_group, stages), tensors in families.items():
            yield NormGroup(tensors, reduce_group, stages)

    @property
    def num_bytes(self) -> int:
        """Returns the memory in bytes of all gradients, in buffers and outside, and of the partial sums while they exist."""
        buffers = [buffer.data for buffer in self.buffers]
        tensors = *buffers, *(accumulator.view for accumulator in self._unbuffered), *self.reduction.partial_sums()
        return sum(tensor.nbytes for tensor in tensors)

    def aligned_bytes(self, param: Param, *, is_sharded: bool = False) -> int:
        """Returns the padded size in bytes of the gradient of `param` in a buffer, which is sharded if `is_sharded`."""
        alignment = SHARD_ALIGNMENT if is_sharded else ALIGNMENT_BYTES // self.dtype.itemsize
        return round_up(param.numel, alignment) * self.dtype.itemsize

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each gradient with its parameter's name, even while it has no memory, and each partial sum with a name."""
        yield from ((accumulator.param.name, accumulator.view) for accumulator in self._order)
        yield from ((f"partial sum {number}", tensor) for number, tensor in enumerate(self.reduction.partial_sums()))

    # Contributions of code outside autograd

    def check_open(self, param: Param) -> None:
        """Prepares for a contribution to the gradient of `param`. Raises the errors of `Accumulator.ensure_open`."""
        self._accumulators[param].ensure_open(self.state)

    def count_pass(self, param: Param) -> None:
        """Counts a pass of the backward over `param`, after its contribution. This may complete and report the gradient."""
        self._count_pass(self._accumulators[param])

    def add(self, param: Param, gradient: Tensor, layer: str = "", *, counts_pass: bool = True) -> None:
        """Adds the contribution `gradient`, of the parameter's shape and any floating dtype, to the gradient of `param`. layer:
        the layer that used the parameter; needed if several layers hold it and the order of sums is fixed. counts_pass: whether
        to call `count_pass`; if False, autograd or a later call must count the pass.
        """
        accumulator = self._begin_contribution(param, layer)
        accumulator.accumulate(gradient)
        self._end_contribution(accumulator, counts_pass)

    def add_product(self, param: Param, left: Tensor, right: Tensor, layer: str = "", *, counts_pass: bool = True) -> None:
        """Like `add`, adds left^T right, for left [n, out] and right [n, in]. Without a dtype change, allocates no product."""
        accumulator = self._begin_contribution(param, layer)
        accumulator.accumulate_product(left, right)
        self._end_contribution(accumulator, counts_pass)

    def add_rows(self, param: Param, rows: Tensor, indices: Tensor, layer: str = "", *, counts_pass: bool = True) -> None:
        """Like `add`, adds `rows` [n, width], of any floating dtype, to the rows `indices` [n] of an embedding's gradient."""
        accumulator = self._begin_contribution(param, layer)
        accumulator.accumulate_rows(indices, rows)
        self._end_contribution(accumulator, counts_pass)

    def add_microbatches(self, param: Param, gradients: Mapping[int, Tensor], layer: str) -> None:
        """Adds contributions from microbatches of this or other ranks, and counts one pass. gradients: the contributions, by
        the microbatch's global number, which determines the fixed order of sums. layer: the layer that used the parameter.
        """
        for micro, gradient in gradients.items():
            accumulator = self._begin_contribution(param, layer, micro)
            accumulator.accumulate(gradient)
            accumulator.num_contributions += 1
        self.count_pass(param)

    # Layouts and steps

    def lay_out(self, planner: Planner) -> None:
        """Replaces the buffers according to the layout that `planner` returns. Discards all gradients, even within a step."""
        self._planner = planner
        trainable = self.registry.trainable
        layout = planner(trainable[::-1])
        layout.check(trainable)
        self._is_fixed = layout.is_fixed
        num_expected_passes = {param: accumulator.num_expected_passes for param, accumulator in self._accumulators.items()}
        self._clear_layout()
        self._memory, self.buffers = allocate_buffers(layout, self.dtype, self.device)
        views = dict.fromkeys(layout.unbuffered, torch.empty(0, dtype=self.dtype, device=self.device))
        for buffer in self.buffers:
            self._buffer_of |= dict.fromkeys(buffer.params, buffer)
            self._parts |= buffer.parts if buffer.shard else {}
            views |= zip(buffer.params, buffer.views, strict=True)
        for param in layout.order:
            accumulator = self.reduction.new_accumulator(param, views[param], is_unbuffered=param not in self._buffer_of)
            accumulator.num_expected_passes = num_expected_passes.get(param, 0)
            self._accumulators[param] = accumulator
        self._order = list(self._accumulators.values())
        self._unbuffered = [self._accumulators[param] for param in layout.unbuffered]
        self._trained = [(param.name, param.parameter, param.trainable) for param in self.registry]
        self.num_layouts += 1
        self._has_learned_passes = self._has_learned_passes and self._accumulators.keys() <= num_expected_passes.keys()
        if self._is_watching:
            self.install_hooks()

    def install_hooks(self) -> None:
        """Installs the autograd hooks, and reinstalls them after each change of layout. The first `begin_step` calls this if
        nothing else has. If the layout has no buffers, an unsharded parameter of the store's dtype without products gets no
        hook, unless the order of sums is fixed: autograd sums its gradients itself.
        """
        self._is_watching = True
        for accumulator in self._order:
            param, parameter = accumulator.param, accumulator.parameter
            is_unused = not self.buffers and isinstance(accumulator, UnbufferedAccumulator) and not param.has_products
            accumulator.has_hook = not is_unused or param.shard is not None or parameter.dtype != self.dtype
            if accumulator.has_hook:
                hook_function = partial(self._accumulate_from_autograd, accumulator)
                hook = parameter.register_post_accumulate_grad_hook(hook_function)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
            elif isinstance(accumulator, UnbufferedAccumulator):
                self._without_hook.append(accumulator)

    def free(self) -> None:
        """Discards all gradients and frees their memory. Call this between two steps, and `build` before the next step."""
        self._are_freed, self._has_memory = True, False
        for accumulator in self._order:
            accumulator.reset()
            accumulator.state = GradientState.REPORTED  # a backward by hand is refused until the next step begins
        self._num_freed = free(self._memory)

    def build(self) -> None:
        """Allocates zeroed memory for the gradients after `free`. Until a step begins, `gradient` raises `gradients-freed`."""
        reallocate(self._memory, self._num_freed)
        self._memory.zero_()  # padding too, since norms include it
        self._has_memory = True

    def begin_step(self) -> None:
        """Starts a step, and discards earlier gradients. Raises RunError after `close`, StateError if the memory is freed."""
        if self._is_closed:
            raise run_closed_error("gradient store")
        if not self._has_memory:
            raise StateError.offloaded_error("gradients", "a step")
        self._are_freed = False
        self.update_layout()
        for buffer in self.buffers:
            buffer.has_full_gradients = True
        if not self._is_watching:
            self.install_hooks()
        self._next = 0
        self.reduction.clear()
        self._unchecked = self._without_hook
        for accumulator in self._order:
            accumulator.reset()

    def update_layout(self) -> None:
        """Makes a new layout, without gradients, if parameters were frozen or unfrozen since the last one. If the layout is
        fixed, sets `refusal` instead. `begin_step` calls this; other code may call it between two steps.
        """
        self.refusal = None
        changed_names = [name for name, parameter, was_trainable in self._trained if parameter.requires_grad != was_trainable]
        if changed_names and self._is_fixed:
            message = f"the parameter {changed_names[0]!r} was frozen or unfrozen, but a sharded optimizer has fixed its shards"
            hint = "set `freeze = true` in a group of [optimizer], or use a reducer such as `dp.bucketed`"
            self.refusal = RunError("shards-fixed", message, hint=hint)
        elif changed_names:
            self.lay_out(self._planner)
            if not self._has_memory:
                self.free()

    def backward_done(self) -> None:
        """Copies the gradients that autograd has set in this step and that share memory with other tensors. Called after each
        action.
        """
        if self._unchecked:
            self._unchecked = [accumulator for accumulator in self._unchecked if not accumulator.copy_shared_grad()]

    def chunk_done(self, chunk: int) -> None:
        """Completes and reports the gradients of `chunk` after its last gradient action. Untouched gradients are zero."""
        for accumulator in self._order:
            if accumulator.chunks <= self.state.done_chunks:
                self._accumulate_assigned(accumulator)
                if accumulator.is_open and chunk in accumulator.chunks:
                    accumulator.state = GradientState.COMPLETE
        if not any(accumulator.is_open for accumulator in self._order):
            for accumulator in self._order:
                accumulator.record_passes()
            mark_varying_passes(self._tasks)
            self._tasks.clear()
            self._has_learned_passes = True
        self._report_final_gradients()
        if self._next == len(self._order):
            self.reduction.clear()
        for notify in self.on_chunk_done:
            notify(chunk)

    def close(self) -> None:
        """Removes hooks and gradients from the parameters, and frees the store's memory. No step can begin afterwards."""
        self._is_closed = True
        self._clear_layout()

    def _check_not_freed(self) -> None:
        if self._are_freed:
            message = "the gradients were freed by an offload, and no step has computed new ones"
            hint = "read the gradients before `run.memory.offload()`, or pass the names of other parts to it"
            raise RunError("gradients-freed", message, hint=hint)

    def _begin_contribution(self, param: Param, layer: str, micro: int | None = None) -> Accumulator:
        """Returns the accumulator of `param`, prepared for a contribution. Raises the errors of `Accumulator.ensure_open`."""
        accumulator = self._accumulators[param]
        accumulator.ensure_open(self.state)
        accumulator.begin_contribution(layer, micro)
        return accumulator

    def _end_contribution(self, accumulator: Accumulator, counts_pass: bool) -> None:
        accumulator.num_contributions += 1
        if counts_pass:
            self._count_pass(accumulator)

    def _accumulate_from_autograd(self, accumulator: Accumulator, parameter: Tensor) -> None:
        """Accumulates autograd's gradient. Autograd calls this post-accumulate hook once per backward and parameter. Copies the
        first contribution; autograd adds later contributions into the view. `grad` is None if code outside autograd has added
        everything, and is not the view if a user's backward assigned it. Raises RunError `sparse-gradient` for a sparse
        gradient, and `sharded-weight-read` if code used a shard as if it were the full weight.
        """
        gradient = parameter.grad
        if accumulator.param.shard is not None:
            if gradient is None or gradient is accumulator.view:
                return  # communicators pass autograd no gradient; a `grad` here was set for the optimizer's step
            raise sharded_read_error(accumulator.param, "the forward reads")
        if gradient is not None:
            accumulator.ensure_open(self.state)
            accumulator.accumulate_grad()
        if not self._has_learned_passes:
            self._tasks[accumulator] = self.state.action, torch._C._current_graph_task_id()
        self._count_pass(accumulator)

    def _accumulate_assigned(self, accumulator: Accumulator) -> None:
        """Accumulates a gradient that a backward assigned to `grad` without a hook call, for example because the weight is not
        in the graph. Raises RunError `gradient-assigned` if it comes too late, or if sums have a fixed order.
        """
        if not accumulator.is_assigned:
            return
        param = accumulator.param
        if self.reduction.has_fixed_order or accumulator.state is GradientState.REPORTED:
            reason = "although the gradient is complete or its sum needs a fixed order"
            message = f"a backward itself assigns the gradient of the parameter {param.name!r} (`weight.grad = ...`), {reason}"
            hint = "return the gradient from the backward, and pass the weight as an argument of `apply`"
            raise RunError("gradient-assigned", message, hint=hint)
        if param.shard is not None:
            raise sharded_read_error(param, "the forward reads")
        accumulator.accumulate_grad()
        accumulator.num_expected_passes = None  # the gradient is complete only at the end of the chunk

    def _count_pass(self, accumulator: Accumulator) -> None:
        """Counts a pass if no later action can add to the gradient. Then reports the gradient if it is complete and next."""
        accumulator.end_contributions()
        if not accumulator.has_hook or not self.state.are_gradients_final(accumulator.chunks):
            return
        accumulator.count_pass(is_first_step=not self._has_learned_passes)
        if not accumulator.is_open and accumulator is self._order[self._next]:
            self._report_final_gradients()

    def _report_final_gradients(self) -> None:
        """Finalizes gradients and passes their parameters to `on_ready`, in order, up to the first open gradient."""
        while self._next < len(self._order) and not self._order[self._next].is_open:
            accumulator = self._order[self._next]
            accumulator.finalize()
            accumulator.state = GradientState.REPORTED
            self._next += 1
            for notify in self.on_ready:
                notify(accumulator.param)


class Each(GradientHandler):
    """The handler `core.each`: sums each gradient in a collective of its own over the reduce group, in the store's order."""

    def __init__(self, config: EachConfig) -> None:
        self.config = config
        self._pending: list[Work] = []
        self._sent = SentBytes()
        self._sums: Sums | None = None

    def attach(self, parts: Parts) -> None:
        """Prepares the sums. Gives each reduced parameter a buffer of its own if sums have a fixed order."""
        self._store = parts.store
        self._groups = parts.groups
        self._sums = parts.store.reduction.sums(parts.store, self._sent)
        if self._sums is not None:
            parts.store.lay_out(self._plan_layout)

    def begin_step(self, step: StepState) -> None:
        """Waits for the reductions of a failed step, if any, since they could still write into the gradients."""
        if self._sums is not None:
            self._sums.discard()
        self._wait()
        self._sent.begin_step()

    def gradient_ready(self, param: Param, step: StepState) -> None:
        group = self._groups[param.reduce_group]
        if group.size == 1:
            return
        # All ranks of the reduce group start this collective: the store reports parameters in the same order on all of them.
        if self._sums is not None:
            buffer = self._store.buffer_of(param)
            assert buffer is not None, param
            self._sums.start(buffer, group)
            return
        gradient = self._store.gradient(param)
        self._pending.append(group.all_reduce(gradient, label=param.name))
        self._sent.add(gradient, group, passes=2)

    def finish_step(self, step: StepState) -> None:
        if self._sums is not None:
            self._sums.finish()
        self._wait()
        self._sent.end_step()

    def counts(self) -> dict[str, float]:
        return self._sent.counts()

    def _plan_layout(self, params: list[Param]) -> Layout:
        unbuffered = [param for param in params if self._groups[param.reduce_group].size == 1]
        return Layout([[param] for param in params if param not in unbuffered], params, unbuffered)

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = []


class GradientNorms(GradientHandler):
    """Adds `gradient_norm/NAME` to each row of metrics for each parameter that is trained when the run starts: the 2-norm of
    the full, unscaled gradient before clipping, in fp64. It is equal in every layout, and 0 for a frozen parameter.
    """

    def __init__(self, config: GradientNormsConfig) -> None:
        self.config = config

    def attach(self, parts: Parts) -> None:
        """Adds the metric `gradient_norm/NAME` for each trained parameter: the 2-norm of its gradient over all ranks."""
        self._store = parts.store
        for param in parts.registry.trainable:
            share = partial(self._squared_norm_share, param, parts.numbers.replica_weight(param))
            parts.numbers.add(f"gradient_norm/{param.name}", share, of="root")

    def _squared_norm_share(self, param: Param, replica_weight: float) -> Tensor | float:
        """Returns this rank's share of the squared norm, in fp64. The shares of all ranks add up to the squared norm."""
        if param not in self._store:
            return 0.0
        # `replica_weight` assumes that each rank of the reduce group has all elements, but `num_shards` ranks may share a copy.
        return self._store.part(param).double().square().sum() * replica_weight * self._store.num_shards(param)
