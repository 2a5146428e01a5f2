"""Tests at run time that an attention over slices computes each head by itself, whatever its number and however many there are.

    right    the heads of several ranks at once:  f([a, b]) = [f(a), f(b)]
    wrong    slopes by a head's number (ALiBi), a scale by how many there are, `k.repeat(1, groups, 1, 1)`; and [b, h, s, d], as
             torch's own attention wants it: those "heads" are positions, which see one another

A rank attends with a few heads and counts them from 0, so a head's number differs from that in the full attention. Shapes show
none of this, so the attention is tested once, by 3 to 5 more forwards without gradients. The test uses random inputs: weights
that begin at or near zero would let a wrong scale pass. Dropout is off during the test.

Ranks that share a key head (fewer key heads than ranks, or not a multiple) are tested with two such heads, since one alone
does not show which query heads use which key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sley_core.api.model import as_it_was, aside
from sley_core.errors import RunError, SleyError
from sley_isp.sequence.pack import repeat_heads


@dataclass(frozen=True)
class AttentionCall:
    """Describes the call `attention(*tensors, *rest, **more)`, over full sequences of this rank's heads.

    tensors: q, k, v [b, s, h, d], or q and kv, or qkv. kv_heads: the number of key and value heads over all `num_ranks` ranks.
    """

    attention: Callable[..., Tensor]
    tensors: Sequence[Tensor]
    rest: Sequence[Any]
    more: Mapping[str, Any]
    kv_heads: int
    num_ranks: int

    def answer(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Returns the context [b, s, h, d] of `tensors` in place of the call's own; None if the result is no context.

        Raises RunError "sequence-attention" if the attention fails, which most do because of the number of heads.
        """
        try:
            context: Any = self.attention(*tensors, *self.rest, **self.more)
        except (SleyError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's attention raises
            shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
            message = f"an attention over slices fails when it is asked for {shapes}: {type(error).__name__}: {error}"
            hint = (
                "each rank has some of the heads and whole sequences: take numbers of heads from `q` and `k`, and give masks "
                "of the whole sequence, from fields without a `sequence_dim`"
            )
            raise RunError("sequence-attention", message, hint=hint) from error
        (batch, length), heads = tensors[0].shape[:2], tensors[0].shape[-2]
        if not isinstance(context, Tensor) or context.ndim < 3 or context.shape[:2] != (batch, length):
            return None
        flat = context.flatten(2)
        return flat.view(batch, length, heads, -1) if flat.shape[2] % heads == 0 else None


class Proof:
    """Tests one attention at its first calls, until one call was large enough to be conclusive."""

    def __init__(self) -> None:
        self.is_given = False

    @torch.no_grad()
    def ask(self, call: AttentionCall) -> None:
        """Raises RunError "sequence-layout" if the attention of `call` mixes up heads and positions, or if a head's number or
        count matters; reruns it to find out.
        """
        last = call.tensors[-1]
        if self.is_given or (last.shape[1] == 1 and last.shape[-2] == 1):
            return
        with aside(), as_it_was(_modules_of(call.attention)), _without_dropout(call.attention):
            self.is_given = _is_proven(call)


def _is_proven(call: AttentionCall) -> bool:
    """Runs 3 to 5 forwards of this rank's size; returns False if the attention returns no context, for which the caller raises.
    Raises RunError "sequence-layout".
    """
    generator = torch.Generator(call.tensors[0].device)
    generator.manual_seed(0)  # the same on all ranks, so that all of them get the same result
    num_parts, copies = _sizes(call)
    joined = []
    for at, tensor in enumerate(call.tensors):
        heads = tensor.shape[-2] * num_parts // (1 if at == 0 and len(call.tensors) > 1 else copies)
        shape = (*tensor.shape[:-2], heads, tensor.shape[-1])
        joined.append(torch.randn(shape, dtype=tensor.dtype, device=tensor.device, generator=generator))
    parts = list(zip(*(repeat_heads(one, num_parts).chunk(num_parts, dim=-2) for one in joined), strict=True))
    found = [context for part in parts if (context := call.answer(part)) is not None]
    if len(found) < len(parts):
        return False
    together = call.answer(joined)
    if together is not None and _is_close(together, torch.cat(found, dim=2)):
        return True
    again = call.answer(parts[0])
    if again is None or not _is_close(found[0], again):
        raise _refused(
            call,
            "draws random numbers, so that it cannot be asked whether it does the same with every head",
            "drop by torch.nn.functional.dropout, by what scaled_dot_product_attention is told, or only while its module is in "
            "training",
        )
    raise _refused(
        call,
        "does something else with a head for being one of more, or another of them; or dim 2 is its positions",
        "give `q, k, v` [b, s, h, d], without the `transpose(1, 2)` that torch's scaled_dot_product_attention wants, and "
        "transpose within the attention; let nothing depend on a head's number or on how many there are: give slopes and "
        "scales that do in with q and k, before the exchange, and let groups of query heads share a key head by "
        "`repeat_interleave` or `enable_gqa`",
    )


def _sizes(call: AttentionCall) -> tuple[int, int]:
    """Returns the number of ranks whose heads are tested together, and how many copies of each of their key heads there are."""
    if call.tensors[-1].shape[-2] * call.num_ranks == call.kv_heads:
        return 2, 1
    return (2, 2) if call.kv_heads == 1 else (4, 2)


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Returns whether all heads of [b, s, h, d] agree to half of the digits: kernels for other numbers of heads differ in the
    last ones.
    """
    wide = torch.promote_types(one.dtype, torch.float32)
    one, other = (tensor.to(wide).movedim(2, 0).flatten(1) for tensor in (one, other))
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return False
    one, other = (tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in (one, other))
    limit = torch.finfo(wide).eps ** 0.5
    return bool((torch.linalg.vector_norm(one - other, dim=1) <= limit * torch.linalg.vector_norm(other, dim=1)).all())


class _NoDropout(TorchFunctionMode):
    """Turns off every dropout of torch within the block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func` without its dropout."""
        del types
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        elif getattr(func, "__name__", "") in _DROPPING:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


_DROPPING = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}


@contextmanager
def _without_dropout(attention: Callable[..., Tensor]) -> Iterator[None]:
    """Sets the attention's modules to evaluation and turns off dropout; restores both, and the random state, at the end."""
    training = [module for module in _modules_of(attention) if module.training]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), _NoDropout():
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _modules_of(attention: Callable[..., Tensor]) -> list[nn.Module]:
    """Returns all modules of the module that `attention` is, or whose method it is; empty for other functions."""
    owner = getattr(attention, "__self__", attention)
    return list(owner.modules()) if isinstance(owner, nn.Module) else []


def _refused(call: AttentionCall, what: str, hint: str) -> RunError:
    """Returns the RunError "sequence-layout"."""
    shapes = " and ".join(str(list(tensor.shape)) for tensor in call.tensors)
    message = f"an attention over slices, called with {shapes}, {what}; a rank has some of the heads and counts them from 0"
    return RunError("sequence-layout", message, hint=hint)
