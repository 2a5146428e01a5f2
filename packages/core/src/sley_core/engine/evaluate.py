"""Runs the model forward only, in the process that trains it: for its loss, on held-out samples or on a program's own, and for
its outputs. Allocates no gradient and changes no state.

It runs the forwards of the training schedule, in their order: forwards wait only for forwards, so each schedule has them.

A program gets the model's outputs in the form of the batch that it gave:

    a batch of n micro-batches ──> one output, its tensors joined along the dim of samples
    a list of n micro-batches  ──> a list of n outputs
    join = True                ──> whole sequences, gathered over `sp`; else those of this rank's slice
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.actions.action import actions_of
from sley_core.comm.collectives import all_gather, all_reduce, exchanges_differ, exchanges_error, exchanges_of
from sley_core.comm.progress import BETWEEN, EVALUATION
from sley_core.engine.boundary import flatten, unflatten
from sley_core.engine.canonical.totals import spread, tree_sum
from sley_core.engine.parts import StepState
from sley_core.errors import RunError

if TYPE_CHECKING:
    from torch import nn

    from sley_core.actions.action import Lowered
    from sley_core.comm.device import Device
    from sley_core.comm.groups import Group, Groups
    from sley_core.data.dataset import Batch, Field
    from sley_core.data.feed import Feed
    from sley_core.engine.agreement import Agreement
    from sley_core.engine.execute import Executor
    from sley_core.engine.stage import Lists
    from sley_core.engine.step_batch import BatchSplitter, GivenBatch, StepBatch


@dataclass(eq=False)
class ForwardOnly:
    """Runs `executor`'s model forward only, on batches of any number of micro-batches. modules: of this rank's layers."""

    executor: Executor
    lists: Lists
    modules: Sequence[nn.Module]
    groups: Groups
    device: Device
    agreement: Agreement

    def mean_loss(self, batches: Iterable[StepBatch]) -> float:
        """Returns the mean loss over the samples of all `batches`. All ranks call it, with as many of them; it communicates.

        Raises RunError, on all ranks alike: "not-finite" if it is not finite, "nothing-counts" if no label counts.
        """
        with self._evaluating() as state:
            totals = torch.zeros(2, dtype=torch.float64)
            terms: list[Tensor] = []
            for group in self.groups.values():
                group.log.clear()
            for number, batch in enumerate(batches):
                steps = self._begin("an evaluation", number, batch, state)
                loss = self.executor.evaluate(steps, batch.micros, state)
                if loss.ndim:
                    terms.append(spread(loss, state.first_micro, self.groups["dp"].size * batch.num_micros))
                    # All ranks know the weight of the global batch already, so one rank adds it.
                    totals[1] += self.agreement.weight if self.groups["all"].coord == 0 else 0.0
                else:
                    totals += torch.tensor([float(loss), batch.weight], dtype=torch.float64)
            differs = torch.tensor([exchanges_differ(self.groups.values())], dtype=torch.float64)
            totals = torch.cat([self.device.move(torch.cat([totals, differs])), *terms])
            # All ranks evaluate after the same steps, and as many batches; stages without the loss add nothing.
            all_reduce(totals, self.groups["all"], what="the mean loss").wait()
            loss_sum, weight_sum, ranks_differ = totals[:3].tolist()
            state.standing.comes(BETWEEN)
        for losses in torch.chunk(totals[3:], len(terms)) if terms else ():
            loss_sum += float(tree_sum(losses))
        if ranks_differ:
            raise exchanges_error("an evaluation", exchanges_of(self.groups.values()), self.groups["control"])
        if not weight_sum:
            message = "the evaluated samples have a loss weight of 0, so there is no mean"
            raise RunError("nothing-counts", message, hint="look at the data: all of its labels are ignored")
        mean: float = loss_sum / weight_sum
        if not math.isfinite(mean):
            hint = "the weights may have grown too large for this data, or the data itself holds NaN or infinite values"
            raise RunError("not-finite", f"the loss of the evaluated samples is {mean}", hint=hint)
        return mean

    def outputs(self, batch: StepBatch) -> dict[int, Any]:
        """Returns the model's output for each micro-batch, of this rank's slices; nothing on ranks without the model's last
        layer. The loss is not computed. All ranks call it, and it communicates.
        """
        with self._evaluating() as state:
            steps = self._begin("a prediction", 0, batch, state)
            outputs: dict[int, Any] = {}
            self.executor.predict(steps, batch.micros, state, outputs)
            state.standing.comes(BETWEEN)
        return outputs

    @contextmanager
    def _evaluating(self) -> Iterator[StepState]:
        """Yields the state of an evaluation; all modules are in evaluation mode within the block."""
        every = [part for module in self.modules for part in module.modules()]
        training = [part.training for part in every]
        for module in self.modules:
            module.eval()
        try:
            with self.device.in_use(), self.device.random_state_kept():
                standing = self.groups.progress.standing
                state = StepState(within=standing)
                standing.comes(EVALUATION)
                yield state
        finally:
            # Each module gets its own former mode: a program may keep some in evaluation mode.
            for part, was in zip(every, training, strict=True):
                part.training = was

    def _begin(self, what: str, number: int, batch: StepBatch, state: StepState) -> Lowered:
        """Begins batch `number`, and returns its list of actions."""
        # All ranks evaluate, on models that are alike, and stages and slices have the same samples.
        self.agreement.begin(what, batch).check()
        steps = self.lists.evaluation(batch.num_micros)
        first_micro = self.groups["dp"].coord * batch.num_micros
        state.begin(number, actions_of(steps), batch.num_micros, first_micro)
        return steps


@dataclass(eq=False)
class Evaluation:
    """Measures the mean loss on the first `num_batches` global batches of `feed`, held-out samples, the same ones each time."""

    forward: ForwardOnly
    feed: Feed
    splitter: BatchSplitter
    num_batches: int

    def __call__(self) -> float:
        """Returns the mean loss over the held-out samples. All ranks call it, and it communicates; raises as `ForwardOnly`."""
        self.feed.restore({"samples": 0})
        mean = self.forward.mean_loss(self.splitter.fed(self.feed.next()) for _ in range(self.num_batches))
        self.feed.close()
        return mean


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
            message = f"an output of shapes {shapes} does not have the {length} samples of its micro-batch along dim {dim}"
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
