"""Finds tensors with memory on the device, and names each by its path from the run, such as `layers[0].module.cache`.

The search is breadth-first, from the run's layers and other objects, and from all modules and the local variables of running
functions. It keeps the first path to each tensor, which is the shortest.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from sley_core.api.comm import HostMemory
from sley_core.api.memory import Part, storage_id

LEAF_TYPES = (str, bytes, int, float, complex, bool, type(None), type, CodeType, FrameType, ModuleType)
"""Types whose objects are not searched."""

SKIPPED_PACKAGES = sys.stdlib_module_names | {"numpy", "sympy", "torch"}
"""Packages that are not searched: they have many objects, and none of the user's."""

NO_PATH = "referenced from outside Python"

RETRY_S = (0.1, 0.5)


class Leak(NamedTuple):
    """A storage with memory on the device: its bytes, and the dtype, shape and path of a tensor in it."""

    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.path}: {dtype} {list(self.shape)}, {self.num_bytes / 2**20:.2f} MiB"


def find_leaks(run: Any, min_bytes: int = 4096) -> list[Leak]:
    """Returns the storages on the run's device that belong to no part of the run, the largest first. After an offload these are
    tensors that the model, a hook or the program keeps.

    Collects Python's garbage first, and takes about a second. Does not find tensors that only autograd's graph references. On a
    CPU the result includes host tensors, such as data. run: the assembled `Run`. min_bytes: the minimum size of a storage.
    """
    run.memory.wait_until_idle()
    leaks: list[Leak] = []
    # A communication thread may keep a tensor for a moment after its collective has ended, so search again.
    for pause_s in (0.0, *RETRY_S):
        time.sleep(pause_s)
        leaks = _find_leaks_now(run, min_bytes)
        if not any(leak.path == NO_PATH for leak in leaks):
            break
    return leaks


def _find_leaks_now(run: Any, min_bytes: int) -> list[Leak]:
    """Returns the result of one search of `find_leaks`."""
    inventory = run.memory.inventory
    # By address: memory may have a second storage, which starts at the tensor (`Device.again`).
    tensors = [
        tensor for part in get_args(Part) for _, tensor in inventory.all_tensors(part) if tensor.device == inventory.device
    ]
    known_addresses = {address for tensor in tensors if _address(tensor) for address in (_address(tensor), tensor.data_ptr())}
    gc.collect()
    # tensor subclasses, such as stand-ins of sharded weights, may raise on attribute access
    with torch._C.DisableTorchFunctionSubclass():
        unknown = {
            id(tensor): tensor
            for tensor in gc.get_objects()
            # by type: `isinstance` would run code of proxies, such as lazy modules
            if issubclass(type(tensor), Tensor) and tensor.device == inventory.device and (address := _address(tensor))
            if address not in known_addresses
            and tensor.untyped_storage().nbytes() >= min_bytes
            and not HostMemory.contains(tensor)
        }
        paths = _find_paths(unknown, chain(_named_roots(run), _global_objects()))
        leaks: dict[int, Leak] = {}
        # the shortest path first: a view may have a path although its base tensor has none
        for key, tensor in sorted(unknown.items(), key=lambda pair: (pair[0] not in paths, len(paths.get(pair[0], "")))):
            path = paths.get(key, NO_PATH)
            leak = Leak(tensor.untyped_storage().nbytes(), tensor.dtype, tuple(tensor.shape), path)
            leaks.setdefault(storage_id(tensor), leak)
    return sorted(leaks.values(), key=lambda leak: (-leak.num_bytes, leak.path))


def _named_roots(run: Any) -> Iterator[tuple[str, object]]:
    """Yields the run's objects that may hold tensors, by public name: layers, handlers, optimizer, store, stepper."""
    yield from ((f"layers[{index}].module", layer.module) for index, layer in enumerate(run.layers))
    yield from ((f"handlers[{index}]", handler) for index, handler in enumerate(run.stepper.handlers))
    yield "optimizer", run.stepper.update.optimizer
    yield "store", run.store
    yield "stepper", run.stepper


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 without a storage, as for sparse, fake or `vmap` tensors."""
    try:
        storage = tensor.untyped_storage()
        # the storage's device may differ from the tensor's
        return 0 if storage.device.type == "meta" else storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _find_paths(targets: Mapping[int, Tensor], roots: Iterable[tuple[str, object]]) -> dict[int, str]:
    """Returns the paths of `targets` by id, searched from `roots`."""
    paths: dict[int, str] = {}
    visited: dict[int, object] = {id(targets): targets}  # keeps the objects alive, since an id may be reused
    queue = deque(roots)
    while queue and len(paths) < len(targets):
        path, value = queue.popleft()
        if id(value) in visited or issubclass(type(value), LEAF_TYPES):
            continue
        visited[id(value)] = value
        if id(value) in targets:
            paths[id(value)] = path
        queue.extend((path + suffix, child) for suffix, child in _children(value))
    return paths


def _global_objects() -> Iterator[tuple[str, object]]:
    """Yields the contents of all modules that are not skipped, and the variables of all running functions, with their paths."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in SKIPPED_PACKAGES:
            continue
        for key, value in _items(_get_raw(module, "__dict__")):
            yield f"{name}.{key}", value
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_globals.get("__name__") != __name__:
                for key, value in list(frame.f_locals.items()):
                    yield f"{key} in {frame.f_code.co_qualname}()", value
            frame = frame.f_back


def _children(obj: Any) -> Iterator[tuple[str, object]]:
    """Yields the objects that `obj` refers to, each with its path suffix."""
    cls = type(obj)  # not `isinstance`: some objects fake their class, or warn
    if issubclass(cls, FunctionType):  # not its module's globals
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            with suppress(ValueError):  # a variable without a value
                yield f"({name})", cell.cell_contents
        return
    attributes = _attributes(obj)
    yield from ((f".{name}", value) for name, value in attributes.items())
    if issubclass(cls, dict):
        for key, value in _items(obj):
            yield f"[{key!r}]" if issubclass(type(key), LEAF_TYPES) else f"[{_object_name(key)}]", value
    elif issubclass(cls, list | tuple | deque):
        yield from ((f"[{index}]", value) for index, value in enumerate(list(obj)))
    elif not attributes and not issubclass(cls, Tensor):  # containers, iterators and methods that are written in C
        yield from ((f" > {_object_name(child)}", child) for child in gc.get_referents(obj))


def _attributes(obj: object) -> dict[object, object]:
    """Returns the attributes of an object by name, from its slots and its dict.

    Includes the parameters, buffers and submodules of a module, and the gradient of a leaf.
    """
    names = [name for cls in type(obj).__mro__ for name in _slots(cls) if not name.startswith("__")]
    attributes: dict[object, object] = {name: _get_raw(obj, name) for name in names}
    attributes.update(_items(_get_raw(obj, "__dict__")))
    if issubclass(type(obj), nn.Module):
        for key in ("_parameters", "_buffers", "_modules"):
            attributes.update(_items(attributes.pop(key, None)))
    if issubclass(type(obj), Tensor) and _get_raw(obj, "is_leaf"):
        attributes["grad"] = _get_raw(obj, "grad")
    return attributes


def _get_raw(obj: object, name: str) -> Any:
    """Returns an attribute without calling `__getattr__` of its class; None if it does not exist."""
    try:
        return object.__getattribute__(obj, name)
    except (AttributeError, RuntimeError):
        return None


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _items(mapping: Any) -> list[tuple[object, object]]:
    return list(dict.items(mapping)) if issubclass(type(mapping), dict) else []


def _object_name(obj: object) -> str:
    """Returns an object's name in a path: its attribute `name` if that is a string, else its class name."""
    name: object = (_get_raw(obj, "__dict__") or {}).get("name")
    return name if isinstance(name, str) else type(obj).__name__
