"""`isp.all_to_all`: any causal or full attention over sequences of which every rank has a slice.

    q, k, v [b, s/n, h, d] ──all_to_all──> [b, s, h/n, d] ──attention──> context [b, s, h/n, d] ──all_to_all──> [b, s/n, h, d]

The attention itself gets full sequences of some heads: its other arguments that describe a sequence (`cu_seqlens`, a mask, a
scale) are those of the full sequence, unchanged, and packed documents stay separate. What differs by position, such as rotary
angles, must be applied to q and k before. Heads must not influence one another, and a head's number means nothing: a rank has
some of the heads and counts them from 0. No check proves that; `train-cli verify` compares a model with one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.api.comm import Group, checksum
from sley_core.api.model import Attention, ForwardPatch, Layer, attended
from sley_core.errors import Diagnostic, PlanError, RunError
from sley_core.protocols import SequenceCommunicator
from sley_isp.config import AllToAllConfig
from sley_isp.exchange import gather_heads, scatter_heads


class SequenceAttention(nn.Module):
    """Wraps an attention for a model of your own: `self.attend = SequenceAttention(attention)`.

    attention: a module or a function, called as this module is. Its first arguments, by place, are `q, k, v`, each
    [b, s, h, d]; or `q, kv` with kv [b, s, 2, h_kv, d]; or `qkv` [b, s, 3, h, d]. It returns the context alone,
    [b, s, h, d] or [b, s, h x d]. Other arguments are passed on unchanged.

    Outside a run, and in one that does not split sequences, this is the attention itself.
    """

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.join(None)

    def join(self, group: Group | None) -> None:
        """Makes this an attention over slices of `group`; with None, of full sequences, as it was built."""
        self._group = None if group is None or group.size == 1 else group

    def forward(self, *args: Any, **more: Any) -> Tensor:
        """Calls the attention; over slices, all ranks of the group must call it alike."""
        if self._group is None:
            return self.attention(*args, **more)
        context: Tensor = _attend(self.attention, self._group, args, more)
        return context


def over_slices(attention: Callable[..., Tensor], group: Group) -> Callable[..., Tensor]:
    """Returns `attention` as a function over slices, for training loops of your own, with `run.groups["sp"]`.

    attention: as for `SequenceAttention`. group: the ranks that hold the slices of the same samples, in their order. A call
    exchanges once before and once after the attention, and the same again in its backward.

    The function raises RunError "sequence-attention" for arguments, or a context, of other shapes than `SequenceAttention`
    says, and "sequence-heads" if the query heads cannot be divided among the ranks, before any exchange. It raises
    "ranks-differ" if the ranks' functions, options or shapes differ.
    """
    if group.size == 1:
        return attention

    def attention_over_slices(*args: Any, **more: Any) -> Tensor:
        context: Tensor = _attend(attention, group, args, more)
        return context

    return attention_over_slices


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _attend(attention: Callable[..., Tensor], group: Group, args: Sequence[Any], more: dict[str, Any]) -> Tensor:
    """Returns `attention(*args, **more)` on slices, outside of any compiled graph, as exchanges cannot be compiled."""
    leading = _leading(args, group.size)
    return attended(leading, lambda: _over_group(attention, group, leading, args[len(leading) :], more))


def _over_group(
    attention: Callable[..., Tensor], group: Group, leading: Sequence[Tensor], rest: Sequence[Any], more: dict[str, Any]
) -> Tensor:
    """Exchanges the `leading` tensors, attends with `rest`, the other arguments, and exchanges the context back."""
    contents = _checksum(attention, rest, more)
    if len({tensor.dtype for tensor in leading}) == 1:
        full = scatter_heads(group, *leading, contents=contents)
    else:
        full = tuple(scatter_heads(group, tensor, contents=contents)[0] for tensor in leading)
    try:
        context = attention(*full, *rest, **more)
    except Exception as error:  # whatever the user's attention raises
        error.add_note("over slices each rank has some of the heads and full sequences; masks are those of the full sequence")
        raise
    shape = *full[0].shape[:2], full[0].shape[-2]
    is_flat = isinstance(context, Tensor) and context.ndim == 3
    heads = torch.unflatten(context, -1, (shape[2], -1)) if is_flat and context.shape[2] % shape[2] == 0 else context
    if not isinstance(heads, Tensor) or heads.ndim != 4 or heads.shape[:3] != shape:
        kind = f"{list(context.shape)}" if isinstance(context, Tensor) else f"a {type(context).__name__}"
        raise RunError(
            "sequence-attention",
            f"an attention of {shape[0]} x {shape[1]} positions and {shape[2]} heads returned {kind}, not a context "
            "[b, s, h, d] or [b, s, h d]",
            hint="let it return the context alone",
        )
    result = gather_heads(group, heads, contents)
    return result.flatten(-2) if is_flat else result


def _leading(args: Sequence[Any], num_ranks: int) -> tuple[Tensor, ...]:
    """Returns the leading tensors to exchange: qkv, or q and kv, or q, k and v. Raises RunError if their shapes do not fit."""
    dims = [arg.ndim if isinstance(arg, Tensor) else 0 for arg in args[:3]]
    number = next((len(form) for form in ([5], [4, 5], [4, 4, 4]) if dims[: len(form)] == form), 0)
    leading = tuple(args[:number])
    shapes = ", ".join(str(list(arg.shape)) if isinstance(arg, Tensor) else type(arg).__name__ for arg in args[:3])
    if not leading:
        raise RunError(
            "sequence-attention",
            f"an attention over slices was called with {shapes or 'no arguments by place'}",
            hint="give `q, k, v` [b, s, h, d], or `q, kv` with kv [b, s, 2, h, d], or `qkv` [b, s, 3, h, d], by place",
        )
    heads = leading[0].shape[-2]
    if heads % num_ranks:
        message = f"heads = sp x heads per rank fails: {heads} is no multiple of {num_ranks}"
        raise RunError("sequence-heads", message, hint="every rank attends with some heads; lower `sp`")
    for tensor in leading[1:]:
        if tensor.shape[:2] != leading[0].shape[:2] or heads % tensor.shape[-2]:
            message = f"queries, keys and values {shapes} do not fit: equal b and s, and heads a multiple of the keys'"
            raise RunError("sequence-attention", message)
    return leading


def _checksum(attention: Callable[..., Tensor], args: Sequence[Any], more: dict[str, Any]) -> int:
    """Returns a checksum of the attention's name and the options of a call; of tensors, which may be slices, only the type."""
    named = attention if hasattr(attention, "__qualname__") else type(attention)
    options = [f"={_option(arg)}" for arg in args] + [f"{name}={_option(value)}" for name, value in sorted(more.items())]
    return checksum([f"{named.__module__}.{named.__qualname__}", *options])


def _option(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_option, value))})"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


class AllToAllAttention(SequenceCommunicator):
    """Makes attention work on slices: in core's `Attention`, in `SequenceAttention`, and in modules that the plan names."""

    def __init__(self, config: AllToAllConfig, group: Group) -> None:
        self.patterns = config.modules
        self.apart: Sequence[str] = config.apart
        self.group = group
        self._undo = ExitStack()

    def attach(self, layers: Sequence[Layer]) -> None:
        """Patches every attention in `layers`, or none if it raises.

        Raises PlanError "sequence-attention" if a pattern matches no module, if there is no attention, and for an
        `nn.MultiheadAttention`, whose projections are inside it; "sequence-mixing" for other modules that look along a
        sequence.
        """
        with ExitStack() as undo:
            self._attach(layers, undo)
            self._undo = undo.pop_all()  # only if nothing was refused

    def _attach(self, layers: Sequence[Layer], undo: ExitStack) -> None:
        modules = [item for layer in layers for item in layer.module.named_modules(prefix=layer.name)]
        attentions: set[nn.Module] = set()
        inside: set[nn.Module] = set()
        for name, module in modules:
            is_named = any(fnmatchcase(name, pattern) for pattern in self.patterns)
            if (is_named or isinstance(module, SequenceAttention | Attention)) and module not in attentions | inside:
                attentions.add(module)
                inside.update(part for part in module.modules() if part is not module)
                if isinstance(module, SequenceAttention):  # no patch: a subclass may have its own forward
                    module.join(self.group)
                    undo.callback(module.join, None)
                else:
                    undo.callback(ForwardPatch(module, over_slices(module.forward, self.group)).undo)
        for name, module in modules:
            if isinstance(module, nn.MultiheadAttention) and module not in inside:
                message = f"`{name}` is a torch.nn.MultiheadAttention, which would see one slice alone"
                hint = "project q, k and v in linears, and attend in a module of its own"
                raise PlanError("sequence-attention", message, path=("sequence", "use"), hint=hint)
        if self.group.size > 1:
            check_mixing(layers, self.apart, inside)
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in modules):
                message = f"`modules` has the pattern `{pattern}`, which matches no module of the model"
                raise PlanError("sequence-attention", message, path=("sequence", "modules"), hint="see `train-cli show`")
        if not attentions:
            raise PlanError(
                "sequence-attention",
                "the model has no attention that `isp.all_to_all` knows, so no position would see another slice",
                path=("sequence", "use"),
                hint="name its attention modules in `modules`, wrap them in sley_isp.attention.SequenceAttention, or use "
                "sley_core.model.attention.Attention",
            )

    def detach(self) -> None:
        """Restores every attention."""
        self._undo.close()


MIXING = (
    *(nn.RNNBase, nn.BatchNorm1d, nn.SyncBatchNorm, nn.GroupNorm, nn.InstanceNorm1d),
    *(nn.AvgPool1d, nn.MaxPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
)
"""Modules that look along a sequence, and so would see one slice. A forward that uses `roll`, `cumsum` or a mean over positions
is found in the first step, when core asks layers.
"""


def check_mixing(layers: Sequence[Layer], apart: Sequence[str], inside: Collection[nn.Module]) -> None:
    """Raises PlanError "sequence-mixing" for each module that mixes positions, unless a pattern of `apart` matches its name,
    and for each unused pattern. inside: modules within an attention, which sees full sequences.
    """
    mixing = {name: module for name, module in _mixing(layers) if module not in inside}
    problems = [
        Diagnostic(
            "sequence-mixing",
            f"`{name}` is a {type(module).__name__}, which looks along the sequence and would see one slice alone",
            ("sequence", "use"),
            hint="train such a model with `sp = 1`; where it runs over something else than positions, name it in "
            "`[sequence] apart`",
        )
        for name, module in mixing.items()
        if not any(fnmatchcase(name, pattern) for pattern in apart)
    ]
    for pattern in apart:
        if not any(fnmatchcase(name, pattern) for name in (*mixing, *(layer.name for layer in layers))):
            message = f"`apart` has the pattern `{pattern}`, which matches no layer and no module that would be refused"
            problems.append(Diagnostic("sequence-mixing", message, ("sequence", "apart"), hint="see `train-cli show`"))
    if problems:
        raise PlanError.many(problems)


def _mixing(layers: Sequence[Layer]) -> Iterator[tuple[str, nn.Module]]:
    """Yields name and module of each module of a MIXING class, and of each convolution whose windows overlap."""
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
                if module.dilation[0] * (module.kernel_size[0] - 1) + 1 > module.stride[0]:
                    yield name, module
            elif isinstance(module, MIXING):
                yield name, module
