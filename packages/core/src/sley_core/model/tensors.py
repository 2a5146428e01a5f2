"""A model's tensors: their dtypes in a run, their memory as bytes, and the tensors that a layer refers to.

A run replaces the parameters that modules register by others in new memory. One `nn.Parameter` in several modules stays one. A
view of it, or a list or function that refers to it, would keep the old values, without an error. No module lists such places:
attributes, lists, functions, classes and hooks are searched, and named by the attribute that led to them.
"""

from __future__ import annotations

import gc
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sley_core.comm.copies import storage_id
from sley_core.errors import PlanError

CHUNK_WORDS = 1 << 20
"""How many words of 8 bytes are hashed at a time: the working memory is a few times that."""

_ODD = 2654435761


def version_of(tensor: Tensor) -> int:
    """Returns the tensor's version counter, which counts writes; 0 for a tensor of torch's inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def sum_of_bits(tensor: Tensor) -> Tensor | None:
    """Returns the `fingerprint`, which shows writes that no version counter counts; None for no plain memory."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    with torch.inference_mode(False), torch.no_grad():
        return fingerprint(tensor.detach())


def fingerprint(value: Tensor) -> Tensor:
    """Returns a hash of values and places, int64 [] on the device, that differs for almost all different values."""
    data = value.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].clone().view(torch.int64) if data.data_ptr() % 8 else data[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, words.numel(), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        places = torch.arange(start + 1, start + 1 + chunk.numel(), device=value.device)
        total += ((chunk + 1) * (places * _ODD | 1)).sum()
    rest = data[whole:].to(torch.int64)
    return total + ((rest + 1) * (torch.arange(1, 1 + rest.numel(), device=value.device) * _ODD | 1)).sum()


def checksum(value: Tensor) -> int:
    """Returns the CRC-32 of the bytes of `value`."""
    return crc32(value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)


def keeps_fp32(name: str, keep: Sequence[str]) -> bool:
    """Returns whether the parameter `name` keeps fp32. keep: `[precision] keep`, patterns of names."""
    return any(fnmatchcase(name, pattern) for pattern in keep)


def parameter_format(name: str, dtype: torch.dtype, keep: Sequence[str]) -> torch.dtype:
    """Returns the dtype of a parameter where those that are not kept have `dtype`."""
    return torch.promote_types(dtype, torch.float32) if keeps_fp32(name, keep) else dtype


def buffer_format(buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a buffer beside parameters in `dtype`: its own, but fp64 in place of fp32 beside fp64."""
    return dtype if dtype is torch.float64 and buffer.dtype is torch.float32 else buffer.dtype


def formats_hint(error: BaseException) -> str:
    """Returns what to do about an error of torch's that formats do not meet; "" for any other error."""
    if not isinstance(error, RuntimeError) or not re.search(r"dtype|scalar type", str(error)):
        return ""
    return (
        'under [precision] compute = "bf16" or "fp16" parameters become narrow and buffers keep their format: let the forward '
        "cast what a buffer gives (`self.table.to(h.dtype)`), or name parameters that stay in fp32 in `[precision] keep`"
    )


T = TypeVar("T")

PLAIN: set[type] = {Tensor}
"""The types of plain tensors. While bytes are estimated it includes fake tensors, which stand for plain ones."""

_stands_for: ContextVar[str | None] = ContextVar("_stands_for", default=None)
_counters: list[Callable[[], int]] = []


def is_plain(tensor: object) -> bool:
    """Returns whether `tensor` is a plain tensor: neither a parameter nor of a subclass with behaviour of its own."""
    return type(tensor) in PLAIN


def device_kind(tensor: Tensor) -> str:
    """Returns the type of the device on which a run computes with `tensor`, as "cpu": its own, or the one it stands for."""
    return _stands_for.get() or tensor.device.type


@contextmanager
def assume_device_type(kind: str) -> Iterator[None]:
    """Within the block all tensors of this thread stand for some of a device of this type."""
    before = _stands_for.set(kind)
    try:
        yield
    finally:
        _stands_for.reset(before)


def alike(pieces: Iterable[T]) -> Iterator[T]:
    """Yields `pieces`, each of which runs the same operations on the same shapes; the last may be smaller. While bytes are
    estimated (`counted`), stops once a piece leaves as many bytes in use as the one before.
    """
    before = None
    for piece in pieces:
        yield piece
        if _counters:
            now = _counters[-1]()
            if now == before:
                return
            before = now


@contextmanager
def counted(in_use: Callable[[], int]) -> Iterator[None]:
    """Returns a context manager in which bytes are estimated, and nothing else. in_use: returns the bytes in use."""
    _counters.append(in_use)
    try:
        yield
    finally:
        _counters.pop()


MOST = 100_000
"""How many objects are searched behind one attribute; the limit is for attributes such as a tokenizer or a dataset."""

_META_BITS = 64
"""The number of bits by which imagined addresses on meta are shifted above real ones, and apart from each other."""

_REGISTERED = {"_parameters", "_buffers", "_modules"}
_ENDS: tuple[type, ...] = (str, bytes, int, float, complex, type, ModuleType, BuiltinFunctionType, CodeType, FrameType)
_ENDS += (torch.dtype, torch.device, torch.Generator, type(None))
_EMPTY = (dict, OrderedDict)


class HeldTensor(NamedTuple):
    """A tensor to which a layer refers, by the attribute `where`. in_module: it is a parameter of no layer's module."""

    where: str
    tensor: Tensor
    in_module: bool


def held_tensors(name: str, layer: nn.Module, registered: set[int]) -> Iterator[HeldTensor]:
    """Yields the tensors to which the layer `name` refers, each under the first place that leads to it.

    registered: ids of the modules of all layers, into which the search does not go.
    """
    seen: set[int] = set()
    for where, root in _roots(name, layer):
        if issubclass(type(root), _ENDS) or (type(root) in _EMPTY and not root):
            continue  # fast path for most attributes: flags, names, and empty dicts of hooks
        yield from _reachable_tensors(where, root, seen, registered)


def check_held(
    modules: Mapping[str, nn.Module], twin: Callable[[Tensor], Tensor | None] = lambda _: None
) -> dict[str, list[HeldTensor]]:
    """Returns, by name of the layer, the tensors to which the layers `modules` refer and that must not be read: those with an
    autograd graph, which leads to other tensors than the run's, and parameters of layers in modules of no layer.

    Raises PlanError "model-init" with the attribute, for a parameter to which something else than a module refers, and for two
    tensors that share memory, one of them a registered parameter that is trained. twin: returns the parameter on meta that was
    registered in place of a real one.
    """
    registered = {id(one) for module in modules.values() for one in module.modules()}
    known = {id(tensor): (name, tensor) for name, tensor in reversed(list(_registered(modules)))}
    named = {key: _Span(*_span(tensor), name, tensor, True) for key, (name, tensor) in reversed(known.items())}
    unreadable: dict[str, list[HeldTensor]] = {}
    for layer, module in modules.items():
        for entry in held_tensors(layer, module, registered):
            other = twin(entry.tensor)
            name, tensor = known.get(id(entry.tensor if other is None else other), ("", entry.tensor))
            is_parameter = bool(name) and isinstance(tensor, nn.Parameter)
            if is_parameter and (other is not None or not entry.in_module):
                raise _kept(entry.where, name)
            if is_parameter or tensor.grad_fn is not None:
                unreadable.setdefault(layer, []).append(entry)
            if not is_traceable_wrapper_subclass(tensor) and tensor.layout is torch.strided:
                named.setdefault(id(tensor), _Span(*_span(tensor), entry.where, tensor, False))
    _check_memory(span for span in named.values() if span.end)
    return unreadable


def _registered(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for layer, module in modules.items():
        for kind in (module.named_parameters, module.named_buffers):
            for name, tensor in kind(layer):
                if not is_lazy(tensor) and not is_traceable_wrapper_subclass(tensor) and tensor.layout is torch.strided:
                    yield name, tensor


class _Span(NamedTuple):
    """The addresses of a tensor's first byte and of the byte after its last, and whether a module registers it."""

    start: int
    end: int
    name: str
    tensor: Tensor
    is_registered: bool

    @property
    def is_trained(self) -> bool:
        return self.is_registered and isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad


def _check_memory(spans: Iterable[_Span]) -> None:
    """Raises PlanError "model-init" for two tensors that share memory, one of them a parameter that is trained."""
    before: list[_Span] = []
    for one in sorted(spans, key=lambda span: span.start):
        before = [other for other in before if other.end > one.start]
        for other in before:
            if (one.is_trained or other.is_trained) and overlap(one.tensor, other.tensor):
                raise _shared(other, one)
        before.append(one)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have a byte in common; interleaved columns of one matrix do not."""
    (start, end), (other_start, other_end) = _span(one), _span(other)
    if max(start, other_start) >= min(end, other_end):
        return False
    first = min(start, other_start)
    marks = torch.zeros(max(end, other_end) - first, dtype=torch.bool, device="cpu")
    _bytes(marks, one, start - first).fill_(True)
    return bool(_bytes(marks, other, other_start - first).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte and of the byte after the last, on meta imagined ones; zeros for no elements."""
    if not tensor.numel():
        return 0, 0
    item = tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    if tensor.is_meta:
        start = (storage_id(tensor) << _META_BITS) + int(tensor.storage_offset()) * item
    return start, start + (last + 1) * item


def _bytes(marks: Tensor, tensor: Tensor, at: int) -> Tensor:
    item = tensor.element_size()
    return marks.as_strided((*tensor.shape, item), (*(stride * item for stride in tensor.stride()), 1), at)


def _shared(one: _Span, other: _Span) -> PlanError:
    """Returns the error for two tensors that share memory, one of them a parameter that is trained."""
    kinds = ["parameter" if isinstance(each.tensor, nn.Parameter) else "buffer" for each in (one, other)]
    if not (one.is_registered and other.is_registered):
        plain, parameter = (other, one) if one.is_registered else (one, other)
        message = f"`{plain.name}` shares its memory with the parameter {parameter.name!r}, and would not follow its training"
        return PlanError("model-init", message, path=("model",), hint="`.clone()` it, or compute it in the forward")
    if kinds == ["parameter", "parameter"]:
        message = f"the parameters {one.name!r} and {other.name!r} share their memory, but are two parameters"
        hint = "tie them by giving both modules one and the same nn.Parameter, or `.clone()` one of them"
    else:
        message = f"the {kinds[0]} {one.name!r} and the {kinds[1]} {other.name!r} share their memory"
        hint = "`.clone()` the buffer, or compute it in the forward"
    return PlanError("model-init", message, path=("model",), hint=hint)


def _kept(where: str, name: str) -> PlanError:
    """Returns the error for a parameter to which something other than a module refers."""
    message = f"`{where}` holds the parameter {name!r}, but not as a module's parameter: a run would train another tensor"
    hint = "let the forward ask the module that holds it (`self.linear.weight`), or give it to this module as well: a tie"
    return PlanError("model-init", message, path=("model",), hint=hint)


def _roots(name: str, layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the places to search, with their names: module and parameter attributes, hooks, and class attributes."""
    kinds: dict[type, None] = {}
    for prefix, module in layer.named_modules(prefix=name):
        for name, value in vars(module).items():
            # What torch itself updates when a parameter is replaced, or before each forward, cannot be stale.
            is_updated = (isinstance(module, nn.RNNBase) and name == "_flat_weights") or f"{name}_orig" in module._parameters
            if name not in _REGISTERED and not is_updated:
                yield f"{prefix}.{name}", value
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}.register_hook", parameter._backward_hooks
                yield f"{prefix}.{name}", parameter.__dict__
        kinds.update(dict.fromkeys(type(module).__mro__))
    for kind in kinds:
        if not _is_from_torch(kind):
            for name, value in list(vars(kind).items()):
                if name == "__init__":
                    continue  # its globals, such as a registry of instances, are not needed by any forward
                yield f"{kind.__name__}.{name}", value


def _is_from_torch(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).partition(".")[0] in ("torch", "builtins")


def _reachable_tensors(where: str, root: Any, seen: set[int], registered: set[int]) -> Iterator[HeldTensor]:
    """Yields the tensors reachable from `root` through at most `MOST` objects."""
    ahead = [root]
    looked_at = 0
    while ahead and looked_at < MOST:
        one = ahead.pop()
        kind = type(one)
        if issubclass(kind, _ENDS) or id(one) in seen:
            continue
        seen.add(id(one))
        looked_at += 1
        if issubclass(kind, Tensor):
            yield HeldTensor(where, one, False)
        elif issubclass(kind, nn.Module):
            if id(one) not in registered:
                yield from (HeldTensor(where, each, True) for each in one._parameters.values() if each is not None)
                ahead += [value for name, value in vars(one).items() if name != "_parameters"]
        elif issubclass(kind, FunctionType):
            if not _is_from_torch(one):
                ahead += _function_values(one)
        else:
            ahead += gc.get_referents(one)


def _function_values(function: FunctionType) -> list[Any]:
    """Returns what a function closes over, its defaults, and the tensors, containers and functions it uses as globals."""
    values = [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, function.__dict__]
    known = (function.__globals__.get(name) for name in function.__code__.co_names)
    return values + [one for one in known if isinstance(one, Tensor | list | tuple | dict | set | FunctionType)]
