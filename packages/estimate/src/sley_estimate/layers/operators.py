"""Counts the work of operators: FLOPs by torch's formulas, and the bytes that they read and write.

Attention, RMSNorm and dropout can count as single kernels, as on CUDA:

              on a CPU                                   on CUDA, and within `FusedKernels`
attention     torch's fused operator; without memory     one kernel each way; the backward sums gradients of queries in fp32
              the scores of all pairs
RMSNorm       its formula; keeps the input in fp32       one kernel each way; keeps the input and a number per row
dropout       keeps a mask in the input's dtype          one kernel each way; keeps one byte per element

From torch's sources (aten/src/ATen/native/cuda, transformers/cuda). `assume_device_type("cuda")` changes masks of documents and
the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from sley_core.model.tensors import assume_device_type

PhaseName = Literal["forward", "recompute", "backward"]
"""The phase of an operator. `recompute` runs before `backward`."""

PHASES: tuple[PhaseName, ...] = get_args(PhaseName)


@dataclass(frozen=True)
class Operator:
    """One kernel. num_bytes: the bytes of its inputs and outputs. flops: the FLOPs of a product in `dtype`. is_on_host: whether
    it runs on the host's cores.
    """

    name: str
    num_bytes: int
    flops: int = 0
    dtype: str = ""
    is_on_host: bool = False


@dataclass(frozen=True, eq=False)
class LayerWork:
    """The operators of one layer on one microbatch, by phase, in order. output_bytes: the bytes of the output. saved_bytes: the
    bytes of tensors saved for the backward.
    """

    forward: tuple[Operator, ...]
    recompute: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    output_bytes: int
    saved_bytes: int


aten = torch.ops.aten

DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

FREE_OPS = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view,
    aten._reshape_alias, aten.lift_fresh, aten.resize_, aten.set_, aten.promote_types, aten._local_scalar_dense,
}  # fmt: skip
"""Operators that move no bytes and that torch does not mark as views."""

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
"""The fused attention that runs on tensors of any dtype; `FusedKernels` calls it."""

ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward

BACKWARD_FACTOR = 2.5
"""Products in an attention's backward per product in its forward: five to two, since scores are recomputed."""

LOOKUP_OPS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}
"""Operators that read only as much of their first input as they write."""


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators within the mode under `phase` unless it is None, and by `record_saved_tensor` the tensors that
    autograd saves. last: the latest operator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: PhaseName | None = "forward"
        self.last = ""
        self.shared: set[int] = set()  # storages shared by all layers, which are not counted
        self._saved: dict[int, int] = {}
        self._operators: dict[PhaseName, list[Operator]] = {}

    def operators(self, phase: PhaseName) -> tuple[Operator, ...]:
        """Returns the recorded operators of `phase` in order."""
        return tuple(self._operators.get(phase, ()))

    def record_saved_tensor(self, tensor: Tensor) -> Tensor:
        """Counts a tensor saved for the backward unless it is shared or a parameter. Returns the tensor."""
        storage = tensor.untyped_storage()
        is_weight = isinstance(tensor, nn.Parameter) or (tensor._is_view() and isinstance(tensor._base, nn.Parameter))
        if not is_weight and storage._cdata not in self.shared:
            self._saved[storage._cdata] = storage.nbytes()
        return tensor

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes of all tensors saved so far; each storage counts once."""
        return sum(self._saved.values())

    def record(self, operator: Operator) -> None:
        """Adds `operator` to the current phase, if any."""
        if self.phase is not None:
            self._operators.setdefault(self.phase, []).append(operator)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.last = str(func)
        result = func(*args, **kwargs)
        operator = describe_operator(func, args, kwargs, result)
        if operator is not None:
            self.record(operator)
        return result


def describe_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operator | None:
    """Returns the work of one call of torch's operator `func`, or None if it computes and moves nothing, such as a view. An
    operator without results writes in place. A lookup reads as much of its table as it writes.
    """
    packet = func._overloadpacket
    is_query = func.namespace in ("prim", "profiler")
    if is_query or packet in FREE_OPS or getattr(func, "is_view", False) or func is aten.detach.default:
        return None
    if packet is ATTENTION:
        query, key, value = args[:3]
        is_causal = len(args) > 4 and args[4]  # a default may be missing
        return attention_operator(query, key, value, result[0], is_causal=is_causal)
    if packet is ATTENTION_BACKWARD:
        gradient, query, key, value = args[:4]
        return attention_backward(query, key, value, gradient, result, is_causal=args[7])
    if func.namespace == "torch_attn":
        return _varlen_attention_operator(func, args, kwargs, result)
    inputs = _tensors((args, kwargs))
    outputs = _tensors(result)
    if packet in LOOKUP_OPS:
        table, *inputs = inputs
        inputs += outputs if table.numel() else ()
    outputs += _written_tensors(func, args, kwargs)
    num_bytes = _total_bytes(*inputs, *outputs)
    name = str(packet).removeprefix("aten.")
    out_of_place = getattr(aten, name[:-1], None) if name.endswith("_") else None  # `addmm_` uses torch's formula for `addmm`
    formula: Callable[..., int] | None = flop_registry.get(packet) or flop_registry.get(out_of_place)
    if formula is None:
        return Operator(str(packet), num_bytes)
    dtype = next((DTYPE_NAMES[tensor.dtype] for tensor in inputs if tensor.dtype in DTYPE_NAMES), "fp32")
    return Operator(str(packet), num_bytes, int(formula(*args, **kwargs, out_val=result)), dtype)


def attention_operator(query: Tensor, key: Tensor, value: Tensor, context: Tensor, *, is_causal: bool) -> Operator:
    """Returns an attention as one operator, "attention". A causal attention needs half the FLOPs."""
    key_shape = (*query.shape[:-2], *key.shape[-2:])  # each key serves the queries of its group
    value_shape = *key_shape[:-1], value.shape[-1]
    flops = sdpa_flop_count(query.shape, key_shape, value_shape) // (2 if is_causal else 1)  # type: ignore[no-untyped-call]
    return Operator("attention", _total_bytes(query, key, value, context), flops, DTYPE_NAMES.get(query.dtype, "fp32"))


def attention_backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, results: Sequence[Tensor], *, is_causal: bool
) -> Operator:
    """Returns the backward of an attention, which also reads the context. gradient: the gradient of the context."""
    forward = attention_operator(query, key, value, gradient, is_causal=is_causal)
    num_bytes = forward.num_bytes + _total_bytes(gradient, *results)
    return replace(forward, num_bytes=num_bytes, flops=int(forward.flops * BACKWARD_FACTOR))


def _varlen_attention_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operator:
    """Returns torch's attention over documents, [positions, heads, d], or its backward. All sequences count as the longest."""
    named = _arguments_by_name(func, args, kwargs)
    query, max_length = named["query"], named["max_q"]
    positions, heads, width = query.shape
    rows = max(1, positions // max_length), heads, max_length
    flops = sdpa_flop_count((*rows, width), (*rows, width), (*rows, named["value"].shape[-1]))  # type: ignore[no-untyped-call]
    num_bytes = _total_bytes(*_tensors((args, kwargs, result)))
    factor = BACKWARD_FACTOR if "grad_out" in named else 1
    return Operator("attention", num_bytes, int(flops * factor), DTYPE_NAMES.get(query.dtype, "fp32"))


def _arguments_by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


def _written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors written by an operator without results, such as an update of many tensors."""
    if func._schema.returns:
        return []
    named = _arguments_by_name(func, args, kwargs)
    names = [
        argument.name for argument in func._schema.arguments if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if named.get("grad_scale") is None:
        names = [name for name in names if name != "grads"]  # a fused optimizer writes gradients that it scales
    return _tensors([named.get(name) for name in names])


def _total_bytes(*tensors: Tensor) -> int:
    return sum(map(moved_bytes, tensors))


def moved_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor in memory. Expanded dims count once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


RecordOperator = Callable[[Operator], None]  # records a kernel that torch does not see as one operator


@contextmanager
def imitate_cuda(record: RecordOperator | None = None) -> Iterator[None]:
    """Makes layers and the loss save the same tensors as on CUDA within the block."""
    with assume_device_type("cuda"), FusedKernels(record):
        yield


class FusedKernels(TorchFunctionMode):
    """Runs attention, RMSNorm and dropout as one kernel per direction within the mode. `record` records these kernels."""

    def __init__(self, record: RecordOperator | None = None) -> None:
        super().__init__()
        self.record = record or (lambda operator: None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        replacement = self.replacements.get(func)
        return func(*args, **(kwargs or {})) if replacement is None else replacement(self, *args, **(kwargs or {}))

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
        """Returns the context. Mask and dropout cost nothing. A mask is saved in the dtype of the scores."""
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
        context: Tensor = _Attention.apply(self.record, query, key, value, attn_mask, is_causal)  # type: ignore[no-untyped-call]
        return context

    def norm(self, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
        """Returns the normalized input. Uses the formula if the weight has another dtype, as on CUDA."""
        if weight is not None and weight.dtype != input.dtype:
            return F.rms_norm(input, list(normalized_shape), weight, eps)
        normed: Tensor = _RMSNorm.apply(self.record, input, weight)  # type: ignore[no-untyped-call]
        return normed

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Returns the input after dropout. It is not one kernel outside training, in place, or if p is 0 or 1."""
        if not training or inplace or not 0 < p < 1:
            return F.dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    def backward(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        """Runs torch's backward from gradient edges. Tensors would also disable this mode during recomputation."""
        with self:
            torch.autograd.backward([get_gradient_edge(tensor) for tensor in tensors], *args, **kwargs)

    replacements: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        F.scaled_dot_product_attention: attention,
        F.rms_norm: norm,
        torch.rms_norm: norm,
        F.dropout: dropout,
        torch.autograd.backward: backward,
    }


def _row_statistic(rows: Tensor) -> Tensor:
    """Returns an fp32 tensor with one statistic per row, [..., 1]."""
    return rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, record: RecordOperator, input: Tensor, weight: Tensor | None) -> Tensor:
        inputs = [input] if weight is None else [input, weight]
        ctx.record, ctx.inputs = record, [(tensor.shape, tensor.dtype) for tensor in inputs]
        ctx.save_for_backward(*inputs, _row_statistic(input))
        normed = torch.empty_like(input)
        record(Operator("rms_norm", _total_bytes(*inputs, normed)))
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor | None]:
        ctx.saved_tensors  # noqa: B018  # a policy with recomputation runs the layer here
        results = [gradients[0].new_empty(shape, dtype=dtype) for shape, dtype in ctx.inputs]
        ctx.record(Operator("rms_norm", 2 * _total_bytes(*results) + _total_bytes(*gradients)))
        return None, results[0], results[1] if len(results) > 1 else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, record: RecordOperator, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Returns the context. For 4 dims and equal head widths it calls torch's fused operator, so that an activation policy
        sees its result and the recorder records it. Saves all four tensors, the mask and a statistic per row.
        """
        ctx.record, ctx.is_causal = record, is_causal
        context: Tensor
        if query.ndim == 4 and query.shape[-1] == value.shape[-1]:
            context = ATTENTION(query, key, value, 0.0, is_causal)[0]
        else:
            context = query.new_empty((*query.shape[:-1], value.shape[-1]))
            record(attention_operator(query, key, value, context, is_causal=is_causal))
        ctx.save_for_backward(query, key, value, context, _row_statistic(query), mask)
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None, None]:
        query, key, value, *_ = ctx.saved_tensors
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        is_wide = query.dtype.itemsize >= torch.float32.itemsize
        _sums = None if is_wide else torch.empty_like(query, dtype=torch.float32)  # while the kernel runs
        ctx.record(attention_backward(query, key, value, gradients[0], results, is_causal=ctx.is_causal))
        return None, *results, None, None
