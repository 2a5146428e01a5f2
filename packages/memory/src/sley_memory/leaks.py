"""Finds tensors that have memory on the device, and names them by the way that leads there from the run.

A program sees a tensor by its path: `layers[0].module.cache`. So the search goes forward, from the run's layers, then from its
other objects, then from all modules and the local variables of running functions, and ends at the first way to each tensor,
which is the shortest.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from sley_core.api.memory import Part, is_host_memory, storage_id

PLAIN = (str, bytes, int, float, complex, bool, type(None), type, CodeType)
"""Types whose objects hold nothing, or lead everywhere."""

OTHERS = sys.stdlib_module_names | {"numpy", "sympy", "torch"}
"""Packages of a hundred thousand objects, of which none is the user's."""

NO_PATH = "held by something that is not Python's"

RETRY_S = (0.1, 0.5, 2.0)


class Leak(NamedTuple):
    """A storage with memory on the device: its bytes, dtype and shape of a tensor in it, and how that is reached."""

    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.path}: {dtype} {list(self.shape)}, {self.num_bytes / 2**20:.2f} MiB"


def find_leaks(run: Any, min_bytes: int = 4096) -> list[Leak]:
    """Returns what has memory on the run's device now and belongs to no part of the run, the largest first: after an offload,
    tensors that a model, a hook or the program itself has kept. Storages of fewer than `min_bytes` are left out.

    Collects Python's garbage first, and takes a second or so. Tensors that only autograd's graph holds are not seen. On a CPU
    the host's own tensors, such as the data's, are among them. run: the assembled `Run`.
    """
    run.memory.settle()
    leaks: list[Leak] = []
    # A thread of a communication backend may hold a tensor for a moment after its collective has ended: look again.
    for pause_s in (0.0, *RETRY_S):
        time.sleep(pause_s)
        leaks = _leaks(run, min_bytes)
        if not any(leak.path == NO_PATH for leak in leaks):
            break
    return leaks


def _leaks(run: Any, min_bytes: int) -> list[Leak]:
    """Returns what `find_leaks` does, of this moment."""
    inventory = run.memory.inventory
    # By address: memory may have a second storage, which begins where the tensor does (`Device.again`).
    tensors = [
        tensor for part in get_args(Part) for _, tensor in inventory.everything(part) if tensor.device == inventory.device
    ]
    places = {address for tensor in tensors if _address(tensor) for address in (_address(tensor), tensor.data_ptr())}
    gc.collect()
    # tensors of a subclass, such as stand-ins of sharded weights, may refuse to be asked
    with torch._C.DisableTorchFunctionSubclass():
        tensors_left = {
            id(one): one
            for one in gc.get_objects()
            # by type: `isinstance` would ask objects that pretend, such as lazy modules, what they are
            if issubclass(type(one), Tensor) and one.device == inventory.device and (address := _address(one))
            if address not in places and one.untyped_storage().nbytes() >= min_bytes and not is_host_memory(one)
        }
        paths = _paths(tensors_left, dict(_roots(run)))
        best: dict[int, Leak] = {}
        # those with a path first, the shortest first: a view may be reached where the tensor that it is of is not
        for key, tensor in sorted(tensors_left.items(), key=lambda pair: (pair[0] not in paths, len(paths.get(pair[0], "")))):
            path = paths.get(key, NO_PATH)
            leak = Leak(tensor.untyped_storage().nbytes(), tensor.dtype, tuple(tensor.shape), path)
            best.setdefault(storage_id(tensor), leak)
    return sorted(best.values(), key=lambda leak: (-leak.num_bytes, leak.path))


def _roots(run: Any) -> Iterator[tuple[str, object]]:
    """Yields objects of the run that hold tensors, by names that a user knows: layers, handlers, optimizer, store, stepper."""
    yield from ((f"layers[{at}].module", layer.module) for at, layer in enumerate(run.layers))
    yield from ((f"handlers[{at}]", handler) for at, handler in enumerate(run.stepper.handlers))
    yield "optimizer", run.stepper.update.optimizer
    yield "store", run.store
    yield "stepper", run.stepper


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 for none, as of sparse or fake tensors, stand-ins, and within `vmap`."""
    try:
        storage = tensor.untyped_storage()
        # by the storage's own device, whatever the tensor says
        return 0 if storage.device.type == "meta" else storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _paths(targets: Mapping[int, Tensor], roots: Mapping[str, object]) -> dict[int, str]:
    """Returns a path to each of `targets`, by id, as far as there is one: first from `roots`, then through functions and hooks,
    then from all modules and running functions.
    """
    paths: dict[int, str] = {}
    hidden: dict[int, object] = {id(one): one for one in (targets, paths)}  # our own
    for stage, is_far in ((roots.items(), False), (roots.items(), True), (_everywhere(), True)):
        seen = dict(hidden)  # with the objects: an id may be another's once its object is gone
        todo = deque((name, one) for name, one in stage)
        while todo and len(paths) < len(targets):
            path, one = todo.popleft()
            if id(one) in seen or issubclass(type(one), PLAIN):
                continue
            seen[id(one)] = one
            if id(one) in targets:
                paths.setdefault(id(one), path)
            todo.extend((path + step, child) for step, child in _children(one, is_far=is_far))
    return paths


def _everywhere() -> Iterator[tuple[str, object]]:
    """Yields with their paths the contents of all modules but torch's and Python's, and all running functions' variables."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in OTHERS:
            continue
        for key, value in _items(_get(module, "__dict__")):
            yield f"{name}.{key}", value
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_globals.get("__name__") != __name__:
                for key, value in list(frame.f_locals.items()):
                    yield f"{key} in {frame.f_code.co_qualname}()", value
            frame = frame.f_back


def _children(one: Any, *, is_far: bool) -> Iterator[tuple[str, object]]:
    """Yields the objects that `one` refers to, each with the step that is added to the path. is_far: also through functions and
    hooks, which lead to the whole run.
    """
    kind = type(one)  # not `isinstance`: some objects pretend to be of another class, or warn when they are asked
    if issubclass(kind, dict):
        yield from ((f"[{key!r}]" if issubclass(type(key), PLAIN) else f"[{_name(key)}]", value) for key, value in _items(one))
        if kind is not dict:
            yield from _attributes(one)
    elif issubclass(kind, list | tuple | deque):
        yield from ((f"[{at}]", value) for at, value in enumerate(list(one)))
    elif issubclass(kind, set | frozenset):
        yield from ((f"{{{_name(value)}}}", value) for value in list(one))
    elif issubclass(kind, nn.Module):
        for key, value in _items(_get(one, "__dict__")):
            if key in ("_parameters", "_buffers", "_modules"):
                yield from ((f".{name}", child) for name, child in _items(value))
            elif is_far or not str(key).endswith("_hooks"):
                yield f".{key}", value
    elif issubclass(kind, FunctionType | MethodType | partial):
        if is_far and issubclass(kind, MethodType):
            yield "", one.__self__
        elif is_far and issubclass(kind, partial):
            yield from ((".args", one.args), (".keywords", one.keywords), (".func", one.func))
        elif is_far:
            for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=False):
                with suppress(ValueError):  # a variable that has no value yet
                    yield f"({name})", cell.cell_contents
    elif not issubclass(kind, ModuleType):
        yield from _attributes(one)
        # Iterators and containers written in C have no attributes.
        has_names = _get(one, "__dict__") is not None or any(_slots(base) for base in kind.__mro__)
        if not has_names and not issubclass(kind, Tensor):
            children = [child for child in gc.get_referents(one) if not issubclass(type(child), FrameType)]
            yield from ((" > " + _name(child), child) for child in children)


def _attributes(one: object) -> Iterator[tuple[str, object]]:
    """Yields the attributes of an object, in slots and in its dict, with steps of the path; and the gradient of a leaf."""
    names = [name for kind in type(one).__mro__ for name in _slots(kind)]
    yield from ((f".{name}", _get(one, name)) for name in names if not name.startswith("__"))
    yield from ((f".{key}", value) for key, value in _items(_get(one, "__dict__")))
    if issubclass(type(one), Tensor):
        yield ".grad", _get(one, "grad") if _get(one, "is_leaf") else None


def _get(one: object, name: str) -> Any:
    """Returns an attribute without calling code of its class that looks for attributes; None if it is not there."""
    try:
        return object.__getattribute__(one, name)
    except (AttributeError, RuntimeError):
        return None


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _items(mapping: Any) -> list[tuple[object, object]]:
    return list(dict.items(mapping)) if issubclass(type(mapping), dict) else []


def _name(one: object) -> str:
    """Returns how a path names an object: its attribute `name` if that is a text, else its class."""
    name: object = (_get(one, "__dict__") or {}).get("name")
    return name if isinstance(name, str) else type(one).__name__
