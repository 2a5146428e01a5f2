"""Counts the work of operators: their FLOPs by torch's formulas, and the bytes that they read and write.

Within `FusedKernels`, attention, RMSNorm and dropout count as single kernels, as on CUDA:

              on a CPU                                 on CUDA, and within `FusedKernels`
attention     torch's fused operator                   one kernel each way; the backward sums the gradient of queries in fp32
RMSNorm       its formula; saves the input in fp32     one kernel each way; saves the input and one number per row
dropout       saves a mask in the input's dtype        one kernel each way; saves one byte per element

The right column follows torch's sources in aten/src/ATen/native/cuda and native/transformers/cuda. `assume_device_type("cuda")`
makes document masks and the loss behave as on CUDA.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from sley_core.model.tensors import assume_device_type

PhaseName = Literal["forward", "recompute", "backward"]
"""The phase of an operator. `recompute` is the recomputation within a backward; it counts as running before `backward`."""

PHASES: tuple[PhaseName, ...] = get_args(PhaseName)  # all phases, in the order in which they run


@dataclass(frozen=True)
class Operator:
    """One kernel. num_bytes: the number of bytes that it reads and writes. flops: the FLOPs of a matrix product, else 0. dtype:
    the dtype of the product, such as "bf16"; "" for other kernels. is_on_host: whether it runs on the host's cores.
    """

    name: str
    num_bytes: int
    flops: int = 0
    dtype: str = ""
    is_on_host: bool = False


@dataclass(frozen=True, eq=False)
class LayerWork:
    """The operators of a layer on one microbatch, by phase, and the sizes in bytes of its output and of its saved tensors."""

    forward: tuple[Operator, ...]
    recompute: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    output_bytes: int
    saved_bytes: int


aten = torch.ops.aten

DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The names of the dtypes of matrix products, as in the `[device.matmul]` tables."""

FREE_OPS = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view,
    aten._reshape_alias, aten.lift_fresh, aten.resize_, aten.set_, aten.promote_types, aten._local_scalar_dense,
}  # fmt: skip
"""Operators that move no bytes and that torch does not mark as views."""

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
"""The fused attention that `FusedKernels` calls, since it accepts tensors of any dtype."""

ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward  # the backward of `ATTENTION`

BACKWARD_FACTOR = 2.5  # FLOPs of an attention's backward per FLOP of its forward: 5 products to 2, as it computes scores again

LOOKUP_OPS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}
"""Operators that read only as many bytes of their first input, a table, as they write."""

WRITE_OPS = {aten.copy_, aten.fill_, aten.zero_, aten._foreach_copy_, aten._foreach_zero_}
"""Operators that write their first argument without reading it."""

SCATTER_OPS = {aten.index_add_, aten.index_put_, aten.scatter_add_}
"""Operators that read and write only as many elements of their first argument as their last tensor has."""


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run within this dispatch mode, and counts the bytes of saved tensors. phase: the phase under
    which operators are recorded; None records no operators.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: PhaseName | None = "forward"
        self.last_operator = ""
        self.shared_storages: set[int] = set()  # identifiers of storages that layers share, which are not counted as saved
        self._saved: dict[int, int] = {}
        self._operators: dict[PhaseName, list[Operator]] = {}

    def operators(self, phase: PhaseName) -> tuple[Operator, ...]:
        """Returns the operators recorded under `phase`, in order."""
        return tuple(self._operators.get(phase, ()))

    def record_saved_tensor(self, tensor: Tensor) -> Tensor:
        """Counts the storage of a saved tensor once, unless it belongs to a parameter or layers share it. Returns `tensor`."""
        storage = tensor.untyped_storage()
        is_weight = isinstance(tensor, nn.Parameter) or (tensor._is_view() and isinstance(tensor._base, nn.Parameter))
        if not is_weight and storage._cdata not in self.shared_storages:
            self._saved[storage._cdata] = storage.nbytes()
        return tensor

    @property
    def saved_bytes(self) -> int:
        """Returns the size in bytes of all tensors saved so far; each storage counts once."""
        return sum(self._saved.values())

    def record(self, operator: Operator) -> None:
        """Adds `operator` to the current phase. Does nothing if the phase is None."""
        if self.phase is not None:
            self._operators.setdefault(self.phase, []).append(operator)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.last_operator = str(func)
        result = func(*args, **kwargs)
        operator = describe_operator(func, args, kwargs, result)
        if operator is not None:
            self.record(operator)
        return result


def describe_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operator | None:
    """Returns the work of one call of torch's operator `func`, or None if the call, such as a view, computes and moves nothing.
    Tensors that an operator without results writes in place count as outputs.
    """
    packet = func._overloadpacket
    is_query = func.namespace in ("prim", "profiler")
    if is_query or packet in FREE_OPS or getattr(func, "is_view", False) or func is aten.detach.default:
        return None
    if packet is ATTENTION:
        query, key, value = args[:3]
        is_causal = len(args) > 4 and args[4]  # arguments with default values may be missing
        return attention_operator(query, key, value, result[0], is_causal=is_causal)
    if packet is ATTENTION_BACKWARD:
        gradient, query, key, value = args[:4]
        return attention_backward(query, key, value, gradient, result, is_causal=args[7])
    if func.namespace == "torch_attn":
        return _varlen_attention_operator(func, args, kwargs, result)
    out_names = {argument.name for argument in func._schema.arguments if argument.is_out}
    inputs = _tensors((args[packet in WRITE_OPS :], {name: kwargs[name] for name in kwargs if name not in out_names}))
    outputs = _tensors(result)
    if packet in LOOKUP_OPS:
        table, *inputs = inputs
        inputs += outputs if table.numel() else ()
    if packet in SCATTER_OPS:
        _, *inputs = inputs
        outputs = [inputs[-1]] * 2
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
    """Returns the attention as one operator. Causal attention needs half of the FLOPs. context: the output."""
    query_shape = 1, query.shape[:-2].numel(), *query.shape[-2:]  # the formula takes four dims
    key_shape = *query_shape[:-2], *key.shape[-2:]  # as many heads as queries, since each key serves a group of queries
    value_shape = *key_shape[:-1], value.shape[-1]
    flops = sdpa_flop_count(query_shape, key_shape, value_shape) // (2 if is_causal else 1)  # type: ignore[no-untyped-call]
    return Operator("attention", _total_bytes(query, key, value, context), flops, DTYPE_NAMES.get(query.dtype, "fp32"))


def attention_backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, results: Sequence[Tensor], *, is_causal: bool
) -> Operator:
    """Returns the backward of an attention as one operator, which also reads the context, the output of the forward."""
    forward = attention_operator(query, key, value, gradient, is_causal=is_causal)
    num_bytes = forward.num_bytes + _total_bytes(gradient, *results)
    return replace(forward, num_bytes=num_bytes, flops=int(forward.flops * BACKWARD_FACTOR))


def _varlen_attention_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operator:
    """Returns an attention over documents, or its backward. Counts FLOPs as if all documents were as long as the longest."""
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
    """Returns the tensors that an operator without results writes in place; [] for other operators."""
    if func._schema.returns:
        return []
    named = _arguments_by_name(func, args, kwargs)
    names = [
        argument.name for argument in func._schema.arguments if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if named.get("grad_scale") is None:
        names = [name for name in names if name != "grads"]  # a fused optimizer writes gradients only to unscale them
    return _tensors([named.get(name) for name in names])


def _total_bytes(*tensors: Tensor) -> int:
    return sum(map(moved_bytes, tensors))


def moved_bytes(tensor: Tensor) -> int:
    """Returns the number of bytes of a tensor that an operator reads or writes. An expanded dimension counts as one element."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()


def _tensors(values: Any) -> list[Tensor]:
    """Returns the tensors in `values`, which may be nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


RecordOperator = Callable[[Operator], None]  # a function that records a kernel that torch does not see as one operator


@contextmanager
def imitate_cuda(record: RecordOperator | None = None) -> Iterator[None]:
    """Makes layers and the loss save the same tensors within the block as on CUDA. record: called with each fused kernel."""
    with assume_device_type("cuda"), FusedKernels(record):
        yield


class FusedKernels(TorchFunctionMode):
    """Makes attention, RMSNorm and dropout run as one kernel per direction within this function mode, as on CUDA. record:
    called with each such kernel that torch does not run as one operator; None records none.
    """

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
        """Returns the attention's output. The mask and dropout add no work. A mask is saved in the dtype of the scores."""
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
        context: Tensor = _Attention.apply(self.record, query, key, value, attn_mask, is_causal)  # type: ignore[no-untyped-call]
        return context

    def norm(self, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: Any = None) -> Tensor:
        """Returns the normalized input. As on CUDA, uses several operators if the dtypes of weight and input differ."""
        if weight is not None and weight.dtype != input.dtype:
            return F.rms_norm(input, list(normalized_shape), weight, eps)
        normed: Tensor = _RMSNorm.apply(self.record, input, weight)  # type: ignore[no-untyped-call]
        return normed

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Returns the input after dropout. Calls torch's dropout outside training, in place, or if `p` is 0 or 1."""
        if not training or inplace or not 0 < p < 1:
            return F.dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    def backward(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        """Runs torch's backward from the gradient edges of `tensors`, and keeps this mode active during recomputation."""
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
    """Returns an uninitialized fp32 tensor with one number per row of `rows`, of shape [..., 1]."""
    return rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)


class _RMSNorm(torch.autograd.Function):
    """Stands in for an RMSNorm with one kernel per direction. Records both kernels, and returns uninitialized tensors."""

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
        ctx.saved_tensors  # noqa: B018  # with recomputation, this runs the layer again
        results = [gradients[0].new_empty(shape, dtype=dtype) for shape, dtype in ctx.inputs]
        ctx.record(Operator("rms_norm", 2 * _total_bytes(*results) + _total_bytes(*gradients)))
        return None, results[0], results[1] if len(results) > 1 else None


class _Attention(torch.autograd.Function):
    """Stands in for an attention with one kernel per direction. Records each kernel that torch does not run as one operator.
    The values of the results have no meaning.
    """

    @staticmethod
    def forward(
        ctx: Any, record: RecordOperator, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Saves the inputs, the output, the mask and one number per row. If tensors have 4 dimensions and equal head widths,
        calls torch's fused operator, so that an activation policy and the recorder see it.
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
        _sums = None if is_wide else torch.empty_like(query, dtype=torch.float32)  # memory that the kernel needs while it runs
        ctx.record(attention_backward(query, key, value, gradients[0], results, is_causal=ctx.is_causal))
        return None, *results, None, None


_SELECT_OPS = {aten.where, aten.masked_fill}  # operators that do not convert their bool condition to the common dtype

_REDUCTION_OPS = {aten.sum, aten.mean, aten.prod, aten.linalg_vector_norm}
"""Operators that convert their input to the dtype of their result; `mean` converts its input to at least fp32."""


def scratch_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the size in bytes of the copies that the CPU operator `func` makes internally to convert its tensors to a common
    dtype, as `fp32.add_(fp16)` does: a TensorIterator kernel works on one dtype. Returns 0 if `func` is neither an elementwise
    operator nor a reduction.
    """
    packet = func._overloadpacket
    if packet in _REDUCTION_OPS:
        is_mean = packet is aten.mean and result.dtype.is_floating_point
        return _conversion_bytes([args[0]], torch.promote_types(result.dtype, torch.float32) if is_mean else result.dtype)
    if torch.Tag.pointwise not in func.tags or not isinstance(result, Tensor):
        return 0
    inputs = [*args, *(value for name, value in kwargs.items() if name != "out")]
    if packet in _SELECT_OPS:
        inputs = [value for value in inputs if not (isinstance(value, Tensor) and value.dtype == torch.bool)]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if all(tensor.dtype == result.dtype for tensor in tensors):
        return 0
    numbers = (value for value in inputs if isinstance(value, Tensor | bool | int | float))
    common = elementwise_dtypes(*numbers, type_promotion_kind=PROMOTION.DEFAULT)[1]
    if result.dtype.is_floating_point and not common.is_floating_point:
        common = result.dtype  # a floating-point result from integers, as in a division
    is_in_place = "out" in kwargs or any(result is tensor for tensor in tensors)
    outputs = [result] if is_in_place and result.dtype != torch.bool else []
    return _conversion_bytes([*tensors, *outputs], common)


def _conversion_bytes(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    """Returns the size in bytes of copies of `tensors` in `dtype`. Tensors that have this dtype are not copied."""
    return sum(tensor.numel() * dtype.itemsize for tensor in tensors if tensor.dtype != dtype)
