"""Finds layers that mix positions beside their attention: under `sp` they would see one slice alone, without an error.

    first run     the layer, as it is called in training; its attentions' inputs and contexts are noted
    second run    the same with another input at the first and the last position but one; attentions give the noted contexts

Whatever differs at other positions, in what the layer returns or in what its attentions are given, came there in another way
than through attention. Each layer is asked at its first call in training; its second run makes no exchange of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.engine.boundary import copied
from sley_core.engine.call import is_aside, tensors_in
from sley_core.engine.step_state import Phase
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.data.dataset import Field
    from sley_core.engine.step_state import MicroStep
    from sley_core.model.layers import Layer

Call = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
"""Calls a layer with arguments and fields."""

Noted = tuple[list[Tensor], Tensor, Tensor]
"""Of one attention: what it was given, its context, and the state of the device's generator after it."""


class Positions:
    """Notes the attentions of a layer's first run, and gives their contexts to its second. dim: of positions, `length` in all;
    the input differs at the first and at the last but one: one end shows also what reverses positions.
    """

    def __init__(self, dim: int, length: int) -> None:
        self.dim, self.length = dim, length
        self.is_second = False
        self.is_mixed = False
        self._noted: list[Noted] = []
        self._next = 0

    def attend(self, tensors: Sequence[Tensor], attention: Callable[[], Tensor]) -> Tensor:
        """Returns `attention()`, which is of `tensors` [b, s, ...], positions at dim 1; in the second run what it gave in the
        first.
        """
        if not self.is_second:
            context = attention()
            state = _generator(context.device).get_state()
            self._noted.append(([one.detach().clone() for one in tensors], context.detach().clone(), state))
            return context
        before, context, state = self._noted[self._next]
        self._next += 1
        _generator(context.device).set_state(state)  # as if it had drawn
        self.is_mixed |= any(self.differ(one, other, 1) for one, other in zip(before, tensors, strict=True))
        return context.clone()

    def change(self, tensor: Tensor) -> None:
        """Writes other values to two positions of `tensor`, if it has this slice's positions at `dim`."""
        if tensor.ndim <= self.dim or tensor.shape[self.dim] != self.length:
            return
        for place in (tensor.select(self.dim, 0), tensor.select(self.dim, self.length - 2)):
            if tensor.is_floating_point():
                largest = torch.maximum(-tensor.amin(), tensor.amax()).nan_to_num(0.0, 0.0, 0.0)
                waves = torch.cos(torch.arange(place.numel(), device=place.device, dtype=torch.float32)).view(
                    place.shape
                )
                place.copy_(waves * torch.where(largest > 0, largest, 1.0) * 4)
            elif tensor.dtype is not torch.bool and not tensor.is_complex():
                least, most = tensor.amin(self.dim), tensor.amax(self.dim)
                place.copy_(torch.where(place == least, most, least))

    def differ(self, before: Tensor, after: Tensor, dim: int) -> bool:
        """Returns whether two tensors with this slice's positions at `dim` differ where the input does not."""
        if before.shape != after.shape or before.ndim <= dim or before.shape[dim] != self.length:
            return False
        spans = (1, self.length - 3), (self.length - 1, 1)
        pairs = [(before.narrow(dim, *span), after.narrow(dim, *span)) for span in spans]
        if all(torch.equal(*pair) for pair in pairs):  # as a rule, without any memory
            return False
        if not before.is_floating_point():
            return True
        eps = torch.finfo(before.dtype).eps
        # Of narrow types a few digits: tokens that change places, as with experts, are multiplied in other blocks.
        digits = 4 if eps > 1e-3 else 64
        limit = max(float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) for one, _ in pairs if one.numel()) * digits * eps
        return not all(torch.allclose(*pair, rtol=0.0, atol=limit, equal_nan=True) for pair in pairs)


def _generator(device: torch.device) -> torch.Generator:
    """Returns torch's own generator of `device`."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]


_RUNNING: ContextVar[Positions | None] = ContextVar("positions", default=None)


def attended(tensors: Sequence[Tensor], attention: Callable[[], Tensor]) -> Tensor:
    """Returns `attention()`, the context of `tensors` [b, s, ...] of which this rank has a slice. A sequence attention calls
    its attention through this, so that a layer can be asked whether it mixes positions in another way.
    """
    running = _RUNNING.get()
    return attention() if running is None or is_aside() else running.attend(tensors, attention)


class PositionProbe:
    """Asks each layer once. fields: what the dataset declares of a rank's slice, `length` positions. apart: patterns of names
    of layers that are not asked.
    """

    def __init__(self, fields: Mapping[str, Field], length: int, apart: Sequence[str]) -> None:
        dims = [field.sequence_dim for field in fields.values() if field.sequence_dim is not None]
        self.dim = dims[0] if dims else 0
        self.length = length if dims else 0
        self.apart = apart
        self._asked: set[str] = set()

    def wants(self, layer: Layer, micro: MicroStep) -> bool:
        """Returns whether `layer` is to be asked at this call; the same on all ranks that have its positions."""
        if micro.phase is not Phase.TRAIN or layer.name in self._asked or self.length < 3:
            return False
        self._asked.add(layer.name)
        return not any(fnmatchcase(layer.name, pattern) for pattern in self.apart)

    def call(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], first: Call, second: Call) -> Any:
        """Returns `first(args, fields)`, the layer's output. second: the same, without a policy.

        Raises RunError "sequence-mixing" if the input at two positions changes what is at others.
        """
        positions = Positions(self.dim, self.length)
        given = args, dict(fields)
        others = copied(given, {id(one): one.detach().clone() for one in tensors_in(given)})
        token = _RUNNING.set(positions)
        try:
            output = first(args, fields)
            for one in tensors_in(others):
                positions.change(one)
            positions.is_second = True
            with torch.no_grad(), as_it_was(layer.module.modules()):
                if self._differ(positions, output, second(*others)) or positions.is_mixed:
                    raise _mixes(layer)
        finally:
            _RUNNING.reset(token)
        return output

    def _differ(self, positions: Positions, output: Any, new: Any) -> bool:
        pairs = list(tensors_in((output,))), list(tensors_in((new,)))
        if len(pairs[0]) != len(pairs[1]):
            return False
        return any(positions.differ(one.detach(), other, self.dim) for one, other in zip(*pairs, strict=True))


@contextmanager
def as_it_was(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores attributes and buffers of `modules` after the block, such as counters and running averages."""
    kept = [
        (
            module,
            dict(vars(module)),
            dict(module._buffers),
            [(one, one.clone()) for one in module.buffers(recurse=False)],
        )
        for module in modules
    ]
    try:
        yield
    finally:
        for module, attributes, buffers, values in kept:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
            for buffer, value in values:
                buffer.copy_(value)


def _mixes(layer: Layer) -> RunError:
    return RunError(
        "sequence-mixing",
        f"the layer {layer.name!r} ({type(layer.module).__name__}) looks along the sequence beside its attention: another "
        "input at one position changes what it computes at others, and the ranks of `sp` have slices",
        path=("sequence", "use"),
        hint="train such a model with `sp = 1`; if it may see slices alone, name the layer in `[sequence] apart`",
    )
