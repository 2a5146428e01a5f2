"""Finds tensors that have memory on the device, and names them by the way that leads there from the run.

What a program sees of a tensor is its path: `layers[0].module.cache`. So the search goes forward, from the run's layers,
then from its other objects, then from all modules and the local variables of running functions, and ends at the first
way to each tensor, which is the shortest.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from sley_core.comm.copies import is_host_memory
from sley_core.memory.holdings import storage_id

if TYPE_CHECKING:
    from types import CellType

PLAIN = (str, bytes, int, float, complex, bool, type(None), type, CodeType)
"""What holds nothing, or leads everywhere."""


class Leak(NamedTuple):
    """A storage with memory on the device: its bytes, dtype and shape of a tensor in it, and how that is reached."""

    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.path}: {dtype} {list(self.shape)}, {self.num_bytes / 2**20:.2f} MiB"


def find_leaks(device: torch.device, known: set[int], roots: Mapping[str, object], min_bytes: int) -> list[Leak]:
    """Returns the storages on `device` of at least `min_bytes` that are not `known`, by `storage_id`, the largest first.

    roots: objects by name; paths from the first ones are preferred.
    """
    gc.collect()
    found = {id(tensor): tensor for tensor in _tensors(device, min_bytes) if storage_id(tensor) not in known}
    paths = _paths(found, roots)
    best: dict[int, Leak] = {}
    for key, tensor in found.items():
        num_bytes, path = tensor.untyped_storage().nbytes(), paths.get(key, "held by something that is not Python's")
        leak = Leak(num_bytes, tensor.dtype, tuple(tensor.shape), path)
        before = best.get(storage_id(tensor))
        if before is None or len(path) < len(before.path):
            best[storage_id(tensor)] = leak
    return sorted(best.values(), key=lambda leak: (-leak.num_bytes, leak.path))


def _tensors(device: torch.device, min_bytes: int) -> Iterator[Tensor]:
    """Yields all tensors that Python knows, on `device`, with a storage of at least `min_bytes`."""
    for one in gc.get_objects():
        # by type: `isinstance` would ask objects that pretend, such as lazy modules, what they are
        is_large = issubclass(type(one), Tensor) and one.device == device and _num_bytes(one) >= max(1, min_bytes)
        if is_large and not is_host_memory(one):
            yield one


def _num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the storage; 0 where there is none, as of sparse tensors and those within a `vmap`."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0


def _paths(wanted: Mapping[int, Tensor], roots: Mapping[str, object]) -> dict[int, str]:
    """Returns a path to each of `wanted`, by id, as far as there is one."""
    found: dict[int, str] = {}
    hidden = {id(wanted), id(found)}  # our own
    for stage, is_far in ((roots.items(), False), (roots.items(), True), (_everywhere(), True)):
        seen = set(hidden)
        todo = deque((name, one) for name, one in stage)
        while todo and len(found) < len(wanted):
            path, one = todo.popleft()
            if id(one) in seen or isinstance(one, PLAIN):
                continue
            seen.add(id(one))
            if id(one) in wanted:
                found.setdefault(id(one), path)
            todo.extend((path + step, child) for step, child in _children(one, is_far=is_far))
    return found


def _everywhere() -> Iterator[tuple[str, object]]:
    """Yields the contents of all modules, and the local variables of all functions that run."""
    for name, module in list(sys.modules.items()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            yield f"{name}.{key}", value
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_globals.get("__name__") != __name__:
                for key, value in list(frame.f_locals.items()):
                    yield f"{key} in {frame.f_code.co_qualname}()", value
            frame = frame.f_back


def _children(one: object, *, is_far: bool) -> Iterable[tuple[str, object]]:
    """Returns what `one` refers to, with what leads there. is_far: also through functions and hooks, which lead to
    the whole run.
    """
    match one:
        case ModuleType():
            return ()
        case dict():
            return [
                (f"[{key!r}]" if isinstance(key, PLAIN) else f"[{_name(key)}]", value) for key, value in _items(one)
            ]
        case list() | tuple() | deque():
            return [(f"[{at}]", value) for at, value in enumerate(one)]
        case set() | frozenset():
            return [(f"{{{_name(value)}}}", value) for value in one]
        case FunctionType() if is_far:
            return [(f"({name})", _content(cell)) for name, cell in _cells(one)]
        case FunctionType():
            return ()
        case MethodType():
            return [("", one.__self__)] if is_far else ()
        case partial():
            return [(".args", one.args), (".keywords", one.keywords), (".func", one.func)] if is_far else ()
        case nn.Module():
            return _of_module(one, is_far=is_far)
    return [*_attributes(one), *((" > " + _name(child), child) for child in _others(one))]


def _of_module(module: nn.Module, *, is_far: bool) -> Iterator[tuple[str, object]]:
    for key, value in _items(vars(module)):
        if key in ("_parameters", "_buffers", "_modules") and isinstance(value, dict):
            yield from ((f".{name}", child) for name, child in _items(value))
        elif is_far or not str(key).endswith("_hooks"):
            yield f".{key}", value


def _attributes(one: object) -> Iterator[tuple[str, object]]:
    names = [name for kind in type(one).__mro__ for name in _slots(kind)]
    yield from ((f".{name}", getattr(one, name, None)) for name in names if not name.startswith("__"))
    yield from ((f".{key}", value) for key, value in _items(getattr(one, "__dict__", {})))
    if isinstance(one, Tensor) and one.is_leaf and one.grad is not None:
        yield ".grad", one.grad


def _others(one: object) -> list[object]:
    """What an object without attributes refers to: iterators, containers written in C."""
    if isinstance(one, Tensor) or hasattr(one, "__dict__") or any(_slots(kind) for kind in type(one).__mro__):
        return []
    return [child for child in gc.get_referents(one) if not isinstance(child, FrameType)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _items(mapping: object) -> list[tuple[object, object]]:
    return list(mapping.items()) if isinstance(mapping, dict) else []


def _cells(function: FunctionType) -> list[tuple[str, CellType]]:
    return list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None


def _name(one: object) -> str:
    """What a path calls an object without a name of its own."""
    name = getattr(one, "__dict__", {}).get("name")
    return name if isinstance(name, str) else type(one).__name__
