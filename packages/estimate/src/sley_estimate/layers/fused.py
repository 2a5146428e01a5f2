"""Notes attention and RMSNorm as one kernel each, as devices run them, where tensors have no memory.

Without memory torch takes its plain attention, which writes the scores of all pairs of positions; no device that has a fused
kernel does. So `F.scaled_dot_product_attention` is noted here as that kernel: it reads queries, keys and values and writes the
context, and of a causal square it multiplies half. It is called as torch's fused operator, so that a policy which keeps what
attention gave sees it, and it is not noted again. `F.rms_norm` reads its input once, and not once per step of its formula. Both
save for their backward what the kernels save: a number in fp32 for each row, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from sley_estimate.layers.operators import Operator
from sley_estimate.layers.recorder import ATTENTION, OF_BACKWARD, attention, moved_bytes

SUM = torch.float32
"""In which kernels add up."""


class Notes(Protocol):
    """Takes operators that torch does not see as one."""

    def note(self, operator: Operator) -> None:
        """Notes `operator`."""


class FusedKernels(TorchFunctionMode):
    """Within it, scaled dot-product attention and RMSNorm are one operator forward and one backward each.

    by_steps: whether RMSNorm saves for its backward what its steps save, as on a CPU, which has no kernel for it.
    """

    def __init__(self, recorder: Notes, *, by_steps: bool = False) -> None:
        super().__init__()
        self.recorder = recorder
        self.by_steps = by_steps

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        other = self.instead.get(func)
        return func(*args, **(kwargs or {})) if other is None else other(self, *args, **(kwargs or {}))

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the context of an attention, noted as one kernel forward and one backward."""
        return _noted(self.recorder, *args, **kwargs)

    def norm(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns what an RMSNorm makes of its input, noted as one kernel forward and one backward."""
        return _normed(self.recorder, self.by_steps, *args, **kwargs)

    def backward(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        """Runs torch's backward from the edges of `tensors`: of tensors it would run with this mode off, and layers that run
        again within it would not be fused.
        """
        with self:
            torch.autograd.backward([get_gradient_edge(tensor) for tensor in tensors], *args, **kwargs)

    instead: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        F.scaled_dot_product_attention: attention,
        F.rms_norm: norm,
        torch.rms_norm: norm,
        torch.autograd.backward: backward,
    }
    """What is called instead of torch's function, which is asked for each attribute of a tensor too."""


def _noted(
    recorder: Notes,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    """Returns the context of an attention, noted as one kernel forward and one backward. What mask and dropout compute does not
    count. A mask is kept, as what is added to the scores.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    context: Tensor = _Attention.apply(recorder, query, key, value, attn_mask, is_causal)  # type: ignore[no-untyped-call]  # torch's
    return context


def _normed(
    recorder: Notes,
    by_steps: bool,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Returns what an RMSNorm makes of `input`, noted as one kernel forward and one backward."""
    normed: Tensor = _RMSNorm.apply(recorder, by_steps, input, weight)  # type: ignore[no-untyped-call]  # torch's
    return normed


def _statistic(rows: Tensor) -> Tensor:
    """Returns what a kernel keeps of each row, [..., 1] in fp32: the logarithm of its sum of exponentials, or
    its inverse norm.
    """
    return rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)


def _taken(query: Tensor) -> Tensor | None:
    """Returns the memory that a backward's kernel takes beside its results, [like `query`] in fp32: sums of gradients of
    queries; None for queries that are as wide.
    """
    return None if query.dtype.itemsize >= SUM.itemsize else torch.empty_like(query, dtype=SUM)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Notes, by_steps: bool, input: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the normed input; notes the kernel, and saves the input (or what its steps save) and a number per row."""
        given = [input] if weight is None else [input, weight]
        ctx.like = [(one.shape, one.dtype) for one in given]
        ctx.save_for_backward(*(_steps(input, weight) if by_steps else given), _statistic(input))
        ctx.recorder = recorder
        normed = torch.empty_like(input)
        recorder.note(Operator("rms_norm", sum(map(moved_bytes, (*given, normed)))))
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        """Returns gradients of input and weight, and notes the kernel."""
        ctx.saved_tensors  # noqa: B018  # who runs again what was not kept does so here
        made = [gradients[0].new_empty(shape, dtype=dtype) for shape, dtype in ctx.like]
        ctx.recorder.note(Operator("rms_norm", 2 * sum(map(moved_bytes, made)) + sum(map(moved_bytes, gradients))))
        return None, None, made[0], made[1] if len(made) > 1 else None


def _steps(input: Tensor, weight: Tensor | None) -> list[Tensor]:
    """Returns what the steps of an RMSNorm save: its input in fp32 at least, and where a weight comes behind it the normed."""
    dtype = torch.promote_types(input.dtype, torch.float32)
    wide = input if dtype == input.dtype else input.new_empty(input.shape, dtype=dtype)
    return [wide] if weight is None else [wide, input.new_empty(input.shape, dtype=dtype), weight]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recorder: Notes, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Returns the context of an attention, from torch's fused operator for 4 dims and one head width, which is noted as any
        operator; else makes it and notes the kernel. Saves all four tensors, the mask if there is one, and a number per row.
        """
        ctx.recorder, ctx.is_causal = recorder, is_causal
        context: Tensor
        if query.ndim == 4 and query.shape[-1] == value.shape[-1]:
            context = ATTENTION(query, key, value, 0.0, is_causal)[0]
        else:
            context = query.new_empty((*query.shape[:-1], value.shape[-1]))  # torch's fused operator takes no such shapes
            recorder.note(attention(query, key, value, context, is_causal=is_causal))
        ctx.save_for_backward(query, key, value, context, _statistic(query), mask)
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None, None]:
        """Returns gradients of queries, keys and values; takes the kernel's own memory meanwhile, and notes the kernel."""
        query, key, value, *_ = ctx.saved_tensors
        made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        _sums = _taken(query)  # while the kernel runs
        (gradient,) = gradients
        forward = attention(query, key, value, gradient, is_causal=ctx.is_causal)
        # the context is read once more beside its gradient
        num_bytes = forward.num_bytes + sum(map(moved_bytes, (gradient, *made)))
        ctx.recorder.note(Operator(forward.name, num_bytes, int(forward.flops * OF_BACKWARD), forward.dtype))
        return None, *made, None, None
