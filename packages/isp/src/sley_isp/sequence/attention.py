"""Any causal or full attention over sequences of which every rank has a slice, as a module and as a function.

    q, k, v [b, s/n, h, d] ──exchange──> [b, s, h/n, d] ──attention──> context [b, s, h/n, d] ──exchange──> [b, s/n, h, d]

The attention itself gets whole sequences of some heads: its other arguments that describe a sequence (`cu_seqlens`, a mask, a
scale) are those of the whole, unchanged, and packed documents stay separate. What differs by position, such as rotary angles,
must be applied to q and k before. Heads must not influence one another, and none may have weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.api.comm import Group, checksum
from sley_core.api.model import attended
from sley_core.errors import RunError
from sley_isp.sequence.exchange import heads_of_all, slice_of_all
from sley_isp.sequence.proof import AttentionCall, Proof


class SequenceAttention(nn.Module):
    """Wraps an attention for a model of your own: `self.attend = SequenceAttention(attention)`.

    attention: a module or a function, called as this module is. Its first arguments, by place, are `q, k, v`, each
    [b, s, h, d]; or `q, kv` with kv [b, s, 2, h_kv, d]; or `qkv` [b, s, 3, h, d]. It returns the context alone,
    [b, s, h, d] or [b, s, h x d]. Whatever else it is given goes through as it is.

    Outside a run, and in one that does not split sequences, this is the attention itself.
    """

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.join(None)

    def join(self, group: Group | None) -> None:
        """Makes this an attention over slices of `group`; with None, of full sequences, as it was built."""
        self.group = group
        self._proof = Proof()

    def forward(self, *args: Any, **more: Any) -> Tensor:
        """Calls the attention, over slices if a group has joined: then with two exchanges, which all its ranks must make."""
        if self.group is None:
            return self.attention(*args, **more)
        return attend(self.attention, self.group, args, more, self._proof)


def over_slices(attention: Callable[..., Tensor], group: Group) -> Callable[..., Tensor]:
    """Returns `attention` as a function over slices, for training loops of your own, with `run.groups["sp"]`.

    attention: as for `SequenceAttention`. group: the ranks that hold the slices of the same samples, in their order.
    """
    proof = Proof()

    def attention_over_slices(*args: Any, **more: Any) -> Tensor:
        return attend(attention, group, args, more, proof)

    return attention_over_slices


def attend(attention: Callable[..., Tensor], group: Group, args: Sequence[Any], more: dict[str, Any], proof: Proof) -> Tensor:
    """Returns `attention(*args, **more)` on slices: one exchange there, one back; in the backward the same again.

    proof: of this attention. A compiled layer has a graph break here, as exchanges cannot be compiled.

    Raises RunError "sequence-attention" for arguments, or a context, of other shapes than `SequenceAttention` says, and
    "sequence-heads" if the query heads cannot be divided among the ranks, before any exchange. Raises "ranks-differ" if
    the ranks' functions, options or shapes differ, and "sequence-layout" in the first call of an attention that
    mistakes heads for positions.
    """
    if group.size == 1:
        return attention(*args, **more)
    context: Tensor = _attend(attention, group, args, more, proof)
    return context


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _attend(attention: Callable[..., Tensor], group: Group, args: Sequence[Any], more: dict[str, Any], proof: Proof) -> Tensor:
    """Does the work of `attend`, outside of any compiled graph."""
    given = _leading(args)
    _check(given, group.size)
    return attended(given, lambda: _over_group(attention, group, given, args[len(given) :], more, proof))


def _over_group(
    attention: Callable[..., Tensor],
    group: Group,
    given: Sequence[Tensor],
    rest: Sequence[Any],
    more: dict[str, Any],
    proof: Proof,
) -> Tensor:
    """Exchanges `given`, the leading tensors, attends with `rest`, the other arguments, and exchanges the context back."""
    contents = _kind(attention, rest, more)
    if len({tensor.dtype for tensor in given}) == 1:
        whole = heads_of_all(group, *given, contents=contents)
    else:
        whole = tuple(heads_of_all(group, tensor, contents=contents)[0] for tensor in given)
    if group.has_peers:
        proof.ask(AttentionCall(attention, whole, rest, more, given[-1].shape[-2], group.size))
    context = attention(*whole, *rest, **more)
    batch, length = whole[0].shape[:2]
    if not isinstance(context, Tensor) or not _is_context(context, (batch, length, whole[0].shape[-2])):
        found = f"{list(context.shape)}" if isinstance(context, Tensor) else f"a {type(context).__name__}"
        message = (
            f"an attention of {batch} x {length} positions and {whole[0].shape[-2]} heads returned {found}, "
            "not a context [b, s, h, d] or [b, s, h d]"
        )
        raise RunError("sequence-attention", message, hint="let it return the context alone")
    if context.ndim == 3:
        return slice_of_all(group, context.unsqueeze(-2), contents).flatten(-2)
    return slice_of_all(group, context, contents)


def _is_context(context: Tensor, sizes: tuple[int, int, int]) -> bool:
    """Returns whether `context` is [b, s, h, d] or [b, s, h x d] for these sizes (b, s, h)."""
    if context.ndim == 3:
        return context.shape[:2] == sizes[:2] and context.shape[2] % sizes[2] == 0
    return context.ndim == 4 and context.shape[:3] == sizes


def _kind(attention: Callable[..., Tensor], args: Sequence[Any], more: dict[str, Any]) -> int:
    """Returns a checksum of the attention's name and the options of a call; of tensors, only that they are there."""
    named = attention if hasattr(attention, "__qualname__") else type(attention)
    options = [*(("", arg) for arg in args), *sorted(more.items())]
    told = (f"{name}={_option(value)}" for name, value in options)
    return checksum([f"{named.__module__}.{named.__qualname__}", *told])


def _option(value: Any) -> str:
    """Returns the part of an option that must be equal on all ranks: never a tensor's values, which may be of a slice."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_option, value))})"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _leading(args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Returns the leading tensors to exchange: qkv, or q and kv, or q, k and v. Raises RunError "sequence-attention" else."""
    tensors = [arg for arg in args[:3] if isinstance(arg, Tensor)]
    dims = [tensor.ndim for tensor in tensors]
    for wanted in ([5], [4, 5], [4, 4, 4]):
        if dims[: len(wanted)] == wanted and all(arg is one for arg, one in zip(args, tensors, strict=False)):
            return tuple(tensors[: len(wanted)])
    shapes = ", ".join(str(list(arg.shape)) if isinstance(arg, Tensor) else type(arg).__name__ for arg in args[:3])
    raise RunError(
        "sequence-attention",
        f"an attention over slices was called with {shapes or 'no arguments by place'}",
        hint="give `q, k, v` [b, s, h, d], or `q, kv` with kv [b, s, 2, h, d], or `qkv` [b, s, 3, h, d], by place",
    )


def _check(given: Sequence[Tensor], num_ranks: int) -> None:
    """Raises RunError if the heads cannot be divided among the ranks, or if the shapes do not fit together."""
    heads = given[0].shape[-2]
    if heads % num_ranks:
        message = f"heads = sp x heads per rank fails: {heads} is no multiple of {num_ranks}"
        raise RunError("sequence-heads", message, hint="every rank attends with some heads; lower `sp`")
    for tensor in given[1:]:
        if tensor.shape[:2] != given[0].shape[:2] or heads % tensor.shape[-2]:
            shapes = " and ".join(str(list(tensor.shape)) for tensor in given)
            message = f"queries, keys and values {shapes} do not fit: equal b and s, and heads a multiple of the keys'"
            raise RunError("sequence-attention", message)
