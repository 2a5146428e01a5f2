"""Tests at run time that an attention's tensors are [b, s, h, d], positions before heads.

    right    v of every second head changed:  contexts of the other heads are unchanged
    wrong    [b, h, s, d], as torch's own attention wants it: those "heads" are positions, which see their neighbours

Shapes do not distinguish the two, so the attention is tested once, by two more forwards without gradients. That also finds
heads that influence one another. Then `ask_alike` tests whether a head's number changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.api.model import as_it_was, aside
from sley_core.errors import RunError
from sley_isp.sequence.alike import ask_alike, modules_of

if TYPE_CHECKING:
    from sley_isp.sequence.call import AttentionCall


class Proof:
    """Tests one attention at its first calls, until one call was large enough to be conclusive."""

    def __init__(self) -> None:
        self.is_given = False

    @torch.no_grad()
    def ask(self, call: AttentionCall) -> None:
        """Raises RunError "sequence-layout" if the attention of `call` mixes up heads and positions; reruns it to find out."""
        length, heads = _values(call.tensors[-1]).shape[1:3]
        if self.is_given or (length == 1 and heads == 1):
            return
        with aside(), as_it_was(modules_of(call.attention)):
            self.is_given = self._ask(call)

    def _ask(self, call: AttentionCall) -> bool:
        """Tests the attention with this call; returns whether the call was conclusive. Raises RunError "sequence-layout"."""
        values = _values(call.tensors[-1])
        heads = values.shape[2]
        by_heads = heads > 1
        base = _quietly(call, call.tensors)
        if not isinstance(base, Tensor) or base.shape[:2] != values.shape[:2] or base[0, 0].numel() % heads:
            return False  # the caller raises for a wrong context
        changed = [*call.tensors[:-1], call.tensors[-1].clone()]
        _every_second(_values(changed[-1]), by_heads, 0).add_(1.0)
        before, after = (
            _every_second(one.reshape(*base.shape[:2], heads, -1), by_heads, 1)
            for one in (base, _quietly(call, changed))
        )
        if torch.allclose(before, after, rtol=0.0, atol=0.0, equal_nan=True) != by_heads:
            raise _wrong(call.tensors)
        ask_alike(call)
        return True


def _values(last: Tensor) -> Tensor:
    """Returns the values [b, s, h, d] of the last tensor: itself, or a view of kv or qkv [b, s, ..., h, d]."""
    return last if last.ndim == 4 else last[:, :, -1]


def _every_second(tensor: Tensor, by_heads: bool, first: int) -> Tensor:
    """Returns a view of every second head of [b, s, h, d] from `first` on, or of every second position."""
    return tensor[:, :, first::2] if by_heads else tensor[:, first::2]


def _quietly(call: AttentionCall, tensors: Sequence[Tensor]) -> Any:
    """Returns the context of `tensors`; leaves the random state as it was, so the next call draws the same numbers."""
    device = tensors[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return call.answer(tensors)


def _wrong(tensors: Sequence[Tensor]) -> RunError:
    """Returns the RunError "sequence-layout"."""
    shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
    return RunError(
        "sequence-layout",
        f"an attention over slices was called with {shapes}, but what it computes is no attention [b, s, h, d] whose heads "
        "are apart: dim 2 looks like its positions, or its heads influence one another",
        hint="give `q, k, v` [b, s, h, d], without the `transpose(1, 2)` that torch's scaled_dot_product_attention wants; "
        "transpose within the attention, behind the exchange",
    )
