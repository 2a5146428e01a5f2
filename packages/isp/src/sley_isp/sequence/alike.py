"""Tests that an attention computes the same for a head whatever its number, and however many heads there are.

    right    the heads of several ranks at once:  [f(a), f(b)] = f([a, b])
    wrong    slopes by a head's number (ALiBi), a scale by how many there are, `k.repeat(1, groups, 1, 1)`

A rank attends with a few heads and counts them from 0, so a head's number differs from that in the full attention. The test
uses random inputs: weights that begin at or near zero would let a wrong scale pass. Dropout is off during the test.

Ranks that share a key head (fewer key heads than ranks, or not a multiple) are tested with two such heads, since one alone
does not show which query heads use which key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sley_core.errors import RunError
from sley_isp.sequence.pack import repeat_heads

if TYPE_CHECKING:
    from sley_isp.sequence.call import AttentionCall


def ask_alike(call: AttentionCall) -> None:
    """Runs 3 to 5 forwards of this rank's size, and raises RunError "sequence-layout" if a head's number or count matters."""
    generator = torch.Generator(call.tensors[0].device)
    generator.manual_seed(0)  # the same on all ranks, so that all of them get the same result
    num_parts, copies = _sizes(call)
    joined = []
    for at, tensor in enumerate(call.tensors):
        heads = tensor.shape[-2] * num_parts // (1 if at == 0 and len(call.tensors) > 1 else copies)
        shape = (*tensor.shape[:-2], heads, tensor.shape[-1])
        joined.append(torch.randn(shape, dtype=tensor.dtype, device=tensor.device, generator=generator))
    parts = list(zip(*(repeat_heads(one, num_parts).chunk(num_parts, dim=-2) for one in joined), strict=True))
    with _without_dropout(call.attention):
        found = [_context(call, part) for part in parts]
        together = _context(call, joined)
        if together.shape[2] == sum(one.shape[2] for one in found) and _is_close(together, torch.cat(found, dim=2)):
            return
        if not _is_close(found[0], _context(call, parts[0])):
            raise _refused(
                "draws random numbers, so that it cannot be asked whether it does the same with every head",
                hint="drop by torch.nn.functional.dropout, by what scaled_dot_product_attention is told, or only while "
                "its module is in training",
            )
    raise _refused("does something else with a head for being one of more, or another of them")


def _sizes(call: AttentionCall) -> tuple[int, int]:
    """Returns the number of ranks whose heads are tested together, and how many copies of each of their key heads there are."""
    if call.tensors[-1].shape[-2] * call.num_ranks == call.kv_heads:
        return 2, 1
    return (2, 2) if call.kv_heads == 1 else (4, 2)


def _context(call: AttentionCall, tensors: Sequence[Tensor]) -> Tensor:
    """Returns the context [b, s, h, d] of `tensors`."""
    context = call.answer(tensors)
    return context if context.ndim == 4 else torch.unflatten(context, -1, (tensors[0].shape[-2], -1))


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Returns whether all heads agree to half of the digits: kernels for other numbers of heads differ in the last ones."""
    wide = torch.promote_types(one.dtype, torch.float32)
    one, other = (tensor.to(wide).movedim(2, 0).flatten(1) for tensor in (one, other))
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    one, other = (tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in (one, other))
    limit = torch.finfo(torch.promote_types(one.dtype, torch.float32)).eps ** 0.5
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
    training = [module for module in modules_of(attention) if module.training]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), _NoDropout():
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def modules_of(attention: Callable[..., Tensor]) -> list[nn.Module]:
    """Returns all modules of the module that `attention` is, or whose method it is; empty for other functions."""
    owner = getattr(attention, "__self__", attention)
    return list(owner.modules()) if isinstance(owner, nn.Module) else []


def _refused(what: str, hint: str | None = None) -> RunError:
    """Returns the RunError "sequence-layout"."""
    return RunError(
        "sequence-layout",
        f"an attention over slices {what}; a rank has some of the heads and counts them from 0",
        hint=hint
        or "let nothing depend on a head's number or on how many there are: give slopes and scales that do in with q and k, "
        "before the exchange, and let groups of query heads share a key head by `repeat_interleave` or `enable_gqa`",
    )
