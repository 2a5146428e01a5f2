"""Adds up gradients of microbatches and ranks, losses and norms, in the order that `[parallel] reduction` selects.

An `Accumulator` adds up the gradient of one parameter, and refuses contributions that come too late. A run has one `Reduction`,
which belongs to the store. The classes here are "fast": they add terms in their order of arrival. Their subclasses in
`engine.canonical` add in one order for all layouts. No other code depends on the choice.

On a CPU, torch adds the squares of a tensor one after the other in the tensor's own dtype. Over ten million fp32 elements the
relative error of the norm is 4e-4 (measured). It depends on how gradients lie in buffers, and thus on the layout. Along the
rows of a matrix, torch adds in vectors, so a long tensor is viewed as rows, whose norms are combined in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import reduce
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sley_core.errors import RunError
from sley_core.model.tensors import shares_storage, uniform_items
from sley_core.topology import DEFAULT_CHANNEL

if TYPE_CHECKING:
    from sley_core.comm.exchanges import SentBytes
    from sley_core.comm.world import Group, Groups
    from sley_core.engine.buffers import GradientBuffer, NormGroup
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.parts import StepState
    from sley_core.engine.registry import Param, Stages

MAX_PRODUCT_BYTES = 1 << 25
"""The maximum size, in bytes, of a product that is added to a gradient of another dtype. Larger products are sliced."""


class GradientState(Enum):
    """The state of a gradient within a step; see the diagram of `Accumulator`."""

    OPEN = "contributions may come"
    COMPLETE = "no more contributions are expected; gradients before it in the order are still open"
    REPORTED = "the store has called `on_ready` for it"


class Accumulator:
    """Adds up the gradient of `param` in `view`, a part of a buffer, in the order in which contributions arrive.

             reset ──> OPEN ── expected passes ──> COMPLETE ── report, in the store's order ──> REPORTED ──> reset, next step
                        ^                             │                                            │
                        └──────── ensure_open ────────┘                                            └── `gradient-late`
                          a nested backward reaches the parameter

    num_contributions: the number of contributions in this step. num_passes: the number of passes in the action that completes
    the gradient. Autograd makes one pass per backward, however often it uses the parameter; the queue of a W action makes one
    after the parameter's last product; a communicator makes one with every contribution. num_expected_passes: the number of
    passes in earlier steps; 0 before the first step; None if it varies, so that only the end of the chunk completes the
    gradient. is_grad_view: whether `parameter.grad` is the view in this step, so that autograd adds into it. has_hook: whether
    a hook accumulates each gradient from autograd; if not, autograd adds them up in `parameter.grad` until the end of the
    chunk, which only an `UnbufferedAccumulator` supports. rows: with canonical sums, the partial sums for the reducer.
    """

    rows: list[Tensor]

    def __init__(self, param: Param, view: Tensor) -> None:
        self.param = param
        self.parameter = param.parameter
        self.chunks = param.chunks
        self.view = view
        self.dtype = view.dtype
        self.num_expected_passes: int | None = 0
        self.has_hook = True
        self.reset()

    @property
    def is_open(self) -> bool:
        """Returns whether more contributions are expected."""
        return self.state is GradientState.OPEN

    def reset(self) -> None:
        """Starts a step, and sets `parameter.grad` to None. The first contribution will overwrite the view."""
        self.num_contributions = 0
        self.num_passes = 0
        self.is_grad_view = False
        self.state = GradientState.OPEN
        self.parameter.grad = None

    def ensure_open(self, state: StepState) -> None:
        """Prepares for a contribution: reopens a gradient that is COMPLETE. Raises RunError `gradient-complete` if no action
        runs, as in a user's backward between two steps, and `gradient-late` if the gradient has already been reported.
        """
        if self.state is GradientState.OPEN:
            return
        name = self.param.name
        if state.action is not None:
            assert not self.chunks <= state.done_chunks, f"{name}: a contribution after its gradient was reported ready"
            self.num_expected_passes = None
            if self.state is GradientState.COMPLETE:
                self.state = GradientState.OPEN
                return
            message = f"the first nested backward reaches the parameter {name!r} while its gradient is being reduced"
            hint = "use torch.utils.checkpoint with `use_reentrant=False`, or use `core.recompute`"
            raise RunError("gradient-late", message, hint=hint)
        message = f"a backward between two steps reaches the parameter {name!r}, whose gradient belongs to the previous step"
        hint = "call `run.store.begin_step()` before your own backward; to train on your own samples, call `run.step(batch)`"
        raise RunError("gradient-complete", message, hint=hint)

    def begin_contribution(self, layer: str = "", micro: int | None = None) -> None:
        """Prepares for a contribution from `layer` in the global microbatch `micro`. By default, does nothing."""

    def end_contributions(self) -> None:
        """Marks the end of the running action's contributions. Does nothing unless sums have a fixed order."""

    def accumulate(self, gradient: Tensor) -> None:
        """Adds `gradient`, of any floating dtype, to the view. The first gradient of a step is copied."""
        if self.num_contributions:
            self.view.add_(gradient)
        else:
            self.view.copy_(gradient)

    def accumulate_grad(self) -> None:
        """Adds `parameter.grad` to the view, unless autograd has done so. Raises RunError `sparse-gradient` if it is sparse."""
        gradient = self.parameter.grad
        assert gradient is not None, self.param
        if gradient is not self.view:
            if self.is_grad_view:
                self.num_contributions = 0
            self._accumulate_owned(_require_dense(gradient, self.param))
            self.is_grad_view = not self.param.has_products and self.parameter.dtype == self.view.dtype
            self.parameter.grad = self.view if self.is_grad_view else None
        self.num_contributions += 1

    @property
    def is_assigned(self) -> bool:
        """Returns whether a backward has assigned `parameter.grad` itself, so that no hook was called."""
        gradient = self.parameter.grad
        return self.has_hook and gradient is not None and gradient is not self.view

    def accumulate_product(self, left: Tensor, right: Tensor) -> None:
        """Adds left^T right, for left [n, out] and right [n, in] of one dtype. If the view also has this dtype, allocates
        nothing; else computes the product in slices of at most `MAX_PRODUCT_BYTES`, or of one row.
        """
        if left.dtype != self.dtype:
            num_rows = max(1, MAX_PRODUCT_BYTES // max(1, right.shape[1] * right.element_size()))
            for start in uniform_items(range(0, len(self.view), num_rows)):
                rows = slice(start, start + num_rows)
                product = left[:, rows].t() @ right
                self.view[rows].add_(product) if self.num_contributions else self.view[rows].copy_(product)
        elif self.num_contributions:
            self.view.addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=self.view)

    def accumulate_rows(self, indices: Tensor, rows: Tensor) -> None:
        """Adds row i of `rows` [n, ...] to row `indices[i]` of the view. A step's first contribution first zeroes the view."""
        if not self.num_contributions:
            self.view.zero_()
        add_at(self.view, indices, rows.to(self.dtype))

    def finalize(self) -> None:
        """Completes the view, which is zero without contributions. Called once per step, before the parameter is reported."""
        if not self.num_contributions:
            self.view.zero_()

    def count_pass(self, *, is_first_step: bool) -> None:
        """Counts a pass in the action that completes the gradient. The last expected pass makes the gradient COMPLETE."""
        self.num_passes += 1
        if self.is_open and not is_first_step and self.num_expected_passes and self.num_passes >= self.num_expected_passes:
            self.state = GradientState.COMPLETE

    def record_passes(self) -> None:
        """Records this step's number of passes as the expected number, or that the number varies between steps."""
        if self.num_expected_passes is not None and self.num_passes:
            self.num_expected_passes = self.num_passes if self.num_expected_passes in (0, self.num_passes) else None

    def _accumulate_owned(self, gradient: Tensor) -> None:
        """Adds `gradient` and may keep the tensor, so the caller must not use it again."""
        self.accumulate(gradient)


class UnbufferedAccumulator(Accumulator):
    """Accumulates a gradient that no handler reduces, in autograd's tensor or in a tensor that each step allocates."""

    def __init__(self, param: Param, empty: Tensor) -> None:
        """Creates the accumulator with `empty`, a tensor of the store's dtype without elements, as its view."""
        self._empty = empty
        super().__init__(param, empty)

    def reset(self) -> None:
        super().reset()
        self.view = self._empty

    def accumulate(self, gradient: Tensor) -> None:
        # Contiguous, like the parameter: a fused optimizer ignores strides, and would use elements in the wrong order.
        self._accumulate_owned(gradient if self.num_contributions else gradient.clone(memory_format=torch.contiguous_format))

    def accumulate_product(self, left: Tensor, right: Tensor) -> None:
        if not self.num_contributions:
            self.view = torch.empty_like(self.parameter, dtype=self.dtype, memory_format=torch.contiguous_format)
        super().accumulate_product(left, right)

    def accumulate_rows(self, indices: Tensor, rows: Tensor) -> None:
        if not self.num_contributions:
            self.view = torch.zeros_like(self.parameter, dtype=self.dtype)
        add_at(self.view, indices, rows.to(self.dtype))

    def finalize(self) -> None:
        if not self.has_hook and self.parameter.grad is not None:
            self._accumulate_owned(_require_dense(self.parameter.grad, self.param))
            self.num_contributions += 1
            self.parameter.grad = None
        if not self.num_contributions:
            self.view = torch.zeros_like(self.parameter, dtype=self.dtype)

    def copy_shared_grad(self) -> bool:
        """Replaces `parameter.grad` with a copy if another tensor has the same memory, into which autograd would add later
        gradients: for a + b, autograd may set both `grad` to views of one tensor. Returns whether there is a `grad`.
        """
        gradient = self.parameter.grad
        if gradient is not None and shares_storage(gradient):
            self.parameter.grad = gradient.clone()
        return gradient is not None

    def check_no_late_gradient(self) -> None:
        """Asserts that no contribution came after `finalize`, if there is no hook to detect one."""
        is_late = not self.has_hook and self.parameter.grad is not None and self.parameter.grad is not self.view
        assert not is_late, f"{self.param.name}: a contribution after its gradient was reported ready"

    def _accumulate_owned(self, gradient: Tensor) -> None:
        if self.num_contributions:
            self.view.add_(gradient)
        else:
            view = gradient.to(self.dtype).contiguous()  # autograd's tensor may have any strides
            self.view = view.clone() if view is gradient and shares_storage(view) else view


def mark_varying_passes(tasks: Mapping[Accumulator, tuple[object, int]]) -> None:
    """Marks, for each gradient that a nested backward has reached, the number of passes as varying. tasks: for each gradient,
    the action and the number of the autograd graph task that reached it.
    """
    outermost: dict[object, int] = {}  # the action's own backward has the lowest task number: it began first
    for action, task in tasks.values():
        outermost[action] = min(task, outermost.get(action, task))
    for accumulator, (action, task) in tasks.items():
        if task != outermost[action]:
            accumulator.num_expected_passes = None


def _require_dense(gradient: Tensor, param: Param) -> Tensor:
    """Returns `gradient` of `param` unchanged. Raises RunError `sparse-gradient` if it is a sparse tensor."""
    if gradient.is_sparse:
        message = f"the gradient of the parameter {param.name!r} is sparse, but reducers and norms need dense gradients"
        raise RunError("sparse-gradient", message, hint="create its module with `sparse=False`")
    return gradient


def add_at(table: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Adds row i of `rows` [n, ...], of the table's dtype, to the row `indices[i]` of `table`, in a deterministic order."""
    if table.is_cuda:
        table.index_put_((indices,), rows, accumulate=True)  # sorted first; `index_add_` would be atomic here
    else:
        table.index_add_(0, indices, rows)  # one after the other; `index_put_` may be atomic here


class Sums(Protocol):
    """Sums a reducer's buffers over ranks.

         start* ──> finish ──> start* ──> finish ...
            └────> discard ────────┘             (a step that failed)

    All ranks of a group call `start` for the same buffers in the same order, so `start` may issue collectives.
    """

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts to sum `buffer`, which has this rank's complete gradients, over `group`. Do not use it until `finish`."""

    def finish(self) -> None:
        """Blocks until every buffer passed to `start` holds its sum."""

    def discard(self) -> None:
        """Blocks until nothing writes into a buffer any more, and drops the state of a failed step."""


class Totals:
    """Computes the loss and the gradient norm of a step. All ranks create one, since the constructor may run a collective.
    gradients: this rank's gradients. loss: this rank's share of the loss, a float64 scalar. norm_type: the p of the p-norm,
    which may be math.inf.
    """

    def __init__(self, groups: Groups, gradients: Sequence[NormGroup], loss: Tensor, norm_type: float) -> None:
        self._norm_type = norm_type
        self._loss = loss
        self._norm = torch.zeros((), dtype=torch.float64, device=loss.device)
        for group in gradients:
            norm = combined_norm(group.tensors, norm_type)
            if math.isinf(norm_type):
                self._norm = torch.maximum(self._norm, norm)
            else:  # copies share the term, so that the sum over all ranks counts every gradient once
                copies = groups[group.reduce_group].size // group.num_shards * len(group.stages)
                self._norm += norm**norm_type / copies
        if math.isinf(norm_type):
            # NaN becomes inf: backends differ in max(x, NaN), and some return x.
            self._norm = self._norm.nan_to_num(nan=math.inf, posinf=math.inf)
            # All ranks call this collective at the end of every step, before the totals are summed.
            groups["all"].all_reduce(self._norm, "max", label="the gradient norm").wait()

    def terms(self) -> Tensor:
        """Returns the terms to sum over all ranks: float64 [n], with the same n on all ranks."""
        return torch.stack([self._loss, self._norm])

    def loss_and_norm(self, summed: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of all ranks' losses and the norm, both float64 scalars. summed: the sum of all ranks' `terms`."""
        loss, norm = summed.unbind()
        return loss, self._norm if math.isinf(self._norm_type) else norm.pow(1 / self._norm_type)


class Reduction:
    """Determines the order in which a run adds gradients, losses and loss weights. This class adds terms as they arrive.
    has_fixed_order: whether the order is the same in every layout. If so, losses are kept per microbatch, and code that adds
    gradients passes the layer. micro_axes: the axes along which all ranks must run the same number of microbatches.
    """

    has_fixed_order = False
    micro_axes: Sequence[str] = ("model", "sp")

    def __init__(self, groups: Groups, state: StepState) -> None:
        self.groups = groups
        self.state = state

    @staticmethod
    def check_model(stages: Stages, per_rank_buffers: Sequence[str]) -> None:
        """Raises PlanError if the model's gradients cannot be added in the order of this reduction. By default, does nothing.
        stages: the full model, on meta. per_rank_buffers: name patterns of the buffers that differ between ranks.
        """

    def num_sums(self, param: Param) -> int:
        """Returns the number of separate sums of the gradient of `param`: one per layer if sums have a fixed order, else 1."""
        return 1

    def new_accumulator(self, param: Param, view: Tensor, *, is_unbuffered: bool) -> Accumulator:
        """Returns a new accumulator for `param`. view: the parameter's part of a buffer, or an empty tensor if is_unbuffered.
        is_unbuffered: whether the parameter is in no buffer.
        """
        return UnbufferedAccumulator(param, view) if is_unbuffered else Accumulator(param, view)

    def partial_sums(self) -> Sequence[Tensor]:
        """Returns the tensors, other than the gradients, that hold partial sums in this step."""
        return ()

    def clear(self) -> None:
        """Frees the memory of `partial_sums`."""

    def concurrent_microbatches(self, group: Group) -> range | None:
        """Returns the global numbers of the microbatches that the ranks of `group` run now, in the group's order, or None if
        contributions of different microbatches may be added before they are passed to the store.
        """
        return None

    def sums(self, store: GradientStore, sent: SentBytes, channel: str = DEFAULT_CHANNEL) -> Sums | None:
        """Returns the `Sums` that a reducer must use, or None if it may sum in any order. sent: counts the sent bytes. channel:
        the name of the groups' channel on which the sums run.
        """
        return None

    def totals(self, gradients: Sequence[NormGroup], loss: Tensor, norm_type: float) -> Totals:
        """Returns the object that sums `loss` and the `norm_type`-norm of `gradients` over all ranks. If sums have a fixed
        order, `loss` has one element per microbatch.
        """
        return Totals(self.groups, gradients, loss, norm_type)

    def weight_terms(self, weights: Iterable[float]) -> list[float]:
        """Returns this rank's terms of the loss weight, whose sums over ranks are the input of `weight_from_terms`. weights:
        the loss weights of this rank's microbatches.
        """
        return [sum(weights)]

    def weight_from_terms(self, terms: Sequence[float]) -> float:
        """Returns the loss weight of the global batch. terms: the sums of all ranks' `weight_terms`."""
        return terms[0]

    def loss_terms(self, losses: Sequence[Tensor]) -> Tensor:
        """Returns this rank's terms of the loss over several batches, float64 [n]. losses: this rank's loss of each batch."""
        return reduce(torch.add, losses).reshape(1)

    def loss_from_terms(self, summed: Tensor, num_batches: int) -> float:
        """Returns the sum of the losses of `num_batches` batches. summed: the sum of all ranks' `loss_terms`."""
        return float(summed)


def reduction_class(name: str) -> type[Reduction]:
    """Returns the class for `name`, the plan's value of `[parallel] reduction`."""
    if name == "canonical":
        from sley_core.engine.canonical import CanonicalReduction  # few plans need it

        return CanonicalReduction
    return Reduction


ROW_NUMEL = 1024
"""The number of elements of each row if `combined_norm` views a tensor as rows."""
MIN_ROWS_NUMEL = 4 * ROW_NUMEL
"""The minimum number of elements of a tensor that is viewed as rows. Without rows, the relative error of the norm of 16,384
elements, of which few are large, as in an embedding's gradient, is 1.2e-6 (measured).
"""


def combined_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Returns the p-norm over `tensors`, at least one, of one device and dtype, as a float64 scalar. norm_type: p, or inf."""
    wide_dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    min_rows_numel: float = MIN_ROWS_NUMEL if norm_type == 2 else ROW_NUMEL  # other powers lose more
    if tensors[0].device.type != "cpu":
        min_rows_numel = math.inf
    norms, short_tensors = [], []
    for tensor in tensors:
        if (numel := tensor.numel()) < min_rows_numel:
            short_tensors.append(tensor)
            continue
        flat, numel_in_rows = tensor.reshape(-1), numel // ROW_NUMEL * ROW_NUMEL
        rows = flat[:numel_in_rows].view(-1, ROW_NUMEL)
        norms.append(torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=wide_dtype))
        if numel_in_rows < numel:
            norms.append(torch.linalg.vector_norm(flat[numel_in_rows:], norm_type, dtype=wide_dtype).reshape(1))
    if short_tensors:
        # torch.nn.utils.get_total_norm would also sort by device and dtype, which are equal here.
        norms.append(torch.stack(torch._foreach_norm(short_tensors, norm_type, dtype=wide_dtype)))
    joined: Tensor = torch.linalg.vector_norm(torch.cat(norms), norm_type, dtype=torch.float64)
    return joined
