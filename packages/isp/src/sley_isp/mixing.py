"""Refuses layers that mix positions outside their attention, since each rank has only a slice of a sequence.

`PositionProbe` finds them in the first step:

    first run     the layer, as it is called in training; the inputs and contexts of its attentions are recorded
    second run    the same with another input at the first and the last position but one, and with the recorded contexts

A difference at any other position, in the layer's output or in its attentions' inputs, did not pass through attention. The
second run does not communicate in attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.api.model import copy_containers, tensors_in
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.api.data import DataInfo
    from sley_core.api.model import Layer
    from sley_core.protocols import LayerCall

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
    """Probes each layer once, in its first call in training, except layers that match `unchecked_layers`.

    data: the declaration of the data. num_slices: the number of slices of each sequence.
    """

    def __init__(self, data: DataInfo, num_slices: int, unchecked_layers: Sequence[str]) -> None:
        self.dim = next((field.sequence_dim for field in data.fields.values() if field.sequence_dim is not None), 0)
        self.length = (data.sequence or 0) // num_slices
        self.unchecked_layers = unchecked_layers
        self._probed_layers: set[str] = set()

    def call(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], call: LayerCall, rerun: LayerCall) -> Any:
        """Returns `call(args, fields)`, and compares it with a `rerun` if the layer was not probed before. All ranks that share
        sequences call it for the same layers. Raises RunError "sequence-mixing".
        """
        if layer.name in self._probed_layers or self.length < 3:
            return call(args, fields)
        self._probed_layers.add(layer.name)
        if any(fnmatchcase(layer.name, pattern) for pattern in self.unchecked_layers):
            return call(args, fields)
        positions = AttentionRecorder(self.dim, self.length)
        inputs = args, dict(fields)
        perturbed_inputs = copy_containers(inputs, {id(tensor): tensor.detach().clone() for tensor in tensors_in(inputs)})
        token = _RUNNING.set(positions)
        try:
            output = call(args, fields)
            for tensor in tensors_in(perturbed_inputs):
                positions.perturb(tensor)
            positions.is_second = True
            with torch.no_grad(), _restore_modules(layer.module.modules()):
                before, after = list(tensors_in((output,))), list(tensors_in((rerun(*perturbed_inputs),)))
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
