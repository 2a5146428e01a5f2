"""Sums in one fixed order, whatever the layout: `[parallel] reduction = "canonical"`.

Gradients are summed in the tree of `canonical_tree`, and losses of microbatches in the same order. The loss weight is a sum of
digits, integers that float64 adds exactly in any order.

The norm is also a sum of integers, and so depends on no order. With e the smallest integer for which the largest |g| of the
model is below 2^e, every (|g| / 2^e)^2 is below 1, and is cut into three digits of 24 bits:

    |g| / 2^e, squared  =  0.d1 d2 d3 | rest below 2^-72, dropped        sum of d1, sum of d2, sum of d3: int64, over all ranks

The rests of n elements add up to less than n 2^-72, which float64 does not resolve. This is the pre-rounding of Demmel and
Nguyen (2013), Fast Reproducible Floating-Point Summation, with a maximum that is known beforehand, and digits as in Collange,
Defour, Graillat, Iakymchuk (2015), Numerical Reproducibility for the Parallel Reduction.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sley_core.comm.exchanges import SentBytes
from sley_core.comm.world import Group, Groups
from sley_core.engine.buffers import NormGroup
from sley_core.engine.canonical_tree import PartialSums, SumMemory, SumNode, TreeSums, covering_nodes, leaf_range, sum_uses
from sley_core.engine.direct import is_plain_embedding, is_plain_linear
from sley_core.engine.gradients import GradientStore
from sley_core.engine.parts import StepState
from sley_core.engine.reduction import Accumulator, Reduction, Sums, Totals, add_at
from sley_core.engine.registry import Param, Stages
from sley_core.errors import Diagnostic, PlanError, RunError
from sley_core.model.layers import MODEL
from sley_core.topology import DEFAULT_CHANNEL


class TreeLeaf(NamedTuple):
    """A leaf of a parameter's tree. layer_index: the index of a layer in `Param.layers`. microbatch: the global number."""

    layer_index: int
    microbatch: int


class CanonicalReduction(Reduction):
    """Adds gradients and losses in the order of one tree over all microbatches of a step. Each `dp` rank has a contiguous part
    of the global batch, in the order of the ranks, and `wp` ranks are neighbours, so each reduce group has contiguous parts.
    """

    has_fixed_order = True
    micro_axes = ("model", "sp", "dp")  # the leaves of the tree are the microbatches of all `dp` ranks, the same number of each

    def __init__(self, groups: Groups, state: StepState) -> None:
        super().__init__(groups, state)
        self.sum_memory = SumMemory()  # the memory of the sums of all gradients

    @property
    def num_leaves(self) -> int:
        """Returns the number of microbatches of the global batch."""
        return self.groups["dp"].size * max(1, self.state.num_microbatches)

    @property
    def microbatch_index(self) -> int:
        """Returns the global number of the running microbatch, or of this rank's first microbatch if no action runs."""
        action = self.state.action
        return self.state.first_micro + (0 if action is None else action.micro)

    def nodes(self, reduce_group: str, coord: int | None = None) -> list[SumNode]:
        """Returns the tree nodes whose sums a rank of `reduce_group` contributes to each gradient. coord: the rank's coordinate
        in the group; None means this rank.
        """
        group = self.groups[reduce_group]
        first, last = leaf_range(group.coord if coord is None else coord, group.size, self.num_leaves)
        return covering_nodes(first, last, self.num_leaves)

    def pad_losses(self, losses: Tensor) -> Tensor:
        """Returns this rank's `losses` at their places in a tensor [all microbatches], which has zeros at all other places."""
        group = self.groups["dp"]
        spaced = losses.new_zeros(group.size, losses.numel())
        spaced[group.coord] = losses
        return spaced.reshape(-1)

    @staticmethod
    def check_model(stages: Stages, per_rank_buffers: Sequence[str]) -> None:
        """Raises PlanError "canonical-tie" if several layers hold a parameter, and a holder is not a plain linear or embedding,
        or more than two layers on several stages hold it. Raises "canonical-buffers" if `per_rank_buffers` is not empty.
        """
        faults = [*_tie_faults(stages)]
        if per_rank_buffers:
            message = (
                f"each rank updates its own {', '.join(per_rank_buffers)} from its own samples, "
                "so the values depend on the layout"
            )
            hint = f"{FAST_HINT}, or use modules without such buffers"
            faults.append(Diagnostic("canonical-buffers", message, path=MODEL, hint=hint))
        if faults:
            raise PlanError.from_diagnostics(faults)

    def num_sums(self, param: Param) -> int:
        return len(param.layers)

    def new_accumulator(self, param: Param, view: Tensor, *, is_unbuffered: bool) -> Accumulator:
        return CanonicalAccumulator(self, param, view, is_unbuffered=is_unbuffered)

    def partial_sums(self) -> Sequence[Tensor]:
        return self.sum_memory.created

    def clear(self) -> None:
        self.sum_memory.clear()

    def concurrent_microbatches(self, group: Group) -> range:
        """Returns the global numbers of the microbatches that the ranks of `group` run now: all ranks run the same actions."""
        step = max(1, self.state.num_microbatches)
        begin = self.microbatch_index - group.coord * step
        return range(begin, begin + group.size * step, step)

    def sums(self, store: GradientStore, sent: SentBytes, channel: str = DEFAULT_CHANNEL) -> Sums:
        return TreeSums(self, store, sent, channel)

    def totals(self, gradients: Sequence[NormGroup], loss: Tensor, norm_type: float) -> "ExactTotals":
        return ExactTotals(self.groups, gradients, self.pad_losses(loss), norm_type)

    def weight_terms(self, weights: Iterable[float]) -> list[float]:
        """Returns, for each of the NUM_WEIGHT_DIGITS digits of a weight in base 2^24, the sum of this digit over `weights`.
        Adds infinite and NaN weights to the first sum.
        """
        sums = [0.0] * NUM_WEIGHT_DIGITS
        for weight in weights:
            if not math.isfinite(weight):
                sums[0] += weight
                continue
            remainder = weight
            for index in range(NUM_WEIGHT_DIGITS):
                digit = math.floor(remainder)
                sums[index] += digit
                remainder = (remainder - digit) * _DIGIT_BASE
        return sums

    def weight_from_terms(self, terms: Sequence[float]) -> float:
        total = 0.0
        for digit in reversed(terms):
            total = total / _DIGIT_BASE + digit
        return total

    def loss_terms(self, losses: Sequence[Tensor]) -> Tensor:
        return torch.cat([self.pad_losses(batch) for batch in losses])

    def loss_from_terms(self, summed: Tensor, num_batches: int) -> float:
        return sum(float(tree_sum(losses)) for losses in torch.chunk(summed, num_batches))


class CanonicalAccumulator(Accumulator):
    """Sums the contributions of each microbatch separately, and then adds the sums in the order of the tree. The view holds the
    sum of the rank's first microbatches; the other sums have separate memory until they are added. rows: after `finalize`, one
    sum for each use of the parameter and each node of this rank's microbatches. The first sum is in the view. If the reduce
    group has one rank, there is only the complete sum. is_unbuffered: whether each step allocates the view.
    """

    def __init__(self, reduction: CanonicalReduction, param: Param, view: Tensor, *, is_unbuffered: bool) -> None:
        self.reduction = reduction
        self.is_unbuffered = is_unbuffered
        self._placeholder = view
        super().__init__(param, view)

    def reset(self) -> None:
        """Starts a step, and discards all partial sums."""
        super().reset()
        self.view = self._placeholder
        self._leaf: TreeLeaf | None = None
        self._is_fresh = True
        self._sum = self.view
        self._sums: PartialSums | None = None
        self._closed: set[TreeLeaf] = set()
        self.rows: list[Tensor] = []

    def begin_contribution(self, layer: str = "", micro: int | None = None) -> None:
        """Opens the leaf of `layer` (if "", the only one) and of the global microbatch `micro` (if None, the running one), and
        closes the open leaf. Raises RunError `canonical-again` if the leaf was closed before.
        """
        layers = self.param.layers
        assert layer or len(layers) == 1, f"{self.param.name} is used by {layers}, so the contribution must name its layer"
        leaf = TreeLeaf(layers.index(layer) if layer else 0, self.reduction.microbatch_index if micro is None else micro)
        if leaf == self._leaf:
            return
        self._close_leaf()
        if leaf in self._closed:
            name = self.param.name
            message = (
                f"microbatch {leaf.microbatch} adds to the gradient of {name!r} again after another contribution, "
                "so the order of the additions varies"
            )
            hint = f'{FAST_HINT}, or use `use_reentrant=False` in checkpoints, and `unit = "layer"` in [weights]'
            raise RunError("canonical-again", message, hint=hint)
        self._leaf, self._is_fresh = leaf, True

    def end_contributions(self) -> None:
        if self.reduction.state.action is not None:
            self._close_leaf()  # as early as possible, so that sums are combined and their memory is reused

    def accumulate(self, gradient: Tensor) -> None:
        if self._is_fresh:
            self._open_leaf().copy_(gradient)
        else:
            self._sum.add_(gradient)

    def accumulate_grad(self) -> None:
        """Adds autograd's gradient. Raises RunError `canonical-autograd` if other code also adds to the gradient."""
        if self.param.has_products:
            message = (
                f"the parameter {self.param.name!r} of a linear or an embedding is also used in another way, has a hook, is "
                "used under autocast, or is differentiated twice, so the order of its gradient sum depends on the layout"
            )
            raise RunError("canonical-autograd", message, hint=FAST_HINT)
        self.begin_contribution()
        super().accumulate_grad()
        self.parameter.grad, self.is_grad_view = None, False

    def accumulate_product(self, left: Tensor, right: Tensor) -> None:
        """Adds left^T right. Multiplies in the dtype of the factors and then adds, since `addmm` would round differently."""
        if self._is_fresh and left.dtype == self.dtype:
            torch.mm(left.t(), right, out=self._open_leaf())
        else:
            self.accumulate(left.t() @ right)

    def accumulate_rows(self, indices: Tensor, rows: Tensor) -> None:
        if self._is_fresh:
            self._open_leaf().zero_()
        add_at(self._sum, indices, rows.to(self.dtype))

    def finalize(self) -> None:
        """Sets `rows` to the sums of this rank's nodes, and the view to the first of them. No contribution may follow."""
        self._close_leaf()
        view = self._allocated_view()
        sums = self._partial_sums()
        has_all_leaves = self.reduction.groups[self.param.reduce_group].size == 1
        nodes = [SumNode(0, sums.num_leaves)] if has_all_leaves else self.reduction.nodes(self.param.reduce_group)
        rows = [sums.pop(use, node, view) for use in range(self.param.num_sums) for node in nodes]
        assert not sums.nodes, f"{self.param.name} has sums of other ranks' microbatches: {sums.nodes}"
        if rows[0] is not view:
            view.copy_(rows[0])
            rows[0] = view
        self.rows = [sum_uses(rows)] if has_all_leaves else rows
        self._sums = None

    def _allocated_view(self) -> Tensor:
        """Returns the view, which it allocates first if the gradient is unbuffered."""
        if self.is_unbuffered and self.view is self._placeholder:
            self.view = torch.empty_like(self.parameter, dtype=self.dtype, memory_format=torch.contiguous_format)
        return self.view

    def _open_leaf(self) -> Tensor:
        """Returns memory, with arbitrary contents, for the sum of the open leaf. Called for the leaf's first contribution."""
        self._is_fresh = False
        group = self.reduction.groups[self.param.reduce_group]
        first, _ = leaf_range(group.coord, group.size, self.reduction.num_leaves)
        # The view holds the sum of this rank's first leaf.
        view, is_first = self._allocated_view(), self._leaf is None or self._leaf == (0, first)
        self._sum = view if is_first else self.reduction.sum_memory.allocate(view)
        return self._sum

    def _close_leaf(self) -> None:
        """Closes the open leaf, if any, and adds it to the partial sums. No contribution to the leaf may follow."""
        leaf, self._leaf = self._leaf, None
        if leaf is None or self._is_fresh:
            return
        self._closed.add(leaf)
        self._partial_sums().put(leaf.layer_index, SumNode(leaf.microbatch, leaf.microbatch + 1), self._sum)

    def _partial_sums(self) -> PartialSums:
        if self._sums is None:
            self._sums = PartialSums(self.reduction.num_leaves, self.reduction.sum_memory, self._allocated_view())
        return self._sums


FAST_HINT = 'set [parallel] reduction = "fast"'  # the hint for gradients whose sum has no fixed order


class ParameterUse(NamedTuple):
    """A use of a parameter by a module: the parameter's name in the module, the module, and the module's stage."""

    name: str
    module: nn.Module
    stage: int


def _tie_faults(stages: Stages) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each tied parameter whose gradient cannot be summed in a fixed order."""
    uses: dict[int, dict[str, list[ParameterUse]]] = {}  # the uses of each parameter, by layer
    for stage, layers in stages:
        for layer in layers:
            for prefix, module in layer.module.named_modules(prefix=layer.name, remove_duplicate=False):
                for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                    by_layer = uses.setdefault(id(parameter), {})
                    by_layer.setdefault(layer.name, []).append(ParameterUse(f"{prefix}.{attribute}", module, stage))
    for by_layer in uses.values():
        if len(by_layer) == 1:
            continue
        all_uses = [use for layer_uses in by_layer.values() for use in layer_uses]
        name = all_uses[0].name
        unsupported = [use for use in all_uses if not (is_plain_linear(use.module) or is_plain_embedding(use.module))]
        if unsupported:
            other_name, class_name = unsupported[0].name, type(unsupported[0].module).__name__
            message = f"the weight {name!r} is also {other_name!r} of a {class_name}, so the order of its gradient sum varies"
            hint = f"{FAST_HINT}, or tie only weights of plain nn.Linear and nn.Embedding"
            yield Diagnostic("canonical-tie", message, path=MODEL, hint=hint)
        elif len({use.stage for use in all_uses}) > 1 and len(by_layer) > 2:
            message = (
                f"{len(by_layer)} layers on several stages share {name!r}, but each stage sums its gradients in its own order"
            )
            yield Diagnostic("canonical-tie", message, path=MODEL, hint=f"{FAST_HINT}, or set `pp = 1`")


NUM_WEIGHT_DIGITS = 4
"""The number of digits of a loss weight: the integer part, and three digits of 24 bits after the point."""

_DIGIT_BASE = 2.0**24  # the base of the digits of loss weights


def tree_sum(values: Tensor) -> Tensor:
    """Returns the sum of `values` [n], n at least 1, in the order of `SumNode(0, n)`: level by level, from the leaves."""
    while (even := values.numel() // 2 * 2) > 0:
        values = torch.cat([values[:even:2] + values[1:even:2], values[even:]])
    return values[0]


_DIGIT_BITS, _NUM_NORM_DIGITS = 24, 3  # the digits of a norm's terms; see the docstring of this module
_CHUNK_NUMEL = 1 << 18
"""The number of elements that `digit_sums` converts to float64 at a time. The sum of their digits is below 2^53, thus exact."""
_LOW_BITS = 26
"""The number of low bits of a digit's sum that ranks add in a separate float64. Sums over up to 2^27 ranks are exact."""


def max_abs(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the largest absolute value in `tensors` as a float64 scalar: 0 if there are none, inf if one is not finite."""
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        largest = torch.maximum(largest, torch.linalg.vector_norm(tensor, math.inf).double())
    return torch.where(largest.isfinite(), largest, math.inf)


def digit_sums(tensors: Iterable[Tensor], largest: Tensor, norm_type: float) -> Tensor:
    """Returns the sums of the digits of |g|^p over all elements g, float64 [6] with integer values: three high parts, then
    three low parts. largest: the largest |g| of all ranks. norm_type: p, which is 1 or 2.
    """
    shrink = _power_of_two(-_exponent(largest))
    sums = torch.zeros(_NUM_NORM_DIGITS, dtype=torch.int64, device=largest.device)
    for tensor in tensors:
        for chunk in torch.split(tensor.reshape(-1), _CHUNK_NUMEL):
            remainder = chunk.to(torch.float64, copy=True).mul_(shrink)
            remainder = remainder.square_() if norm_type == 2 else remainder.abs_()
            for number in range(_NUM_NORM_DIGITS):
                digit = remainder.mul_(2.0**_DIGIT_BITS).floor()
                sums[number] += digit.sum().to(torch.int64)
                remainder.sub_(digit)
    high = sums >> _LOW_BITS
    return torch.cat([high, sums - (high << _LOW_BITS)]).double()


def norm_from_digits(summed: Tensor, largest: Tensor, norm_type: float) -> Tensor:
    """Returns the norm as a float64 scalar, or inf if a gradient is not finite. summed: the sum of all ranks' `digit_sums`."""
    halves = summed.to(torch.int64).view(2, _NUM_NORM_DIGITS)
    total = torch.zeros((), dtype=torch.float64, device=largest.device)
    for number in reversed(range(_NUM_NORM_DIGITS)):
        value = halves[0, number].double() * 2.0**_LOW_BITS + halves[1, number].double()
        total = total + value * 2.0 ** (-_DIGIT_BITS * (number + 1))
    root = total.sqrt() if norm_type == 2 else total
    return torch.where(largest.isfinite(), root * _power_of_two(_exponent(largest)), math.inf)


def _exponent(largest: Tensor) -> Tensor:
    """Returns the smallest e with `largest` < 2^e; 0 if `largest` is 0 or not finite."""
    exponent: Tensor = torch.frexp(torch.where(largest.isfinite(), largest, 0.0)).exponent
    return exponent


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones((), dtype=torch.float64, device=exponent.device), exponent)


class ExactTotals(Totals):
    """Computes a loss and a norm that do not depend on the layout. The constructor is a collective over all ranks. loss: the
    loss of each microbatch of the global batch, float64, with zeros for the microbatches of other ranks.
    """

    def __init__(self, groups: Groups, gradients: Sequence[NormGroup], loss: Tensor, norm_type: float) -> None:
        self._norm_type = norm_type
        self._loss = loss
        stage = groups["pp"].coord
        # Only one of the ranks that hold copies of the same elements counts them.
        self._counted: list[Tensor] = []
        for group in gradients:
            if groups[group.reduce_group].coord < group.num_shards and stage == group.stages[0]:
                self._counted += group.tensors
        self._largest = max_abs((tensor for group in gradients for tensor in group.tensors), loss.device)
        # All ranks call this collective at the end of every step, before the totals are summed.
        groups["all"].all_reduce(self._largest, "max", label="the largest gradient").wait()

    def terms(self) -> Tensor:
        norm_terms = [] if math.isinf(self._norm_type) else [digit_sums(self._counted, self._largest, self._norm_type)]
        return torch.cat([*norm_terms, self._loss])

    def loss_and_norm(self, summed: Tensor) -> tuple[Tensor, Tensor]:
        num_losses = self._loss.numel()
        loss = tree_sum(summed[-num_losses:])
        if math.isinf(self._norm_type):
            return loss, self._largest
        return loss, norm_from_digits(summed[:-num_losses], self._largest, self._norm_type)
