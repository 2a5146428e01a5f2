"""Sums microbatches in a fixed tree over their numbers in the global batch.

    [0,7)                                       A node of two leaves or more is split at the largest power of two below its
     ├── [0,4)                                  length: for 2^n leaves the perfect tree, else perfect trees side by side,
     │    ├── [0,2) ── 0, 1                     the largest first, joined from the right.
     │    └── [2,4) ── 2, 3
     └── [4,7)                                  rank 0 of 2 has 0 to 3:  [0,4)
          ├── [4,6) ── 4, 5                     rank 1 has 4 to 6:       [4,7)
          └── 6                                 ranks of three cuts, 0-2, 3-4, 5-6:  [0,2) 2 | 3 4 | 5 6

Any division of the leaves into runs gives nodes that add up to the same root. Each node is either inside a run, or disjoint
from it, or split by its border. Take the maximal nodes of a run: those inside it whose parent is not. They are disjoint, and
they cover the run (a leaf is a node inside it). A parent whose two children lie in different runs finds these, or the nodes
that they are made of, among the runs' nodes. So adding siblings until one node is left performs exactly the additions of the
tree, in any order of nodes: the operands of each addition are fixed, and a + b equals b + a bit for bit.

A run has at most 2 log2(n) + 1 maximal nodes: each border of it splits one node per level, which leaves at most one child
inside. Leaves that come in order leave one node per level open at a time, as the digits of a binary counter: log2(n) of them.

An accumulator sums each microbatch of a gradient separately:

    contributions of a microbatch ──> leaf ──> partial sums, added ──> settle ──> rows, one per node of this rank's run
                                        └ closed when another begins                 └ a reducer adds up those of all ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from sley_core.engine.accumulators import Accumulator, add_at
from sley_core.engine.canonical.totals import ExactTotals, tree_sum, weight_digits, weight_of
from sley_core.engine.direct import is_plain_embedding, is_plain_linear
from sley_core.engine.reduction import Reduction, Sums
from sley_core.engine.registry import Param, Stages
from sley_core.errors import Diagnostic, PlanError, RunError
from sley_core.model.layers import MODEL
from sley_core.topology import DEFAULT_CHANNEL

if TYPE_CHECKING:
    from sley_core.comm.group import Group, Groups
    from sley_core.comm.progress import SentBytes
    from sley_core.engine.buffers import NormGroup
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.step_state import StepState


class Node(NamedTuple):
    """A node of the tree: the sum of the microbatches from `first` to before `last`."""

    first: int
    last: int

    @property
    def children(self) -> tuple[Node, Node]:
        """Returns the two nodes whose sum is this node, which must not be a leaf."""
        length = self.last - self.first
        assert length > 1, f"{self} is a leaf"
        middle = self.first + (1 << ((length - 1).bit_length() - 1))
        return Node(self.first, middle), Node(middle, self.last)


def leaf_node(index: int) -> Node:
    return Node(index, index + 1)


def sibling(node: Node, num_leaves: int) -> Node | None:
    """Returns the node that is added to `node` in the tree of `num_leaves`, or None for the root."""
    first, last = node
    length = last - first
    if last < num_leaves and not first & length:
        return Node(last, min(last + length, num_leaves))
    return Node(first - (first & -first), first) if first else None


def parent(node: Node, other: Node) -> Node:
    return Node(min(node.first, other.first), max(node.last, other.last))


def covering_nodes(first: int, last: int, num_leaves: int) -> list[Node]:
    """Returns the shortest ordered list of nodes that covers the leaves from `first` to before `last`."""
    nodes: list[Node] = []
    while first < last:
        node = leaf_node(first)
        while (other := sibling(node, num_leaves)) is not None and node.last == other.first and other.last <= last:
            node = parent(node, other)
        nodes.append(node)
        first = node.last
    return nodes


def leaf_range(coord: int, size: int, num_leaves: int) -> tuple[int, int]:
    """Returns the range of leaves of rank `coord` in a group of `size` ranks that share all leaves."""
    assert num_leaves % size == 0, f"{num_leaves} microbatches over {size} ranks"
    size_per_rank = num_leaves // size
    return coord * size_per_rank, (coord + 1) * size_per_rank


class SumMemory:
    """Allocates and reuses the memory of partial sums within one step. created: the tensors allocated since `clear`."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}  # sums that are no longer needed
        self.created: list[Tensor] = []

    def allocate(self, like: Tensor) -> Tensor:
        """Returns memory for one more sum, of the shape and dtype of `like`, with arbitrary contents."""
        free = self.free.get((like.shape, like.dtype))
        if free:
            return free.pop()
        memory = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.created.append(memory)
        return memory

    def clear(self) -> None:
        self.free.clear()
        self.created.clear()


class PartialSums:
    """Adds up the contributions to one gradient, as far as the tree of `num_leaves` allows, separately for each use of the
    parameter.

    home: the tensor that should hold the final sum, if it is an operand. sum_memory: receives the memory of merged sums.
    """

    def __init__(self, num_leaves: int, sum_memory: SumMemory | None = None, home: Tensor | None = None) -> None:
        self.num_leaves = num_leaves
        self.sum_memory = sum_memory
        self.home = home
        self._sums_by_node: dict[tuple[int, Node], Tensor] = {}

    def __len__(self) -> int:
        return len(self._sums_by_node)

    @property
    def nodes(self) -> list[tuple[int, Node]]:
        """Returns the (parameter use, node) pairs of the stored sums."""
        return sorted(self._sums_by_node)

    def put(self, use: int, node: Node, value: Tensor) -> None:
        """Stores the sum of `node`, and owns its memory. Adds it to its sibling if that is stored, and so on up the tree."""
        while True:
            other = sibling(node, self.num_leaves)
            stored = self._sums_by_node.pop((use, other), None) if other is not None else None
            if other is None or stored is None:
                break
            value = self._add_pair(stored, value)
            node = parent(node, other)
        assert (use, node) not in self._sums_by_node, f"{node} came twice"
        self._sums_by_node[use, node] = value

    def pop(self, use: int, node: Node, like: Tensor) -> Tensor:
        """Removes and returns the sum of `node`. A microbatch without a contribution counts as zeros of the shape of `like`."""
        stored = self._sums_by_node.pop((use, node), None)
        if stored is not None:
            return stored
        has_inner = any(
            stored_use == use and node.first <= stored.first and stored.last <= node.last
            for stored_use, stored in self._sums_by_node
        )
        if not has_inner:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        left, right = node.children
        return self._add_pair(self.pop(use, left, like), self.pop(use, right, like))

    def _add_pair(self, total: Tensor, other: Tensor) -> Tensor:
        """Returns the sum of both, computed in place, in `home` if that is an operand: a + b equals b + a bit for bit."""
        if other is self.home:
            total, other = other, total
        total.add_(other)
        if self.sum_memory is not None:
            self.sum_memory.free.setdefault((other.shape, other.dtype), []).append(other)
        return total


class TreeLeaf(NamedTuple):
    """A leaf of the tree: the index of the layer that used the parameter, among this rank's layers, and the microbatch."""

    layer_index: int
    micro: int


class CanonicalReduction(Reduction):
    """Sums in the order of one tree over all microbatches of the step.

    sum_memory: the memory of the partial sums of all gradients. Each `dp` rank has a contiguous run of the global batch, in the
    order of the ranks, and `wp` ranks are neighbours, so the ranks of every reduce group have contiguous runs.
    """

    fixed_order = True
    micro_axes = ("model", "sp", "dp")  # the tree has the microbatches of all `dp` ranks as leaves, equally many of each

    def __init__(self, groups: Groups, state: StepState) -> None:
        super().__init__(groups, state)
        self.sum_memory = SumMemory()

    @property
    def num_leaves(self) -> int:
        """Returns the number of microbatches of the global batch."""
        return self.groups["dp"].size * max(1, self.state.num_micros)

    @property
    def micro(self) -> int:
        """Returns the global number of the running microbatch, or of this rank's first one for a backward between two steps."""
        action = self.state.action
        return self.state.first_micro + (0 if action is None else action.micro)

    def nodes(self, reduce_group: str, coord: int | None = None) -> list[Node]:
        """Returns the nodes whose sums rank `coord` of the group (default: this one) contributes for each gradient."""
        group = self.groups[reduce_group]
        first, last = leaf_range(group.coord if coord is None else coord, group.size, self.num_leaves)
        return covering_nodes(first, last, self.num_leaves)

    def place_losses(self, losses: Tensor) -> Tensor:
        """Returns this rank's `losses` among zeros for other ranks, [all microbatches], so that sums over ranks are exact."""
        group = self.groups["dp"]
        spaced = losses.new_zeros(group.size, losses.numel())
        spaced[group.coord] = losses
        return spaced.reshape(-1)

    @staticmethod
    def check_model(stages: Stages, per_rank_buffers: Sequence[str]) -> None:
        """Raises PlanError "canonical-tie" for parameters that several layers hold, in modules other than plain linears and
        embeddings, or in more than two layers on several stages; "canonical-buffers" for buffers that training writes.
        """
        faults = [*_tie_faults(stages)]
        if per_rank_buffers:
            message = f"each rank updates its own {', '.join(per_rank_buffers)} from its own samples"
            hint = f"{FAST}, or modules without such buffers"
            faults.append(Diagnostic("canonical-buffers", message, path=MODEL, hint=hint))
        if faults:
            raise PlanError.from_diagnostics(faults)

    def num_sums(self, param: Param) -> int:
        return len(param.layers)

    def new_accumulator(self, param: Param, view: Tensor, *, is_loose: bool) -> Accumulator:
        return CanonicalAccumulator(self, param, view, is_loose=is_loose)

    def partial_sums(self) -> Sequence[Tensor]:
        return self.sum_memory.created

    def clear(self) -> None:
        self.sum_memory.clear()

    def concurrent_microbatches(self, group: Group) -> range:
        """Returns the microbatch that each rank of `group` runs now. Neighbours along `dp` run the same actions."""
        step = max(1, self.state.num_micros)
        begin = self.micro - group.coord * step
        return range(begin, begin + group.size * step, step)

    def sums(self, store: GradientStore, sent: SentBytes, channel: str = DEFAULT_CHANNEL) -> Sums:
        from sley_core.engine.canonical.sums import TreeSums

        return TreeSums(self, store, sent, channel)

    def totals(self, gradients: Sequence[NormGroup], loss: Tensor, norm_type: float) -> ExactTotals:
        return ExactTotals(self.groups, gradients, self.place_losses(loss), norm_type)

    def weight_terms(self, weights: Iterable[float]) -> list[float]:
        return weight_digits(weights)

    def weight_of(self, terms: Sequence[float]) -> float:
        return weight_of(terms)

    def loss_terms(self, losses: Sequence[Tensor]) -> Tensor:
        return torch.cat([self.place_losses(batch) for batch in losses])

    def loss_of(self, summed: Tensor, num_batches: int) -> float:
        return sum(float(tree_sum(losses)) for losses in torch.chunk(summed, num_batches))


class CanonicalAccumulator(Accumulator):
    """Sums the contributions of each microbatch separately, and then adds the sums in the order of the tree.

    The view holds the sum of the rank's first microbatches; the other sums have separate memory until they are added. rows:
    once finalized, the sums for the reducer, one for each use of the parameter and each node of this rank's run; the first is
    the view. If this rank has all microbatches, the view is the complete sum. is_loose: whether no handler reduces the
    gradient, so that each step allocates the view.
    """

    def __init__(self, reduction: CanonicalReduction, param: Param, view: Tensor, *, is_loose: bool) -> None:
        self.reduction = reduction
        self.is_loose = is_loose
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
        """Closes the last leaf and opens the next leaf. Raises RunError `canonical-again` if that was closed before."""
        layers = self.param.layers
        assert layer or len(layers) == 1, f"{self.param.name} is used by {layers}, so the contribution must name its layer"
        leaf = TreeLeaf(layers.index(layer) if layer else 0, self.reduction.micro if micro is None else micro)
        if leaf == self._leaf:
            return
        self._close_leaf()
        if leaf in self._closed:
            raise RunError(
                "canonical-again",
                f"the gradient of {self.param.name!r} receives several contributions from microbatch "
                f"{leaf.micro}, interleaved with others, so their sum has no fixed order",
                hint='set [parallel] reduction = "fast", or use torch.utils.checkpoint with `use_reentrant=False`, '
                'and `unit = "layer"` in [weights]',
            )
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
        if self.param.has_products:
            raise RunError(
                "canonical-autograd",
                f"the parameter {self.param.name!r} of a linear or an embedding is also used in another way, has "
                "a hook, is used under autocast, or is differentiated twice, so the order of its gradient sum "
                "depends on the layout",
                hint=FAST,
            )
        self.begin_contribution()
        super().accumulate_grad()
        self.parameter.grad, self.is_lent = None, False

    def accumulate_product(self, left: Tensor, right: Tensor) -> None:
        """Adds left^T right, which is multiplied in the factors' dtype first: `addmm` would round differently from `mm`."""
        if self._is_fresh and left.dtype == self.dtype:
            torch.mm(left.t(), right, out=self._open_leaf())
        else:
            self.accumulate(left.t() @ right)

    def accumulate_rows(self, indices: Tensor, rows: Tensor) -> None:
        if self._is_fresh:
            self._open_leaf().zero_()
        add_at(self._sum, indices, rows.to(self.dtype))

    def finalize(self) -> None:
        """Collects `rows` from the partial sums. No contribution may follow."""
        self._close_leaf()
        home = self._allocated_view()
        sums = self._new_partial_sums() if self._sums is None else self._sums
        is_whole = self.reduction.groups[self.param.reduce_group].size == 1
        nodes = [Node(0, sums.num_leaves)] if is_whole else self.reduction.nodes(self.param.reduce_group)
        rows = [sums.pop(use, node, home) for use in range(self.param.num_sums) for node in nodes]
        assert not len(sums), f"{self.param.name} has sums of other ranks' microbatches: {sums.nodes}"
        if rows[0] is not home:
            home.copy_(rows[0])
            rows[0] = home
        if is_whole:
            sum_uses(rows)
            del rows[1:]
        self.rows = rows
        self._sums = None

    def _allocated_view(self) -> Tensor:
        if self.is_loose and self.view is self._placeholder:
            self.view = torch.empty_like(self.parameter, dtype=self.dtype, memory_format=torch.contiguous_format)
        return self.view

    def _open_leaf(self) -> Tensor:
        """Returns the memory of a new leaf, with arbitrary contents."""
        self._is_fresh = False
        group = self.reduction.groups[self.param.reduce_group]
        first, _ = leaf_range(group.coord, group.size, self.reduction.num_leaves)
        # The view holds the sum of this rank's first leaf.
        is_first = self._leaf is None or self._leaf == (0, first)
        self._sum = self._allocated_view() if is_first else self.reduction.sum_memory.allocate(self._allocated_view())
        return self._sum

    def _close_leaf(self) -> None:
        """Closes the open leaf, if any, and adds it to the partial sums. No contribution to the leaf may follow."""
        leaf, self._leaf = self._leaf, None
        if leaf is None or self._is_fresh:
            return
        self._closed.add(leaf)
        if self._sums is None:
            self._sums = self._new_partial_sums()
        self._sums.put(leaf.layer_index, Node(leaf.micro, leaf.micro + 1), self._sum)

    def _new_partial_sums(self) -> PartialSums:
        return PartialSums(self.reduction.num_leaves, self.reduction.sum_memory, self._allocated_view())


def sum_uses(sums: list[Tensor]) -> Tensor:
    """Adds the sums of a parameter's uses into the first one, in layer order, and returns it."""
    first, *other_sums = sums
    for other_sum in other_sums:
        first.add_(other_sum)
    return first


FAST = 'set [parallel] reduction = "fast"'
Use = tuple[str, nn.Module, int]
"""A use of a parameter: its name there, the module that holds it, and that module's stage."""


def _tie_faults(stages: Stages) -> Iterator[Diagnostic]:
    """Yields a diagnostic "canonical-tie" for each shared parameter whose gradients cannot be summed in one order."""
    uses: dict[int, dict[str, list[Use]]] = {}  # of each parameter, by layer
    for stage, layers in stages:
        for layer in layers:
            for prefix, module in layer.module.named_modules(prefix=layer.name, remove_duplicate=False):
                for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                    by_layer = uses.setdefault(id(parameter), {})
                    by_layer.setdefault(layer.name, []).append((f"{prefix}.{attribute}", module, stage))
    for by_layer in uses.values():
        if len(by_layer) == 1:
            continue
        all_uses = [use for layer_uses in by_layer.values() for use in layer_uses]
        name = all_uses[0][0]
        unsupported = next((use for use in all_uses if not (is_plain_linear(use[1]) or is_plain_embedding(use[1]))), None)
        if unsupported is not None:
            class_name = type(unsupported[1]).__name__
            message = f"{name!r} is also {unsupported[0]!r} in a {class_name}, so the order of their gradient sum varies"
            hint = f"{FAST}, or tie only weights of plain nn.Linear and nn.Embedding"
            yield Diagnostic("canonical-tie", message, path=MODEL, hint=hint)
        elif len({use[2] for use in all_uses}) > 1 and len(by_layer) > 2:
            count = len(by_layer)
            message = f"{count} layers on several stages share {name!r}, and the stages sum its gradients in their own order"
            yield Diagnostic("canonical-tie", message, path=MODEL, hint=f"{FAST}, or set `pp = 1`")
