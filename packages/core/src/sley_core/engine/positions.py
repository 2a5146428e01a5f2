"""Computes losses of full sequences from slices (`sp`), and checks in first steps that only attention relates slices.

`WholeSequences` gathers full sequences for a loss (`[loss] sequence = "whole"`):

    rank 0   output of slice 0 ──┐ gathered   ┌── the loss of whole sequences ──> gradient of slice 0; counts
    rank 1   output of slice 1 ──┘  on both   └── the same loss               ──> gradient of slice 1

Each rank computes the full loss, which needs its memory, and keeps the gradient of its own slice, so the backward does not
communicate. The loss and its weight count only on the first rank.

Any other loss must be a sum over positions, which `PositionAdditivity` checks on a few positions of this rank's own output:

    right    loss(positions 0 to 15) = loss(0 to 7) + loss(8 to 15)
    wrong    labels that the loss shifts itself, a term that compares neighbours, a mean over the sequence

A layer that mixes positions outside its attention would see only one slice, without an error. `PositionProbe` finds it:

    first run     the layer, as it is called in training; the inputs and contexts of its attentions are recorded
    second run    the same with another input at the first and the last position but one, and with the recorded contexts

A difference at any other position, in the layer's output or in its attentions' inputs, did not pass through attention. The
second run does not communicate in attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy, deepcopy
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.engine.boundary import copy_containers
from sley_core.engine.call import tensors_in
from sley_core.engine.step_batch import dim_and_size, gather_along_dim, gather_output
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.errors import RunError
from sley_core.records import LossRecord

if TYPE_CHECKING:
    from sley_core.comm.group import Group
    from sley_core.data.dataset import Batch, Field
    from sley_core.model.layers import Layer
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Loss


def needs_whole_sequences(plan: Plan) -> bool:
    """Returns whether the plan's loss needs full sequences, by its table or by its record."""
    loss = plan.loss
    sequence = loss.record.sequence if isinstance(loss.record, LossRecord) else loss.config.sequence
    return bool(sequence == "whole")


class WholeSequences:
    """Gathers the inputs of a loss over `sp`. fields: the declared fields of slices. counts: whether this loss counts."""

    def __init__(self, fields: Mapping[str, Field], sp: Group) -> None:
        self.fields = fields
        self.sp = sp
        self.counts = sp.coord == 0

    def __call__(self, output: Any, batch: Mapping[str, Tensor], micro: Batch) -> tuple[Any, dict[str, Tensor]]:
        """Returns the output and the fields of full sequences. Blocks. All ranks of `sp` call it in the same order.

        batch: the fields that the loss reads, on the device. micro: all fields of the microbatch. Raises RunError
        "outputs-apart" for an output without the position dim.
        """
        fields = {}
        for name, value in batch.items():
            dim = self.fields[name].sequence_dim
            fields[name] = value if dim is None else gather_along_dim(value, dim, self.sp, f"the slices of `{name}`")
        return gather_output(output, dim_and_size(micro, self.fields, "sequence_dim"), self.sp), fields


_NARROW_TOLERANCE = 2**-6
"""The relative tolerance of the sum of halves if the loss computes in a type narrower than fp64: bf16 has 8 bits."""

WINDOW = 16
"""The number of positions per check. The beginning, the middle and the end of a slice are checked."""


class PositionAdditivity:
    """Checks that `loss` is a sum over positions, in each forward until a check succeeds. fields: the data's declaration."""

    def __init__(self, loss: Loss, fields: Mapping[str, Field]) -> None:
        self.loss = loss
        self.fields = fields
        self._is_checked = False

    @torch.no_grad()
    def check(self, output: object, batch: Mapping[str, Tensor]) -> None:
        """Raises RunError "loss-not-additive" for a loss that relates positions. Losses that draw random numbers, or that
        cannot be evaluated on a part of the positions, are not checked. output: the model's output for this rank's slice
        `batch`.
        """
        if self._is_checked or type(output) is not Tensor:
            return
        fields = [name for name, field in self.fields.items() if field.sequence_dim is not None and name in batch]
        dim, length = dim_and_size(batch, self.fields, "sequence_dim") if fields else (0, 0)
        size = min(WINDOW, length) // 2 * 2
        if size < 2 or output.ndim <= dim or output.shape[dim] != length:
            return
        starts = sorted({0, (length - size) // 2, length - size})
        results = [self._check_window(output, batch, dim, start, size) for start in starts]  # all of them
        self._is_checked = any(results)

    def _check_window(self, output: Tensor, batch: Mapping[str, Tensor], dim: int, start: int, size: int) -> bool:
        """Compares the loss of a window with the sum over its halves. Returns whether no further check is needed."""
        half = size // 2
        spans = (start, size), (start, half), (start + half, half), (start, size)

        def window_loss(start: int, size: int) -> Tensor:
            """Returns the loss of `size` positions from `start` on, computed in fp64 if the loss supports it."""
            part = {}
            for name, value in batch.items():
                sequence_dim = self.fields[name].sequence_dim
                part[name] = value if sequence_dim is None else value.narrow(sequence_dim, start, size)
            window = output.narrow(dim, start, size)
            try:
                return loss.loss(window.double(), part)
            except RuntimeError:  # it has tensors of the model's type
                return loss.loss(window, part)

        try:
            with torch.random.fork_rng([output.device] if output.device.type == "cuda" else []):
                # Called on a copy: a loss may have state, such as a count of its calls.
                loss = deepcopy(self.loss) if isinstance(self.loss, nn.Module) else copy(self.loss)
                losses = [window_loss(*span) for span in spans]
        except Exception:  # a loss need not take a part of an output, nor another type, nor be copied
            return True  # it cannot be checked, and is not tried again in every forward
        window_total, left, right, window_total_again = map(float, losses)
        scale = max(abs(window_total), abs(left), abs(right))
        limit = 1e-6 if all(loss.dtype == torch.float64 for loss in losses) else _NARROW_TOLERANCE
        if not 0 < scale < float("inf"):
            return False  # no label counts in this window
        if abs(left + right - window_total) <= limit * scale or window_total != window_total_again:
            return True
        raise RunError(
            "loss-not-additive",
            f"the loss of {size} positions is {window_total:g}, but the losses of its halves add up to {left:g} + "
            f"{right:g} = {left + right:g}, so the loss combines positions, but each rank of `sp` has only a "
            "slice",
            path=("parallel", "sp"),
            hint="return a sum over positions, with labels that the data shifts; if the loss compares or "
            'averages positions, set sequence = "whole" in [loss]',
        )


Call = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]

AttentionCall = tuple[list[Tensor], Tensor, Tensor]
"""The inputs of one attention call, its context, and the state of the device's generator after it."""


class AttentionRecorder:
    """Records the attentions of a layer's first run, and returns their contexts in its second run. dim: the dim of the `length`
    positions. The inputs of the runs differ at the first and the last position but one, so that reversed positions are
    detected.
    """

    def __init__(self, dim: int, length: int) -> None:
        self.dim, self.length = dim, length
        self.is_second = False
        self.is_mixed = False
        self._calls: list[AttentionCall] = []
        self._next = 0

    def attend(self, tensors: Sequence[Tensor], attention: Callable[[], Tensor]) -> Tensor:
        """Returns `attention()`, the context of `tensors` [b, s, ...], or in the second run the recorded context."""
        if not self.is_second:
            context = attention()
            state = _generator(context.device).get_state()
            self._calls.append(([tensor.detach().clone() for tensor in tensors], context.detach().clone(), state))
            return context
        before, context, state = self._calls[self._next]
        self._next += 1
        _generator(context.device).set_state(state)  # as if it had drawn
        self.is_mixed |= any(self.has_difference(expected, actual, 1) for expected, actual in zip(before, tensors, strict=True))
        return context.clone()

    def perturb(self, tensor: Tensor) -> None:
        """Overwrites two positions of `tensor`, if its `dim` has the size of this slice."""
        if tensor.ndim <= self.dim or tensor.shape[self.dim] != self.length:
            return
        for place in (tensor.select(self.dim, 0), tensor.select(self.dim, self.length - 2)):
            if tensor.is_floating_point():
                largest = torch.maximum(-tensor.amin(), tensor.amax()).nan_to_num(0.0, 0.0, 0.0)
                waves = torch.cos(torch.arange(place.numel(), device=place.device, dtype=torch.float32)).view(place.shape)
                place.copy_(waves * torch.where(largest > 0, largest, 1.0) * 4)
            elif tensor.dtype is not torch.bool and not tensor.is_complex():
                least, most = tensor.amin(self.dim), tensor.amax(self.dim)
                place.copy_(torch.where(place == least, most, least))

    def has_difference(self, before: Tensor, after: Tensor, dim: int) -> bool:
        """Returns whether two tensors with this slice's positions along `dim` differ at positions with equal inputs."""
        if before.shape != after.shape or before.ndim <= dim or before.shape[dim] != self.length:
            return False
        spans = (1, self.length - 3), (self.length - 1, 1)
        pairs = [(before.narrow(dim, *span), after.narrow(dim, *span)) for span in spans]
        if all(torch.equal(*pair) for pair in pairs):  # as a rule, without any memory
            return False
        if not before.is_floating_point():
            return True
        eps = torch.finfo(before.dtype).eps
        # Only a few digits for narrow types: tokens that change places, as with experts, are multiplied in other blocks.
        digits = 4 if eps > 1e-3 else 64
        limit = max(float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) for tensor, _ in pairs if tensor.numel()) * digits * eps
        return not all(torch.allclose(*pair, rtol=0.0, atol=limit, equal_nan=True) for pair in pairs)


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]


_RUNNING: ContextVar[AttentionRecorder | None] = ContextVar("positions", default=None)


def run_attention(tensors: Sequence[Tensor], attention: Callable[[], Tensor]) -> Tensor:
    """Returns `attention()`, the context of this rank's slices `tensors` [b, s, ...], and shows it to a running probe."""
    recorder = _RUNNING.get()
    return attention() if recorder is None else recorder.attend(tensors, attention)


class PositionProbe:
    """Probes each layer once, on slices of `length` positions, except layers that match `unchecked_layers`."""

    def __init__(self, fields: Mapping[str, Field], length: int, unchecked_layers: Sequence[str]) -> None:
        dims = [field.sequence_dim for field in fields.values() if field.sequence_dim is not None]
        self.dim = dims[0] if dims else 0
        self.length = length if dims else 0
        self.unchecked_layers = unchecked_layers
        self._probed_layers: set[str] = set()

    def should_probe(self, layer: Layer, micro: MicroStep) -> bool:
        """Returns whether to probe `layer` in this call. The result is the same on all ranks that share sequences."""
        if micro.phase is not Phase.TRAIN or layer.name in self._probed_layers or self.length < 3:
            return False
        self._probed_layers.add(layer.name)
        return not any(fnmatchcase(layer.name, pattern) for pattern in self.unchecked_layers)

    def call(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], first: Call, second: Call) -> Any:
        """Returns `first(args, fields)`. second: the same without a policy. Raises RunError "sequence-mixing"."""
        positions = AttentionRecorder(self.dim, self.length)
        inputs = args, dict(fields)
        perturbed_inputs = copy_containers(inputs, {id(tensor): tensor.detach().clone() for tensor in tensors_in(inputs)})
        token = _RUNNING.set(positions)
        try:
            output = first(args, fields)
            for tensor in tensors_in(perturbed_inputs):
                positions.perturb(tensor)
            positions.is_second = True
            with torch.no_grad(), _restore_modules(layer.module.modules()):
                before, after = list(tensors_in((output,))), list(tensors_in((second(*perturbed_inputs),)))
                is_mixed = len(before) == len(after) and any(
                    positions.has_difference(tensor.detach(), after_tensor, self.dim)
                    for tensor, after_tensor in zip(before, after, strict=True)
                )
                if is_mixed or positions.is_mixed:
                    raise RunError(
                        "sequence-mixing",
                        f"the layer {layer.name!r} ({type(layer.module).__name__}) mixes positions outside its "
                        "attention, but each rank of `sp` has only a slice: a change at one position changes its output "
                        "at others",
                        path=("sequence", "use"),
                        hint="set `sp = 1`, or list the layer in `[sequence] unchecked_layers` if it may work on "
                        "separate slices",
                    )
        finally:
            _RUNNING.reset(token)
        return output


@contextmanager
def _restore_modules(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores attributes and buffers of `modules` after the block, such as counters and running averages."""
    states = [
        (
            module,
            dict(vars(module)),
            dict(module._buffers),
            [(buffer, buffer.clone(), buffer._version) for buffer in module.buffers(recurse=False)],
        )
        for module in modules
    ]
    try:
        yield
    finally:
        for module, attributes, buffers, values in states:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for buffer, value, version in values:
                if buffer._version != version:  # a write would invalidate what autograd has saved
                    buffer.copy_(value)
