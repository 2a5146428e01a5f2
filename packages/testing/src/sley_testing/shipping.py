"""Pickles a call so that another process can load it, even if pytest generated the module name.

With `--import-mode=importlib`, a test module is called `packages.core.tests.test_x`, which no import statement can find. A
call is therefore sent with the source of every module that its pickle names. If the receiver cannot import a module by name,
it loads the file under the same name, so that objects of those modules can be returned.

Pickling by value (cloudpickle) copies a function's globals: ranks would not see the classes of the test module (`isinstance`
fails on results). It would also be a dependency of all users of core.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Source:
    """Holds the origin of a module: its file, and for a package the folders of its modules."""

    file: str | None
    folders: tuple[str, ...] | None


@dataclass(frozen=True)
class Packed:
    """Holds a pickle and the sources of its modules, packages before their submodules."""

    data: bytes
    sources: Mapping[str, Source]


def pack(value: Any) -> Packed:
    """Packs `value` for another process. Raises TypeError if `value` has a lambda, a nested function or another unpicklable
    object.
    """
    buffer = io.BytesIO()
    pickler = _RecordingPickler(buffer)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot be sent to another process: {error}; use a function at module level and pass the rest as arguments"
        ) from error
    return Packed(buffer.getvalue(), _sources(pickler.modules))


def unpack(packed: Packed) -> Any:
    """Loads the needed modules and returns the value that was passed to `pack`."""
    for name, source in packed.sources.items():
        _import_from(name, source)
    return pickle.loads(packed.data)


def pack_result(value: Any) -> bytes:
    """Pickles `value` for `pickle.loads`. Tensors are pickled as bytes, since torch would write a file for each."""
    buffer = io.BytesIO()
    _ResultPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _ResultPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Pickles a plain host tensor as its bytes, dtype and shape."""
        import torch  # not needed by a process that only packs calls

        from sley_core.model.tensors import flat_bytes

        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        if value.requires_grad or vars(value) or not value.is_contiguous() or value.is_conj() or value.is_neg():
            return NotImplemented
        data = bytearray(flat_bytes(value).numpy().data) if value.numel() else bytearray()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytearray, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


class _RecordingPickler(pickle.Pickler):
    """Records the module of every class and function that is pickled by reference."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        """Records the module of `value`, and pickles it as usual."""
        owner = value if hasattr(value, "__qualname__") else type(value)
        if isinstance(module := getattr(owner, "__module__", None), str):
            self.modules.add(module)
        return NotImplemented


def _sources(names: set[str]) -> dict[str, Source]:
    """Returns the sources of these modules and of their parent packages, packages first."""
    paths = [name.split(".") for name in names if name != "__main__" and _source_file(sys.modules.get(name))]
    all_names = {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
    modules = {name: module for name in sorted(all_names) if (module := sys.modules.get(name))}
    return {
        name: Source(_source_file(module), tuple(module.__path__) if hasattr(module, "__path__") else None)
        for name, module in modules.items()
    }


def _source_file(module: ModuleType | None) -> str | None:
    file = getattr(module, "__file__", None)
    return str(Path(file).resolve()) if file else None


def _import_from(name: str, source: Source) -> None:
    """Imports the module `name` from the same file as in the parent process."""
    module = sys.modules.get(name)
    if module and (source.file is None or _source_file(module) == source.file):
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    origin = str(Path(spec.origin).resolve()) if spec and spec.origin else None
    if spec and origin == source.file:  # another file of that name may come first on the path
        importlib.import_module(name)
        return
    folders = None if source.folders is None else list(source.folders)
    if source.file is None:  # a package without a file, as pytest generates it
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = folders or []
        return
    spec = importlib.util.spec_from_file_location(name, source.file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} cannot be loaded from {source.file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
