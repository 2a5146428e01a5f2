"""Notes every operator that runs, its FLOPs and the bytes that it moves, on tensors that need not have memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from sley_estimate.layers.operators import Operator, PhaseName

aten = torch.ops.aten

NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

FREE = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view,
    aten._reshape_alias, aten.lift_fresh, aten.resize_, aten.set_, aten.promote_types, aten._local_scalar_dense,
}  # fmt: skip
"""Operators that move nothing and are no views to torch."""

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
"""As what `FusedKernels` calls an attention: of torch's fused ones that which runs on tensors of any type."""

DOCUMENTS = "torch_attn"
"""The namespace of torch's attention over documents, forward and backward, which CUDA has."""

OF_BACKWARD = 2.5
"""Products of an attention's backward per product of its forward: five for two, as the scores are computed again."""

QUESTIONS = ("prim", "profiler")
"""Namespaces of what is asked of tensors, and of marks in profiles."""

LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}
"""Operators that read of their first input no more than they write."""


class SeenBytes:
    """Counts the bytes of tensors that were seen and are still there, each storage once. most: since `begin`."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self._began = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage] | None] = {}

    def ignore(self, tensor: Tensor) -> None:
        """Keeps the storage of a tensor, which outlives this object, from being counted by a later `see`."""
        self._watched[tensor.untyped_storage()._cdata] = None

    def see(self, found: Any) -> None:
        """Counts the storages of what an operator made, each until it is gone: of a tensor, or of those in a tuple or list."""
        if isinstance(found, tuple | list):
            for one in found:
                self.see(one)
        elif isinstance(found, Tensor):
            storage = found.untyped_storage()
            key = storage._cdata
            if key not in self._watched:
                num_bytes = storage.nbytes()
                self._watched[key] = weakref.ref(storage, partial(self._gone, key, num_bytes))
                self.now += num_bytes
                self.most = max(self.most, self.now)

    def begin(self) -> None:
        """Begins to look for the most bytes: sets `most` to what is there now."""
        self._began = self.most = self.now

    @property
    def more(self) -> int:
        """Returns how many bytes more than at the last `begin` there were at once."""
        return self.most - self._began

    def _gone(self, key: int, num_bytes: int, _: object) -> None:
        del self._watched[key]
        self.now -= num_bytes


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the operators that run within it, under the phase that `phase` has then; and what autograd saves, by `keep`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.kept: dict[int, int] = {}
        self._shared: set[int] = set()
        self.live = SeenBytes()
        self.phase: PhaseName = "forward"
        self._found: dict[PhaseName, list[Operator]] = {}
        self.last = ""

    def of(self, phase: PhaseName) -> tuple[Operator, ...]:
        """Returns the operators that were noted under `phase`, in the order in which they ran."""
        return tuple(self._found.get(phase, ()))

    def share(self, value: object) -> None:
        """Keeps a tensor that all layers share from being counted, by `keep` and by `live`; does nothing with other values."""
        if isinstance(value, Tensor):
            self.live.ignore(value)
            self._shared.add(value.untyped_storage()._cdata)

    def keep(self, tensor: Tensor) -> Tensor:
        """Counts the storage of a tensor as kept for the backward, unless it is shared, a parameter or a view of one, and
        returns the tensor: for `saved_tensors_hooks`.
        """
        storage = tensor.untyped_storage()
        is_weight = isinstance(tensor, nn.Parameter) or (tensor._is_view() and isinstance(tensor._base, nn.Parameter))
        if not is_weight and storage._cdata not in self._shared:
            self.kept[storage._cdata] = storage.nbytes()  # alive, by the graph, while others are kept
        return tensor

    @property
    def kept_bytes(self) -> int:
        """Returns the bytes of what was kept for the backward, each storage once."""
        return sum(self.kept.values())

    def note(self, operator: Operator) -> None:
        """Notes an operator, under the present phase, that torch does not see as one."""
        self._found.setdefault(self.phase, []).append(operator)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.last = str(func)
        result = func(*args, **kwargs)
        self.live.see(result)
        found = operator_of(func, args, kwargs, result)
        if found is not None:
            self.note(found)
        return result


def operator_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operator | None:
    """Returns what one call of torch's operator `func` multiplies and moves; None for one that does neither, such as a view.

    result: what the call returned. What is written in place counts where nothing is returned; a look-up reads as much of its
    table as it writes.
    """
    packet = func._overloadpacket
    if func.namespace in QUESTIONS or packet in FREE or getattr(func, "is_view", False) or func is aten.detach.default:
        return None
    if packet is ATTENTION:
        query, key, value = args[:3]
        return attention(query, key, value, result[0], is_causal=len(args) > 4 and args[4])  # a default may be left out
    if func.namespace == DOCUMENTS:
        return _over_documents(func, args, kwargs, result)
    given = _tensors((args, kwargs))
    made = _tensors(result)
    if packet in LOOK_UPS:
        table, *given = given
        given += made if table.numel() else ()
    made += _written(func, args, kwargs)
    num_bytes = sum(map(moved_bytes, given)) + sum(map(moved_bytes, made))
    formula: Callable[..., int] | None = flop_registry.get(packet) or flop_registry.get(_out_of_place(packet))
    if formula is None:
        return Operator(str(packet), num_bytes)
    dtype = next((NAMES[one.dtype] for one in given if one.dtype in NAMES), "fp32")
    return Operator(str(packet), num_bytes, int(formula(*args, **kwargs, out_val=result)), dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, context: Tensor, *, is_causal: bool) -> Operator:
    """Returns an attention as the one operator "attention": it reads queries, keys and values and writes the context; with
    `is_causal` it multiplies half.
    """
    grouped = (*query.shape[:-2], *key.shape[-2:])  # each key serves the queries of its group
    of_values = *grouped[:-1], value.shape[-1]
    flops = sdpa_flop_count(query.shape, grouped, of_values) // (2 if is_causal else 1)  # type: ignore[no-untyped-call]
    num_bytes = sum(map(moved_bytes, (query, key, value, context)))
    return Operator("attention", num_bytes, flops, NAMES.get(query.dtype, "fp32"))


def _over_documents(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operator:
    """Returns an attention over documents, [positions, heads, d], or its backward, as the one operator "attention". Lengths of
    documents are not known: it counts all pairs of positions within the longest that there may be, as where a layer with a mask
    of documents is traced.
    """
    named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    query, longest = named["query"], named["max_q"]
    positions, heads, width = query.shape
    rows = max(1, positions // longest), heads, longest
    flops = sdpa_flop_count((*rows, width), (*rows, width), (*rows, named["value"].shape[-1]))  # type: ignore[no-untyped-call]
    num_bytes = sum(map(moved_bytes, _tensors((args, kwargs)))) + sum(map(moved_bytes, _tensors(result)))
    factor = OF_BACKWARD if "grad_out" in named else 1
    return Operator("attention", num_bytes, int(flops * factor), NAMES.get(query.dtype, "fp32"))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operator writes in place, if it returns nothing, as updates of many tensors at once do; else
    none.
    """
    if func._schema.returns:
        return []
    named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    places = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    if named.get("grad_scale") is None:
        places = [name for name in places if name != "grads"]  # a fused optimizer writes gradients that it scales
    return _tensors([named.get(name) for name in places])


def _out_of_place(packet: Any) -> Any:
    """Returns the operator that an in-place one (`addmm_`) is named after (`addmm`), of which torch has a formula of FLOPs;
    None for others.
    """
    name = str(packet).removeprefix("aten.")
    return getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None


def moved_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor that lie in memory: what is expanded lies there once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
