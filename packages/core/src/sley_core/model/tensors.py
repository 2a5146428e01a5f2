"""The tensors of a model: their dtypes in a run, hashes of their values, and the tensors to which a layer refers.

A run replaces registered parameters by parameters in new memory. A view of a parameter, or a list or function that refers to
it, would silently keep the old values. So this module searches the attributes, lists, functions, classes and hooks of a layer
for tensors.
"""

import gc
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from fnmatch import fnmatchcase
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sley_core.comm.device import storage_id
from sley_core.errors import PlanError

CHUNK_WORDS = 1 << 20
"""The number of 8-byte words that `fingerprint` hashes at a time. Its scratch memory is a few times as large."""

_FACTORS = (0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D)  # arbitrary odd numbers, which mix the bits of positions
_LOW_BITS = 0xFFFFFFFF  # the lower half of an 8-byte word


def shares_storage(tensor: Tensor) -> bool:
    """Returns whether another tensor has the storage of `tensor`; False for a sparse tensor."""
    if tensor.layout is not torch.strided:
        return False
    # One use is by `tensor`, and one by the storage object that reads the count.
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2)


def version_of(tensor: Tensor) -> int:
    """Returns the tensor's version counter, which counts writes, or 0 if it is an inference tensor, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


def sum_of_bits(tensor: Tensor) -> Tensor | None:
    """Returns `fingerprint(tensor)`, or None if `tensor` is not a plain strided tensor with memory."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    with torch.inference_mode(False), torch.no_grad():
        return fingerprint(tensor.detach())


def flat_bytes(value: Tensor) -> Tensor:
    """Returns the bytes of `value`, uint8 [bytes]. The result shares the memory of `value` if `value` is contiguous."""
    flat = value.detach().contiguous().reshape(-1)
    # A tensor of one element is contiguous with any stride, but only one with stride 1 can be viewed as another dtype.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def fingerprint(value: Tensor) -> Tensor:
    """Returns a hash of the bytes of `value`, an int64 scalar on its device. Two values collide with a probability of 2^-32."""
    data = flat_bytes(value)
    num_word_bytes = data.numel() // 8 * 8
    word_data, tail = data[:num_word_bytes], data[num_word_bytes:].to(torch.int64)
    is_aligned = not (data.data_ptr() % 8 or data.storage_offset() % 8)  # an empty tensor's pointer is 0
    words = (word_data if is_aligned else word_data.clone()).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, words.numel(), CHUNK_WORDS):
        total += _weighted_sum(words[start : start + CHUNK_WORDS], start)
    return total + _weighted_sum(tail, 0) if len(tail) else total


def _weighted_sum(words: Tensor, start: int) -> Tensor:
    """Returns the sum of `words`, int64 [n], each multiplied by an odd pseudorandom factor for its position from `start` on.
    The upper half of a word also changes its lower half; otherwise two words that differ in a sign could swap unnoticed.
    """
    factors = torch.arange(start + 1, start + 1 + words.numel(), device=words.device) * _FACTORS[0]
    factors = (factors ^ (factors >> 29)) * _FACTORS[1] | 1
    return (((words ^ (words >> 32 & _LOW_BITS)) + 1) * factors).sum()


def checksum(value: Tensor) -> int:
    """Returns the CRC-32 of the bytes of `value`."""
    return crc32(flat_bytes(value.cpu()).numpy().data)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether `name` matches one of `patterns`, in which `*` matches any text, including dots."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def select_parameter_dtype(name: str, dtype: torch.dtype, keep: Sequence[str]) -> torch.dtype:
    """Returns the dtype of the parameter `name`: `dtype`, or at least fp32 if the name matches one of the patterns `keep`."""
    return torch.promote_types(dtype, torch.float32) if matches_any(name, keep) else dtype


def select_buffer_dtype(buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of `buffer` in a run: its own dtype, or fp64 if it is fp32 and parameters have `dtype` fp64."""
    return dtype if dtype is torch.float64 and buffer.dtype is torch.float32 else buffer.dtype


def dtype_hint(error: BaseException) -> str:
    """Returns a hint if `error` is a torch error about dtypes that do not match; "" for other errors."""
    if not isinstance(error, RuntimeError) or not re.search(r"dtype|scalar type", str(error)):
        return ""
    return (
        'with [precision] compute = "bf16" or "fp16" only parameters become narrow, not buffers: cast a buffer in the '
        "forward (`self.table.to(h.dtype)`), or add parameters that must stay in fp32 to `[precision] keep`"
    )


T = TypeVar("T")

PLAIN_TYPES: set[type] = {Tensor}
"""The types of plain tensors. A memory estimate adds the type of fake tensors, which stand for plain tensors."""

_assumed_type: ContextVar[str | None] = ContextVar("_assumed_type", default=None)
_byte_counters: list[Callable[[], int]] = []


def is_plain(tensor: object) -> bool:
    """Returns whether `tensor` is a plain tensor: neither a parameter nor an instance of another subclass."""
    return type(tensor) in PLAIN_TYPES


def device_kind(tensor: Tensor) -> str:
    """Returns the type of the tensor's device, such as "cpu"; within `assume_device_type`, the assumed type."""
    assumed = None if torch.compiler.is_compiling() else _assumed_type.get()  # a context variable would break the graph
    return assumed or tensor.device.type


@contextmanager
def assume_device_type(device_type: str) -> Iterator[None]:
    """Makes `device_kind` return `device_type` for all tensors in this thread, within the block."""
    token = _assumed_type.set(device_type)
    try:
        yield
    finally:
        _assumed_type.reset(token)


def run_uncompiled() -> AbstractContextManager[object]:
    """Returns a context in which functions that the model compiles with torch.compile run without it, since the compiler fails
    on tensors without values. Does not import the compiler.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def uniform_items(items: Iterable[T]) -> Iterator[T]:
    """Yields `items`. For each item the caller must run the same operations on the same shapes; the last item may be smaller.
    Within `estimate_bytes`, stops once two consecutive items leave the same number of bytes in use, as all later items would.
    """
    last_bytes = None
    for item in items:
        yield item
        if _byte_counters:
            num_bytes = _byte_counters[-1]()
            if num_bytes == last_bytes:
                return
            last_bytes = num_bytes


@contextmanager
def estimate_bytes(count_bytes: Callable[[], int]) -> Iterator[None]:
    """Lets `uniform_items` stop early within the block, which only estimates memory. count_bytes: returns the memory in use."""
    _byte_counters.append(count_bytes)
    try:
        yield
    finally:
        _byte_counters.pop()


MAX_OBJECTS = 100_000
"""The largest number of objects that a search from one attribute visits. An attribute may be a tokenizer or a dataset."""

_META_ADDRESS_SHIFT = 64
"""The number of bits by which imaginary addresses of meta tensors are shifted, so that they do not overlap real addresses."""

_REGISTRIES = {"_parameters", "_buffers", "_modules"}  # attributes of modules whose tensors follow a replacement
_LEAF_TYPES: tuple[type, ...] = (str, bytes, int, float, complex, type, ModuleType, BuiltinFunctionType, CodeType, FrameType)
_LEAF_TYPES += (torch.dtype, torch.device, torch.Generator, type(None))
"""The types of objects that a search for tensors does not enter."""
_CONTAINER_TYPES = (dict, OrderedDict)  # a search skips empty ones at once


class ReferencedTensor(NamedTuple):
    """A tensor reachable from `attribute` of a layer. is_in_module: whether a module outside all layers registers it."""

    attribute: str
    tensor: Tensor
    is_in_module: bool


def referenced_tensors(name: str, layer: nn.Module, layer_modules: set[int]) -> Iterator[ReferencedTensor]:
    """Yields the tensors that can be reached from attributes of the layer `name`, each with the first such attribute.
    layer_modules: the ids of the modules of all layers, which the search skips.
    """
    visited: set[int] = set()
    for attribute, root in _search_roots(name, layer):
        if issubclass(type(root), _LEAF_TYPES) or (type(root) in _CONTAINER_TYPES and not root):
            continue  # fast path for most attributes: flags, names, and empty dicts of hooks
        yield from _reachable_tensors(attribute, root, visited, layer_modules)


def check_references(
    modules: Mapping[str, nn.Module], replacement: Callable[[Tensor], Tensor | None] = lambda _: None
) -> dict[str, list[ReferencedTensor]]:
    """Returns, by layer name, the tensors that a forward can reach but must not read: tensors with an autograd graph, and
    parameters of layers that a module outside all layers also has. modules: the layers' modules by name. replacement: returns
    the parameter on meta that is registered instead of a real parameter, or None. Raises PlanError "model-init" if an object
    that is not a module refers to a parameter, or if a trained parameter shares memory with another tensor.
    """
    layer_modules = {id(submodule) for module in modules.values() for submodule in module.modules()}
    registered = {id(tensor): (name, tensor) for name, tensor in reversed(list(_registered_tensors(modules)))}
    spans = {key: _Span(*_byte_range(tensor), name, tensor, True) for key, (name, tensor) in reversed(registered.items())}
    unreadable: dict[str, list[ReferencedTensor]] = {}
    for layer, module in modules.items():
        for reference in referenced_tensors(layer, module, layer_modules):
            meta = replacement(reference.tensor)
            key = id(reference.tensor if meta is None else meta)
            name, tensor = registered.get(key, ("", reference.tensor))
            is_parameter = bool(name) and isinstance(tensor, nn.Parameter)
            if is_parameter and (meta is not None or not reference.is_in_module):
                raise PlanError(
                    "model-init",
                    f"`{reference.attribute}` refers to the parameter {name!r}, but does not register it, so "
                    "training would not update the attribute",
                    path=("model",),
                    hint="read the parameter from its module in the forward (`self.linear.weight`), or register it in this "
                    "module too, as a tie",
                )
            if is_parameter or tensor.grad_fn is not None:
                unreadable.setdefault(layer, []).append(reference)
            if not is_traceable_wrapper_subclass(tensor) and tensor.layout is torch.strided:
                spans.setdefault(id(tensor), _Span(*_byte_range(tensor), reference.attribute, tensor, False))
    _check_overlaps(span for span in spans.values() if span.end)
    return unreadable


def _registered_tensors(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the tensor of each plain strided parameter and buffer of the layers `modules`."""
    for layer, module in modules.items():
        for name, tensor in (*module.named_parameters(layer), *module.named_buffers(layer)):
            if not is_lazy(tensor) and not is_traceable_wrapper_subclass(tensor) and tensor.layout is torch.strided:
                yield name, tensor


class _Span(NamedTuple):
    """A tensor and its range of addresses, [start, end). is_registered: whether it is a parameter or buffer of a layer."""

    start: int
    end: int
    name: str
    tensor: Tensor
    is_registered: bool

    @property
    def is_trainable(self) -> bool:
        return self.type == "parameter" and self.tensor.requires_grad

    @property
    def type(self) -> str:
        if not self.is_registered:
            return "attribute"
        return "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"


def _check_overlaps(spans: Iterable[_Span]) -> None:
    """Raises PlanError "model-init" if the memory ranges of a trained parameter and another tensor overlap."""
    active: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        active = [earlier for earlier in active if earlier.end > span.start]
        for earlier in active:
            if span.is_trainable or earlier.is_trainable:
                names = f"the {earlier.type} {earlier.name!r} and the {span.type} {span.name!r}"
                message = f"{names} overlap in memory, but a run needs separate memory for each parameter"
                hint = "`.clone()` one of them, or register the same nn.Parameter in both modules, as a tie"
                raise PlanError("model-init", message, path=("model",), hint=hint)
        active.append(span)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """Returns the half-open range of the tensor's addresses: (0, 0) if it is empty, imaginary addresses if it is on meta."""
    if not tensor.numel():
        return 0, 0
    itemsize = tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    if tensor.is_meta:
        start = (storage_id(tensor) << _META_ADDRESS_SHIFT) + int(tensor.storage_offset()) * itemsize
    return start, start + (last + 1) * itemsize


def _search_roots(name: str, layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of each attribute of the layer's modules and of their classes, except torch's registries."""
    types: dict[type, None] = {}
    for prefix, module in layer.named_modules(prefix=name):
        for attribute, value in vars(module).items():
            # Attributes that torch updates when a parameter is replaced, or before each forward, cannot be stale.
            is_flat_weights = isinstance(module, nn.RNNBase) and attribute == "_flat_weights"
            if attribute not in _REGISTRIES and not is_flat_weights and f"{attribute}_orig" not in module._parameters:
                yield f"{prefix}.{attribute}", value
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{attribute}.register_hook", parameter._backward_hooks
                yield f"{prefix}.{attribute}", parameter.__dict__
        types.update(dict.fromkeys(type(module).__mro__))
    for module_type in (module_type for module_type in types if not _is_from_torch(module_type)):
        for attribute, value in list(vars(module_type).items()):
            if attribute != "__init__":  # no forward needs its globals, such as a registry of instances
                yield f"{module_type.__name__}.{attribute}", value


def _is_from_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("torch", "builtins")


def _reachable_tensors(attribute: str, root: Any, visited: set[int], layer_modules: set[int]) -> Iterator[ReferencedTensor]:
    """Yields the tensors reachable from `root`, the value of `attribute`. Skips objects in `visited`, and adds the others."""
    pending = [root]
    num_visited = 0
    while pending and num_visited < MAX_OBJECTS:
        value = pending.pop()
        value_type = type(value)
        if issubclass(value_type, _LEAF_TYPES) or id(value) in visited:
            continue
        visited.add(id(value))
        num_visited += 1
        if issubclass(value_type, Tensor):
            yield ReferencedTensor(attribute, value, False)
        elif issubclass(value_type, nn.Module):
            if id(value) not in layer_modules:
                parameters = (parameter for parameter in value._parameters.values() if parameter is not None)
                yield from (ReferencedTensor(attribute, parameter, True) for parameter in parameters)
                pending += [item for name, item in vars(value).items() if name != "_parameters"]
        elif issubclass(value_type, FunctionType):
            if not _is_from_torch(value):
                pending += _function_values(value)
        else:
            pending += gc.get_referents(value)


def _function_values(function: FunctionType) -> list[Any]:
    """Returns the closure, defaults and attributes of `function`, and its globals that are tensors, containers or functions."""
    values = [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, function.__dict__]
    global_values = (function.__globals__.get(name) for name in function.__code__.co_names)
    return values + [value for value in global_values if isinstance(value, Tensor | list | tuple | dict | set | FunctionType)]
