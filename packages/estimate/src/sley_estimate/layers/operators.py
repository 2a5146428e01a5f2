"""What operators multiply and move: FLOPs by torch's formulas, and the bytes that they read and write.

Attention, RMSNorm and dropout can be taken as the single kernels that CUDA runs:

              on a CPU                                   on CUDA, and within `FusedKernels`
attention     torch's fused operator; without memory     one kernel each way; the backward sums gradients of queries in fp32
              the scores of all pairs
RMSNorm       its formula; keeps the input in fp32       one kernel each way; keeps the input and a number per row
dropout       keeps a mask in the input's dtype          one kernel each way; keeps one byte per element

From torch's sources (aten/src/ATen/native/cuda, transformers/cuda). `standing_for("cuda")` changes masks of documents and the
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from sley_core.model.tensors import standing_for

PhaseName = Literal["forward", "recompute", "backward", "input_gradient", "weight_gradient"]
"""When an operator runs: a whole backward is `backward`, a split one `input_gradient` and later `weight_gradient`; `recompute`
runs before either."""

PHASES: tuple[PhaseName, ...] = ("forward", "recompute", "backward", "input_gradient", "weight_gradient")


@dataclass(frozen=True)
class Operator:
    """One kernel. num_bytes: of inputs and outputs. flops: of a product of `dtype`. is_on_host: runs on the host's cores."""

    name: str
    num_bytes: int
    flops: int = 0
    dtype: str = ""
    is_on_host: bool = False


@dataclass(frozen=True)
class LayerWork:
    """The operators of one layer and one micro-batch, by phase, in order. num_parameters: trained elements. output_bytes: of
    the layer's output. kept_bytes: of tensors kept for the backward.
    """

    forward: tuple[Operator, ...]
    recompute: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    input_gradient: tuple[Operator, ...]
    weight_gradient: tuple[Operator, ...]
    num_parameters: int
    output_bytes: int
    kept_bytes: int

    def of(self, phase: PhaseName) -> tuple[Operator, ...]:
        operators: tuple[Operator, ...] = getattr(self, phase)
        return operators


aten = torch.ops.aten

DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

FREE = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view,
    aten._reshape_alias, aten.lift_fresh, aten.resize_, aten.set_, aten.promote_types, aten._local_scalar_dense,
}  # fmt: skip
"""Operators that move nothing and are no views to torch."""

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
"""The fused attention that runs on tensors of any dtype; `FusedKernels` calls it."""

ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward

OF_BACKWARD = 2.5
"""Products of an attention's backward per product of its forward: five for two, since scores are computed again."""

LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}
"""Operators that read no more of their first input than they write."""


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Records the operators that run within it under `phase`, and by `keep` what autograd saves. last: the latest operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.phase: PhaseName = "forward"
        self.last = ""
        self.shared: set[int] = set()  # storages that all layers share, which `keep` leaves out
        self._kept: dict[int, int] = {}
        self._operators: dict[PhaseName, list[Operator]] = {}

    def of(self, phase: PhaseName) -> tuple[Operator, ...]:
        return tuple(self._operators.get(phase, ()))

    def keep(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that is saved for the backward, unless it is shared or a parameter; returns it."""
        storage = tensor.untyped_storage()
        is_weight = isinstance(tensor, nn.Parameter) or (tensor._is_view() and isinstance(tensor._base, nn.Parameter))
        if not is_weight and storage._cdata not in self.shared:
            self._kept[storage._cdata] = storage.nbytes()
        return tensor

    @property
    def kept_bytes(self) -> int:
        return sum(self._kept.values())

    def note(self, operator: Operator) -> None:
        self._operators.setdefault(self.phase, []).append(operator)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.last = str(func)
        result = func(*args, **kwargs)
        operator = operator_of(func, args, kwargs, result)
        if operator is not None:
            self.note(operator)
        return result


def operator_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operator | None:
    """Returns the work of one call of torch's operator `func`; None if it computes and moves nothing, as a view. An operator
    that returns nothing writes in place; a look-up reads as much of its table as it writes.
    """
    packet = func._overloadpacket
    is_query = func.namespace in ("prim", "profiler")
    if is_query or packet in FREE or getattr(func, "is_view", False) or func is aten.detach.default:
        return None
    if packet is ATTENTION:
        query, key, value = args[:3]
        is_causal = len(args) > 4 and args[4]  # a default may be left out
        return attention_operator(query, key, value, result[0], is_causal=is_causal)
    if packet is ATTENTION_BACKWARD:
        gradient, query, key, value = args[:4]
        return attention_backward(query, key, value, gradient, result, is_causal=args[7])
    if func.namespace == "torch_attn":
        return _over_documents(func, args, kwargs, result)
    inputs = _tensors((args, kwargs))
    outputs = _tensors(result)
    if packet in LOOK_UPS:
        table, *inputs = inputs
        inputs += outputs if table.numel() else ()
    outputs += _written(func, args, kwargs)
    num_bytes = _bytes(*inputs, *outputs)
    name = str(packet).removeprefix("aten.")
    plain = getattr(aten, name[:-1], None) if name.endswith("_") else None  # torch has a formula of `addmm`, for `addmm_`
    formula: Callable[..., int] | None = flop_registry.get(packet) or flop_registry.get(plain)
    if formula is None:
        return Operator(str(packet), num_bytes)
    dtype = next((DTYPE_NAMES[tensor.dtype] for tensor in inputs if tensor.dtype in DTYPE_NAMES), "fp32")
    return Operator(str(packet), num_bytes, int(formula(*args, **kwargs, out_val=result)), dtype)


def attention_operator(query: Tensor, key: Tensor, value: Tensor, context: Tensor, *, is_causal: bool) -> Operator:
    """Returns an attention as one operator, "attention"; a causal one multiplies half."""
    grouped = (*query.shape[:-2], *key.shape[-2:])  # each key serves the queries of its group
    of_values = *grouped[:-1], value.shape[-1]
    flops = sdpa_flop_count(query.shape, grouped, of_values) // (2 if is_causal else 1)  # type: ignore[no-untyped-call]
    return Operator("attention", _bytes(query, key, value, context), flops, DTYPE_NAMES.get(query.dtype, "fp32"))


def attention_backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, results: Sequence[Tensor], *, is_causal: bool
) -> Operator:
    """Returns the backward of an attention, which reads the context too. gradient: of the context."""
    forward = attention_operator(query, key, value, gradient, is_causal=is_causal)
    num_bytes = forward.num_bytes + _bytes(gradient, *results)
    return replace(forward, num_bytes=num_bytes, flops=int(forward.flops * OF_BACKWARD))


def _over_documents(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operator:
    """Returns torch's attention over documents, [positions, heads, d], or its backward: of all pairs in the longest."""
    named = _named(func, args, kwargs)
    query, longest = named["query"], named["max_q"]
    positions, heads, width = query.shape
    rows = max(1, positions // longest), heads, longest
    flops = sdpa_flop_count((*rows, width), (*rows, width), (*rows, named["value"].shape[-1]))  # type: ignore[no-untyped-call]
    num_bytes = _bytes(*_tensors((args, kwargs, result)))
    factor = OF_BACKWARD if "grad_out" in named else 1
    return Operator("attention", num_bytes, int(flops * factor), DTYPE_NAMES.get(query.dtype, "fp32"))


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operator without a result writes, such as an update of many tensors at once."""
    if func._schema.returns:
        return []
    named = _named(func, args, kwargs)
    places = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    if named.get("grad_scale") is None:
        places = [name for name in places if name != "grads"]  # a fused optimizer writes gradients that it scales
    return _tensors([named.get(name) for name in places])


def _bytes(*tensors: Tensor) -> int:
    return sum(map(moved_bytes, tensors))


def moved_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor in memory: expanded dims count once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


Note = Callable[[Operator], None]  # records a kernel that torch does not see as one operator


@contextmanager
def as_on_cuda(note: Note | None = None) -> Iterator[None]:
    """Makes layers and the loss keep within the block what they keep on CUDA."""
    with standing_for("cuda"), FusedKernels(note):
        yield


class FusedKernels(TorchFunctionMode):
    """Within it attention, RMSNorm and dropout are one kernel each way, which `note` records."""

    def __init__(self, note: Note | None = None) -> None:
        super().__init__()
        self.note = note or (lambda operator: None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        other = self.instead.get(func)
        return func(*args, **(kwargs or {})) if other is None else other(self, *args, **(kwargs or {}))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        """Returns the context. Mask and dropout cost nothing; a mask is kept in the dtype of the scores."""
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
        context: Tensor = _Attention.apply(self.note, query, key, value, attn_mask, is_causal)  # type: ignore[no-untyped-call]  # torch's
        return context

    def norm(self, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
        """Returns the normed input; by the formula where the weight has another dtype, as on CUDA."""
        if weight is not None and weight.dtype != input.dtype:
            return F.rms_norm(input, list(normalized_shape), weight, eps)
        normed: Tensor = _RMSNorm.apply(self.note, input, weight)  # type: ignore[no-untyped-call]  # torch's
        return normed

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Returns the input with elements dropped; not as one kernel outside training, in place, or with p of 0 or 1."""
        if not training or inplace or not 0 < p < 1:
            return F.dropout(input, p, training, inplace)
        dropped: Tensor = _Dropout.apply(self.note, input)  # type: ignore[no-untyped-call]  # torch's
        return dropped

    def backward(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        """Runs torch's backward from gradient edges: from tensors it would turn this mode off, and recomputation with it."""
        with self:
            torch.autograd.backward([get_gradient_edge(tensor) for tensor in tensors], *args, **kwargs)

    instead: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        F.scaled_dot_product_attention: attention,
        F.rms_norm: norm,
        torch.rms_norm: norm,
        F.dropout: dropout,
        torch.autograd.backward: backward,
    }


def _per_row(rows: Tensor) -> Tensor:
    """Returns a kernel's statistic of each row, [..., 1] in fp32."""
    return rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, note: Note, input: Tensor, weight: Tensor | None) -> Tensor:
        inputs = [input] if weight is None else [input, weight]
        ctx.note, ctx.like = note, [(tensor.shape, tensor.dtype) for tensor in inputs]
        ctx.save_for_backward(*inputs, _per_row(input))
        normed = torch.empty_like(input)
        note(Operator("rms_norm", _bytes(*inputs, normed)))
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor | None]:
        ctx.saved_tensors  # noqa: B018  # a policy that runs the layer again does so here
        results = [gradients[0].new_empty(shape, dtype=dtype) for shape, dtype in ctx.like]
        ctx.note(Operator("rms_norm", 2 * _bytes(*results) + _bytes(*gradients)))
        return None, results[0], results[1] if len(results) > 1 else None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, note: Note, input: Tensor) -> Tensor:
        ctx.note = note
        mask, dropped = torch.empty_like(input, dtype=torch.bool), torch.empty_like(input)
        ctx.save_for_backward(mask)
        note(Operator("dropout", _bytes(input, mask, dropped)))
        return dropped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (mask,) = ctx.saved_tensors  # a policy that moved it brings it back
        result = torch.empty_like(gradients[0])
        ctx.note(Operator("dropout", _bytes(gradients[0], mask, result)))
        return None, result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, note: Note, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Returns the context: from torch's fused operator for 4 dims and one head width, so that a policy which keeps its
        result sees it; that is recorded as any operator. Keeps all four tensors, the mask and a number per row.
        """
        ctx.note, ctx.is_causal = note, is_causal
        context: Tensor
        if query.ndim == 4 and query.shape[-1] == value.shape[-1]:
            context = ATTENTION(query, key, value, 0.0, is_causal)[0]
        else:
            context = query.new_empty((*query.shape[:-1], value.shape[-1]))
            note(attention_operator(query, key, value, context, is_causal=is_causal))
        ctx.save_for_backward(query, key, value, context, _per_row(query), mask)
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None, None]:
        query, key, value, *_ = ctx.saved_tensors
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        is_wide = query.dtype.itemsize >= torch.float32.itemsize
        _sums = None if is_wide else torch.empty_like(query, dtype=torch.float32)  # while the kernel runs
        ctx.note(attention_backward(query, key, value, gradients[0], results, is_causal=ctx.is_causal))
        return None, *results, None, None
