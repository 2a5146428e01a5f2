"""What a chunk holds of one micro-batch between its forward and its backward: edges of the graph, no outputs.

    inputs ──> chunk ──> output ──> sent away; its storage is free as soon as nobody else needs it
    (leaves)              └ edges: where the backward will start

Keeping `GradientEdge`s instead of outputs is what gives the storage of a sent output back, views included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sley_core.engine.boundary import Description, Leaf, flatten, unflatten
from sley_core.errors import RunError


@dataclass
class Held:
    """One chunk and one micro-batch. inputs: what came in, as leaves; description: of them, None on the first chunk.

    loss: the sum over the micro-batch, on the last chunk; edges: of the outputs that have a gradient, elsewhere.
    """

    inputs: list[Tensor] = field(default_factory=list)
    description: Description | None = None
    edges: list[GradientEdge] = field(default_factory=list)
    loss: Tensor | None = None

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Runs this chunk's backward from `gradients` of its outputs; returns those of its inputs, zeros where none came.

        Raises RunError `no-gradient` for a loss that no gradient could leave.
        """
        if self.loss is not None:
            if not self.loss.requires_grad:
                raise RunError(
                    "no-gradient",
                    "the loss of a micro-batch depends on no parameter that is trained",
                    hint="a layer or the loss detaches what it is given, or all that the micro-batch uses is frozen",
                )
            torch.autograd.backward(self.loss, gradients[0])
        elif self.edges:
            torch.autograd.backward(self.edges, list(gradients))
        self.loss, self.edges = None, []
        found = []
        for tensor in self.inputs:
            if tensor.requires_grad:
                found.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
                tensor.grad = None
        return found


def describe(value: Any) -> tuple[Description, list[Tensor]]:
    """The description of a chunk's output, and its tensors in order."""
    tensors, structure = flatten(value)
    leaves = tuple(Leaf(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors)
    return Description(leaves, structure), tensors


def edges_of(tensors: Sequence[Tensor]) -> list[GradientEdge]:
    """Where the backward of those tensors starts that have a gradient."""
    return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


def as_inputs(description: Description, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Leaves of a new graph over the received `tensors`, and the value that the next chunk is called with."""
    inputs = [
        tensor.detach().requires_grad_(leaf.has_gradient)
        for leaf, tensor in zip(description.leaves, tensors, strict=True)
    ]
    return inputs, unflatten(inputs, description.structure)
