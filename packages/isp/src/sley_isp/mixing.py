"""Refuses layers that mix positions outside their attention, since each rank has only a slice of a sequence.

`check_module_types` recognizes the torch modules that mix positions by their types. To find other modules that mix positions,
`PositionProbe` calls each layer twice in the first step:

    first call    as in training; the inputs and contexts of the layer's attentions are recorded
    second call   with other inputs at the first and the second-last position; attentions return the recorded contexts

If the layer's output or its attentions' inputs then differ at any other position, the difference did not pass through
attention. Attentions do not communicate in the second call.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.api.data import DataInfo
from sley_core.api.model import Layer, copy_containers, tensors_in
from sley_core.errors import PlanError, RunError
from sley_core.protocols import LayerCall

UNCHECKED_HINT = "set `sp = 1`, or list the layer in `[sequence] unchecked_layers` if it may work on separate slices"
"""The hint of the error "sequence-mixing"."""

MIXING_TYPES = (
    *(nn.MultiheadAttention, nn.RNNBase, nn.BatchNorm1d, nn.SyncBatchNorm, nn.GroupNorm, nn.InstanceNorm1d),
    *(nn.AvgPool1d, nn.MaxPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
)
"""Types of torch modules that mix positions, so that slices of sequences would give wrong results. `nn.MultiheadAttention` is
one of them, because it contains the projections of q, k and v, so `wrap_attention` cannot exchange q, k and v.
"""


def check_module_types(layer: Layer, attention_modules: Collection[nn.Module]) -> None:
    """Raises PlanError "sequence-mixing" if a module of `layer` outside of `attention_modules` has a type that mixes positions,
    or is a convolution with overlapping windows.
    """
    for name, module in layer.module.named_modules(prefix=layer.name):
        is_convolution = isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
        overlaps = is_convolution and module.dilation[0] * (module.kernel_size[0] - 1) >= module.stride[0]
        if (overlaps or isinstance(module, MIXING_TYPES)) and module not in attention_modules:
            message = f"`{name}` is a torch {type(module).__name__}, which mixes positions, but has only one slice of them"
            raise PlanError("sequence-mixing", message, path=("sequence", "use"), hint=UNCHECKED_HINT)


class PositionProbe:
    """Checks, in the first call of each layer in training, whether the layer mixes positions. Skips layers that a pattern in
    `unchecked_layers` matches. The probe calls the layer again with other inputs at two positions. These positions do not
    mirror each other, so the probe also detects a reversal of positions. length: the number of positions of a slice. dim: the
    dim of positions in the layer's inputs and output.
    """

    def __init__(self, data: DataInfo, num_slices: int, unchecked_layers: Sequence[str]) -> None:
        self.dim = next((field.sequence_dim for field in data.fields.values() if field.sequence_dim is not None), 0)
        self.length = (data.sequence or 0) // num_slices
        self.unchecked_layers = unchecked_layers
        # The inputs of each attention call, its context, and the state of the device's generator after it.
        self._calls: list[tuple[list[Tensor], Tensor, Tensor]] = []
        self._probed_layers: set[str] = set()

    def call(self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], call: LayerCall, rerun: LayerCall) -> Any:
        """Returns `call(args, fields)`. In the layer's first call, also calls `rerun` with perturbed inputs, and raises
        RunError "sequence-mixing" if the layer mixes positions. All ranks that share sequences must call the same layers.
        """
        is_probed = layer.name in self._probed_layers
        self._probed_layers.add(layer.name)
        if is_probed or self.length < 3 or any(fnmatchcase(layer.name, pattern) for pattern in self.unchecked_layers):
            return call(args, fields)
        inputs = args, dict(fields)
        perturbed_inputs = copy_containers(inputs, {id(tensor): tensor.detach().clone() for tensor in tensors_in(inputs)})
        self.is_second = self.is_mixed = False
        token = RUNNING_PROBE.set(self)
        try:
            output = call(args, fields)
            for tensor in tensors_in(perturbed_inputs):
                self.perturb(tensor)
            self.is_second = True
            with torch.no_grad(), _restore_modules(list(layer.module.modules())):
                before, after = list(tensors_in((output,))), list(tensors_in((rerun(*perturbed_inputs),)))
                is_mixed = len(before) == len(after) and any(
                    self.has_difference(tensor.detach(), after_tensor, self.dim)
                    for tensor, after_tensor in zip(before, after, strict=True)
                )
                if is_mixed or self.is_mixed:
                    raise RunError(
                        "sequence-mixing",
                        f"the layer {layer.name!r} ({type(layer.module).__name__}) mixes positions outside its "
                        "attention, but each rank of `sp` has only a slice: a change at one position changes its output "
                        "at others",
                        path=("sequence", "use"),
                        hint=UNCHECKED_HINT,
                    )
        finally:
            RUNNING_PROBE.reset(token)
            self._calls.clear()
        return output

    def attend(self, tensors: Sequence[Tensor], attention: Callable[[], Tensor]) -> Tensor:
        """Returns the output of an attention with the inputs `tensors` [b, s, ...]: `attention()` in the first call of the
        layer, and the recorded output in the second.
        """
        if not self.is_second:
            context = attention()
            state = _default_generator(context.device).get_state()
            self._calls.append(([tensor.detach().clone() for tensor in tensors], context.detach().clone(), state))
            return context
        before, context, state = self._calls.pop(0)
        _default_generator(context.device).set_state(state)  # as if the attention had drawn random numbers
        self.is_mixed |= any(self.has_difference(expected, actual, 1) for expected, actual in zip(before, tensors, strict=True))
        return context.clone()

    def perturb(self, tensor: Tensor) -> None:
        """Overwrites the first and the second-last position of `tensor`, if its size along `dim` is the length of a slice."""
        if tensor.ndim <= self.dim or tensor.shape[self.dim] != self.length:
            return
        for row in (tensor.select(self.dim, 0), tensor.select(self.dim, self.length - 2)):
            if tensor.is_floating_point():
                largest = torch.maximum(-tensor.amin(), tensor.amax()).nan_to_num(0.0, 0.0, 0.0)
                waves = torch.cos(torch.arange(row.numel(), device=row.device, dtype=torch.float32)).view(row.shape)
                row.copy_(waves * torch.where(largest > 0, largest, 1.0) * 4)
            elif tensor.dtype is not torch.bool and not tensor.is_complex():
                lowest, highest = tensor.amin(self.dim), tensor.amax(self.dim)
                row.copy_(torch.where(row == lowest, highest, lowest))

    def has_difference(self, before: Tensor, after: Tensor, dim: int) -> bool:
        """Returns whether `before` and `after` differ at positions whose inputs were not perturbed. Returns False if their
        shapes differ, or if they do not have the slice's positions along `dim`.
        """
        if before.shape != after.shape or before.ndim <= dim or before.shape[dim] != self.length:
            return False
        spans = (1, self.length - 3), (self.length - 1, 1)
        pairs = [(before.narrow(dim, *span), after.narrow(dim, *span)) for span in spans]
        if all(torch.equal(*pair) for pair in pairs):  # the usual case, which needs no extra memory
            return False
        if not before.is_floating_point():
            return True
        eps = torch.finfo(before.dtype).eps
        # Narrow dtypes have few digits. Small differences are allowed, since matrix products round differently if tokens change
        # places in a batch, as with experts.
        digits = 4 if eps > 1e-3 else 64
        limit = max(float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) for tensor, _ in pairs if tensor.numel()) * digits * eps
        return not all(torch.allclose(*pair, rtol=0.0, atol=limit, equal_nan=True) for pair in pairs)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[device.index or 0]


RUNNING_PROBE: ContextVar[PositionProbe | None] = ContextVar("probe", default=None)
"""The probe whose layer is running, or None. Attentions report their calls to it."""


@contextmanager
def _restore_modules(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restores the attributes and buffers of `modules`, such as counters and running averages, after the block."""
    mappings: list[dict[str, Any]] = [mapping for module in modules for mapping in (vars(module), module._buffers)]
    previous = [(mapping, dict(mapping)) for mapping in mappings]
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    values = [(buffer, buffer.clone(), buffer._version) for buffer in buffers]
    try:
        yield
    finally:
        for mapping, items in previous:
            mapping.clear()
            mapping.update(items)
        for buffer, value, version in values:
            if buffer._version != version:  # a write would invalidate what autograd has saved
                buffer.copy_(value)
