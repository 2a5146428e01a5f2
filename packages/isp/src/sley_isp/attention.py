"""`isp.all_to_all`: any causal or full attention over sequences that are split into one slice per rank.

    q, k, v [b, s/n, h, d] ──all_to_all──> [b, s, h/n, d] ──attention──> context [b, s, h/n, d] ──all_to_all──> [b, s/n, h, d]

The attention receives full sequences of some heads. Its other arguments, such as `cu_seqlens` or a mask, must describe the full
sequence, so packed documents stay separate. Position-dependent operations on q and k, such as rotary embeddings, must come
before. Heads must be independent of one another and of their indices, since each rank counts its heads from 0. No check proves
this, but `train-cli verify` compares the model with a run of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.api.comm import Group, checksum
from sley_core.api.data import DataInfo
from sley_core.api.model import Attention, ForwardPatch, Layer
from sley_core.errors import PlanError, RunError
from sley_core.protocols import LayerCall, SequenceCommunicator
from sley_isp.config import AllToAllConfig
from sley_isp.exchange import gather_heads, scatter_heads
from sley_isp.mixing import PositionProbe, check_mixing, run_attention


class SequenceAttention(nn.Module):
    """Wraps an attention for a custom model: `self.attend = SequenceAttention(attention)`.

    attention: a module or a function. Its first positional arguments are `q, k, v`, each [b, s, h, d], or `q, kv` with kv
    [b, s, 2, h_kv, d], or `qkv` [b, s, 3, h, d]. Other arguments are passed on unchanged. It returns only the context, [b, s,
    h, d] or [b, s, h x d].

    Outside a run, and in a run that does not split sequences, the module only calls the attention.
    """

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.set_group(None)

    def set_group(self, group: Group | None) -> None:
        """Sets the group whose ranks hold the slices of a sequence, or None for full sequences."""
        self._group = None if group is None or group.size == 1 else group

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Calls the attention. If sequences are split, all ranks of the group must pass equal options."""
        if self._group is None:
            return self.attention(*args, **kwargs)
        context: Tensor = _attend(self.attention, self._group, *args, **kwargs)
        return context


def wrap_attention(attention: Callable[..., Tensor], group: Group) -> Callable[..., Tensor]:
    """Returns a function that applies `attention` to slices, for custom training loops with `run.groups["sp"]`.

    attention: as for `SequenceAttention`. group: the ranks that hold the slices of the same samples, in order. A call makes one
    exchange before and one after the attention, and two more in its backward.

    The function raises RunError "sequence-attention" if arguments or the context have unsupported shapes, "sequence-heads" if
    the number of ranks does not divide the number of query heads, and "ranks-differ" if functions, options or shapes differ
    between ranks.
    """
    return attention if group.size == 1 else partial(_attend, attention, group)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(attention: Callable[..., Tensor], group: Group, /, *args: Any, **kwargs: Any) -> Tensor:
    """Calls `attention` on slices, outside of any compiled graph, since exchanges cannot be compiled."""
    tensors = _select_tensors(args, group.size)
    return run_attention(tensors, lambda: _exchange_and_attend(attention, group, tensors, args[len(tensors) :], kwargs))


def _exchange_and_attend(
    attention: Callable[..., Tensor], group: Group, tensors: Sequence[Tensor], options: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """Exchanges `tensors` (q, k and v) for full sequences, calls the attention, and exchanges the context back for a slice."""
    contents = _checksum_call(attention, options, kwargs)
    if len({tensor.dtype for tensor in tensors}) == 1:
        full = scatter_heads(group, *tensors, contents=contents)
    else:
        full = tuple(scatter_heads(group, tensor, contents=contents)[0] for tensor in tensors)
    try:
        context = attention(*full, *options, **kwargs)
    except Exception as error:  # of the user's attention
        error.add_note("with `sp` each rank attends with some heads over full sequences, so masks must cover the full sequence")
        raise
    shape = *full[0].shape[:2], full[0].shape[-2]
    is_flat = isinstance(context, Tensor) and context.ndim == 3
    heads = torch.unflatten(context, -1, (shape[2], -1)) if is_flat and context.shape[2] % shape[2] == 0 else context
    if not isinstance(heads, Tensor) or heads.ndim != 4 or heads.shape[:3] != shape:
        result = f"{list(context.shape)}" if isinstance(context, Tensor) else f"a {type(context).__name__}"
        raise RunError(
            "sequence-attention",
            f"an attention of {shape[0]} x {shape[1]} positions and {shape[2]} heads must return a context [b, s, h, d] or "
            f"[b, s, h d], but returned {result}",
            hint="return only the context",
        )
    local_context = gather_heads(group, heads, contents)
    return local_context.flatten(-2) if is_flat else local_context


def _select_tensors(args: Sequence[Any], num_ranks: int) -> tuple[Tensor, ...]:
    """Returns the leading tensors of `args`: qkv, or q and kv, or q, k and v. Raises RunError for unsupported shapes."""
    ndims = [arg.ndim if isinstance(arg, Tensor) else 0 for arg in args[:3]]
    num_tensors = next((len(form) for form in ([5], [4, 5], [4, 4, 4]) if ndims[: len(form)] == form), 0)
    tensors = tuple(args[:num_tensors])
    shapes = ", ".join(str(list(arg.shape)) if isinstance(arg, Tensor) else type(arg).__name__ for arg in args[:3])
    if not tensors:
        raise RunError(
            "sequence-attention",
            f"an attention over slices was called with {shapes or 'no positional arguments'}",
            hint="pass `q, k, v` [b, s, h, d], or `q, kv` with kv [b, s, 2, h, d], or `qkv` [b, s, 3, h, d], as positional "
            "arguments",
        )
    heads = tensors[0].shape[-2]
    if heads % num_ranks:
        message = f"the number of heads must be a multiple of sp = {num_ranks}, but is {heads}"
        raise RunError("sequence-heads", message, hint="use a smaller `sp`, since every rank needs at least one head")
    for tensor in tensors[1:]:
        if tensor.shape[:2] != tensors[0].shape[:2] or heads % tensor.shape[-2]:
            message = (
                "queries, keys and values must have the same b and s, and the number of query heads must be a "
                f"multiple of that of the keys, but their shapes are {shapes}"
            )
            raise RunError("sequence-attention", message)
    return tensors


def _checksum_call(attention: Callable[..., Tensor], options: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Returns a checksum of the attention's name and the arguments of a call, except for the values of tensors."""
    function = attention if hasattr(attention, "__qualname__") else type(attention)
    texts = [f"={_option_text(option)}" for option in options]
    texts += [f"{name}={_option_text(value)}" for name, value in sorted(kwargs.items())]
    return checksum([f"{function.__module__}.{function.__qualname__}", *texts])


def _option_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_option_text, value))})"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


class AllToAllAttention(SequenceCommunicator):
    """Makes attention modules work on slices: core's `Attention`, `SequenceAttention`, and those that the plan names."""

    def __init__(self, config: AllToAllConfig, group: Group) -> None:
        self.patterns = config.modules
        self.unchecked_layers: Sequence[str] = config.unchecked_layers
        self.group = group
        self._undo = ExitStack()
        self._probe: PositionProbe | None = None

    def prepare(self, data: DataInfo) -> None:
        """Prepares the check of each layer's first call in training."""
        self._probe = PositionProbe(data, self.group.size, self.unchecked_layers)

    def attach(self, layers: Sequence[Layer]) -> None:
        """Patches every attention in `layers`, or none if it raises an error.

        Raises PlanError "sequence-attention" if a pattern matches no module, if there is no attention, and for an
        `nn.MultiheadAttention`, which includes its projections. Raises "sequence-mixing" for other modules that mix positions.
        """
        with ExitStack() as undo:
            self._attach(layers, undo)
            self._undo = undo.pop_all()  # not reached after an error

    def _attach(self, layers: Sequence[Layer], undo: ExitStack) -> None:
        modules = [item for layer in layers for item in layer.module.named_modules(prefix=layer.name)]
        attentions: set[nn.Module] = set()
        submodules: set[nn.Module] = set()
        for name, module in modules:
            is_named = any(fnmatchcase(name, pattern) for pattern in self.patterns)
            if (is_named or isinstance(module, SequenceAttention | Attention)) and module not in attentions | submodules:
                attentions.add(module)
                submodules.update(submodule for submodule in module.modules() if submodule is not module)
                if isinstance(module, SequenceAttention):  # no patch, since a subclass may have its own forward
                    module.set_group(self.group)
                    undo.callback(module.set_group, None)
                else:
                    undo.callback(ForwardPatch(module, wrap_attention(module.forward, self.group)).undo)
        for name, module in modules:
            if isinstance(module, nn.MultiheadAttention) and module not in submodules:
                message = f"`{name}` is a torch.nn.MultiheadAttention, which would see only one slice"
                hint = "project q, k and v with linears, and use a separate module for the attention"
                raise PlanError("sequence-attention", message, path=("sequence", "use"), hint=hint)
        if self.group.size > 1:
            check_mixing(layers, self.unchecked_layers, submodules)
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in modules):
                message = f"the pattern `{pattern}` in `modules` matches no module of the model"
                hint = "use names that `train-cli show` prints"
                raise PlanError("sequence-attention", message, path=("sequence", "modules"), hint=hint)
        if not attentions:
            raise PlanError(
                "sequence-attention",
                "the model has no attention that `isp.all_to_all` supports, so no position would see another slice",
                path=("sequence", "use"),
                hint="list its attention modules in `modules`, wrap them in sley_isp.attention.SequenceAttention, or "
                "use sley_core.model.attention.Attention",
            )

    def call_layer(
        self, layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Any], call: LayerCall, rerun: LayerCall
    ) -> Any:
        """Returns `call(args, fields)`. Raises RunError "sequence-mixing" if the layer mixes positions outside attention."""
        return call(args, fields) if self._probe is None else self._probe.call(layer, args, fields, call, rerun)

    def detach(self) -> None:
        """Restores every attention."""
        self._undo.close()
