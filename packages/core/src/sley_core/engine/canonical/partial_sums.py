"""The incomplete sums of one gradient: a binary counter, with one tensor per digit that is set."""

from __future__ import annotations

import torch
from torch import Tensor

from sley_core.engine.canonical.tree import Node, parent, sibling


class Spares:
    """Lends memory for partial sums, and reuses it; shared by all gradients of a run, within one step.

    made: all tensors allocated since `clear`, of num_bytes. max_bytes: the most since the run began.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.made: list[Tensor] = []
        self.num_bytes = 0
        self.max_bytes = 0

    def lend(self, like: Tensor) -> Tensor:
        """Returns memory for one more sum, of the shape and dtype of `like`, with arbitrary contents."""
        free = self._free.get((like.shape, like.dtype))
        if free:
            return free.pop()
        made = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.made.append(made)
        self.num_bytes += made.nbytes
        self.max_bytes = max(self.max_bytes, self.num_bytes)
        return made

    def take_back(self, tensor: Tensor) -> None:
        """Takes back the memory of a sum that is no longer needed."""
        self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)

    def clear(self) -> None:
        """Frees all memory, at the end of a step."""
        self._free.clear()
        self.made.clear()
        self.num_bytes = 0


class PartialSums:
    """Holds the contributions to one gradient, added up as far as the tree of `num_leaves` micro-batches allows, per use of the
    parameter.

    home: the tensor that should hold the last sum, if it is one of the operands. spares: takes the memory of sums that were
    added to another.
    """

    def __init__(self, num_leaves: int, spares: Spares | None = None, home: Tensor | None = None) -> None:
        self.num_leaves = num_leaves
        self.spares = spares
        self.home = home
        self._held: dict[tuple[int, Node], Tensor] = {}

    def __len__(self) -> int:
        """Returns how many sums are held."""
        return len(self._held)

    @property
    def nodes(self) -> list[tuple[int, Node]]:
        """The sums that are held, as (use of the parameter, node)."""
        return sorted(self._held)

    def put(self, use: int, node: Node, value: Tensor) -> None:
        """Takes over the sum of `node`, and its memory, and adds it to its sibling if that is there, and so on up the tree."""
        while True:
            other = sibling(node, self.num_leaves)
            there = self._held.pop((use, other), None) if other is not None else None
            if other is None or there is None:
                break
            value = self._added(there, value)
            node = parent(node, other)
        assert (use, node) not in self._held, f"{node} came twice"
        self._held[use, node] = value

    def take(self, use: int, node: Node, like: Tensor) -> Tensor:
        """Removes and returns the sum of `node`. A micro-batch without a contribution counts as zeros of the shape of
        `like`.
        """
        known = self._held.pop((use, node), None)
        if known is not None:
            return known
        inside = any(of == use and node.first <= one.first and one.last <= node.last for of, one in self._held)
        if not inside:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        left, right = node.children
        return self._added(self.take(use, left, like), self.take(use, right, like))

    def _added(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns the sum, in the memory of either (of `home`, if it is one of them): a + b is b + a, bit for bit."""
        if other is self.home:
            one, other = other, one
        one.add_(other)
        if self.spares is not None:
            self.spares.take_back(other)
        return one
