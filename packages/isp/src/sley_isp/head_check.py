"""Checks at run time that an attention computes each head by itself, whatever its number and however many there are.

    right    the heads of several ranks at once:  f([a, b]) = [f(a), f(b)]
    wrong    slopes by a head's number (ALiBi), a scale by how many there are, `k.repeat(1, groups, 1, 1)`; and [b, h, s, d], as
             torch's own attention wants it: those "heads" are positions, which see one another

A rank attends with some heads and counts them from 0, so a head's number differs from that in the full attention. Shapes show
none of this, and the numbers would be wrong silently. So the attention is called 3 to 5 more times, once, without gradients and
dropout, on random inputs: weights that begin near zero would hide a wrong scale. Ranks that share a key head are checked with
two such heads, since one alone does not show which query heads use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sley_core.api.comm import Group
from sley_core.api.model import as_it_was, aside
from sley_core.errors import RunError, SleyError
from sley_isp.exchange import repeat_heads


class HeadCheck:
    """Checks `attention` over the slices of `group` at its first calls, until one was large enough to show anything."""

    def __init__(self, attention: Callable[..., Tensor], group: Group) -> None:
        self.attention = attention
        self.group = group
        self.is_done = not group.has_peers  # in a fake world numbers mean nothing

    @torch.no_grad()
    def before(self, tensors: Sequence[Tensor], rest: Sequence[Any], more: Mapping[str, Any], kv_heads: int) -> None:
        """Raises RunError "sequence-layout" before a call `attention(*tensors, *rest, **more)` that would mix up heads.

        tensors: q, k, v [b, s, h, d], or q and kv, or qkv, of this rank's heads. kv_heads: of keys, over all ranks. Raises
        "sequence-attention" if the attention fails, which most do because of the number of heads.
        """
        last = tensors[-1]
        if self.is_done or (last.shape[1] == 1 and last.shape[-2] == 1):
            return
        owner = getattr(self.attention, "__self__", self.attention)
        modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
        with aside(), as_it_was(modules), _without_dropout(modules):
            self.is_done = self._check(tensors, rest, more, kv_heads)

    def _check(self, tensors: Sequence[Tensor], rest: Sequence[Any], more: Mapping[str, Any], kv_heads: int) -> bool:
        """Returns False if the attention returns no context, for which the caller raises."""
        is_shared = tensors[-1].shape[-2] * self.group.size != kv_heads  # ranks have copies of key heads
        # How many ranks' heads are computed together, and how many of them share a key head.
        num_parts, copies = (2, 1) if not is_shared else (2, 2) if kv_heads == 1 else (4, 2)
        generator = torch.Generator(tensors[0].device)
        generator.manual_seed(0)  # the same on all ranks, so that all of them get the same result
        joined = []
        for at, tensor in enumerate(tensors):
            heads = tensor.shape[-2] * num_parts // (1 if at == 0 and len(tensors) > 1 else copies)
            shape = (*tensor.shape[:-2], heads, tensor.shape[-1])
            joined.append(torch.randn(shape, dtype=tensor.dtype, device=tensor.device, generator=generator))
        parts = list(zip(*(repeat_heads(tensor, num_parts).chunk(num_parts, dim=-2) for tensor in joined), strict=True))
        contexts = [context for part in parts if (context := self._call(part, rest, more)) is not None]
        if len(contexts) < len(parts):
            return False
        if _is_close(self._call(joined, rest, more), torch.cat(contexts, dim=2)):
            return True
        shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
        if not _is_close(self._call(parts[0], rest, more), contexts[0]):
            raise RunError(
                "sequence-layout",
                f"an attention over slices, called with {shapes}, draws random numbers, so that its heads cannot be checked",
                hint="drop by torch.nn.functional.dropout, by an argument of scaled_dot_product_attention, or only while its "
                "module is in training",
            )
        raise RunError(
            "sequence-layout",
            f"an attention over slices, called with {shapes}, computes a head differently beside other heads, or by its "
            "number, or dim 2 is its positions; a rank has some of the heads and counts them from 0",
            hint="give `q, k, v` [b, s, h, d], without the `transpose(1, 2)` that torch's scaled_dot_product_attention wants, "
            "and transpose within the attention; apply slopes and scales that depend on a head to q and k before it, and let "
            "groups of query heads share a key head by `repeat_interleave` or `enable_gqa`",
        )

    def _call(self, tensors: Sequence[Tensor], rest: Sequence[Any], more: Mapping[str, Any]) -> Tensor | None:
        """Returns the context [b, s, h, d] of `tensors`; None if the result is no context."""
        try:
            context: Any = self.attention(*tensors, *rest, **more)
        except (SleyError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's attention raises
            shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
            raise RunError(
                "sequence-attention",
                f"an attention over slices fails for {shapes}: {type(error).__name__}: {error}",
                hint="each rank has some of the heads and full sequences: take numbers of heads from `q` and `k`, and give "
                "masks of the full sequence, from fields without a `sequence_dim`",
            ) from error
        shape, heads = tensors[0].shape[:2], tensors[0].shape[-2]
        if not isinstance(context, Tensor) or context.ndim < 3 or context.shape[:2] != shape:
            return None
        flat = context.flatten(2)
        return torch.unflatten(flat, 2, (heads, -1)) if flat.shape[2] % heads == 0 else None


def _is_close(context: Tensor | None, other: Tensor | None) -> bool:
    """Returns whether all heads of two contexts [b, s, h, d] agree to half of the digits: kernels for other numbers of heads
    differ in the last ones.
    """
    if context is None or other is None or context.shape != other.shape:
        return False
    if not torch.equal(context.isfinite(), other.isfinite()):
        return False
    wide = torch.promote_types(context.dtype, torch.float32)
    one, two = (tensor.to(wide).nan_to_num(0.0, 0.0, 0.0).movedim(2, 0).flatten(1) for tensor in (context, other))
    limit = torch.finfo(wide).eps ** 0.5
    return bool((torch.linalg.vector_norm(one - two, dim=1) <= limit * torch.linalg.vector_norm(two, dim=1)).all())


DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}


class _NoDropout(TorchFunctionMode):
    """Turns off every dropout of torch within the block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        elif getattr(func, "__name__", "") in DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@contextmanager
def _without_dropout(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Sets `modules` to evaluation and turns off dropout; restores both, and the random state, after the block."""
    training = [module for module in modules if module.training]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), _NoDropout():
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
