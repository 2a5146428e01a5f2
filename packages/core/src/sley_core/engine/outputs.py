"""Gives a program the model's outputs in the form of the batch that it gave.

a batch of n micro-batches ──> one output, its tensors joined along the dim of samples
a list of n micro-batches  ──> a list of n outputs
join = True                ──> whole sequences, gathered over `sp`; else those of this rank's slice
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.comm.collectives import all_gather
from sley_core.engine.boundary import flatten, unflatten
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.groups import Group
    from sley_core.data.dataset import Batch, Field
    from sley_core.engine.step_batch import GivenBatch

Spot = tuple[int, int]
"""A dim, and its length."""


@dataclass
class Collected:
    """Collects what a step or a prediction returns to the program. micros: this rank's micro-batches. outputs: the model's
    output of each, by its number; empty on ranks without the model's last layer.
    """

    micros: Sequence[Batch] = ()
    outputs: dict[int, Any] = dataclass_field(default_factory=dict)

    def in_form(self, given: GivenBatch | None, fields: Mapping[str, Field], sp: Group, *, join: bool) -> Any:
        """Returns the outputs in the form of `given`, None for a batch of the plan's data; None if there are none.

        fields: what the data declares. join: whether to gather whole sequences over `sp`, whose ranks then all call it. Raises
        RunError "outputs-apart" for a tensor without the dim along which it would be joined.
        """
        if not self.outputs:
            return None
        found = [self.outputs[number] for number in range(len(self.micros))]
        is_one = given is None or isinstance(given, Mapping)
        if is_one and len(found) > 1:
            found = [_in_one(found, spot_of(self.micros[0], fields, "batch_dim"))]
        if join and sp.size > 1:
            lengths = [spot_of(micro, fields, "sequence_dim") for micro in self.micros]
            found = [whole(output, spot, sp) for output, spot in zip(found, lengths, strict=False)]
        return found[0] if is_one else found


def gathered(tensor: Tensor, dim: int, group: Group, what: str) -> Tensor:
    """Returns the tensors of all ranks of `group`, of one shape, joined along `dim` in the order of the group; blocks. In a
    backward each rank gets its own part of the gradient that it made, which must be the same on all: nothing is summed.
    """
    found: Tensor = _Gathered.apply(tensor, dim, group, what)  # type: ignore[no-untyped-call]  # torch's
    return found


class _Gathered(torch.autograd.Function):
    """Makes `gathered` differentiable."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Group, what: str) -> Tensor:
        ctx.dim, ctx.first, ctx.length = dim, group.coord * tensor.shape[dim], tensor.shape[dim]
        every = tensor.new_empty((group.size, *tensor.shape))
        all_gather(every.flatten(), tensor.contiguous().flatten(), group, what=what).wait()
        return torch.cat(every.unbind(), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(ctx.dim, ctx.first, ctx.length), None, None, None


def spot_of(micro: Batch, fields: Mapping[str, Field], which: str) -> Spot:
    """Returns the dim of samples or of positions, and its length, by the first field of the batch that has one."""
    dims = ((name, getattr(field, which)) for name, field in fields.items() if name in micro)
    name, dim = next((name, dim) for name, dim in dims if dim is not None)
    return dim, micro[name].shape[dim]


def _in_one(outputs: Sequence[Any], samples: Spot) -> Any:
    """Returns one output whose tensors are those of all micro-batches, joined."""
    taken = [flatten(output) for output in outputs]
    for tensors, structure in taken:
        if structure != taken[0][1] or not all(_has(one, samples) for one in tensors):
            shapes = [list(one.shape) for one in tensors]
            dim, length = samples
            message = (
                f"an output of shapes {shapes} does not have the {length} samples of its micro-batch along dim {dim}"
            )
            raise RunError("outputs-apart", message, hint="give a list of micro-batches: each gets its own output")
    parts = zip(*(tensors for tensors, _ in taken), strict=True)
    return unflatten([torch.cat(every, samples[0]) for every in parts], taken[0][1])


def whole(output: Any, positions: Spot, sp: Group) -> Any:
    """Returns the output of whole sequences; a collective of `sp` for each tensor, in the order of the output."""
    tensors, structure = flatten(output)
    for tensor in tensors:
        if not _has(tensor, positions):
            dim, length = positions
            message = f"an output of shape {list(tensor.shape)} does not have the {length} positions of a slice along dim {dim}"
            hint = 'only outputs of every position can be joined: leave `join`, or [loss] sequence = "whole", out'
            raise RunError("outputs-apart", message, hint=hint)
    return unflatten([gathered(one, positions[0], sp, "the outputs of slices") for one in tensors], structure)


def _has(tensor: Tensor, spot: Spot) -> bool:
    return tensor.ndim > spot[0] and tensor.shape[spot[0]] == spot[1]
