"""Pickles a call so that another process can load it, even if pytest generated the module name.

With `--import-mode=importlib`, a test module is called `packages.core.tests.test_x`, which no import statement can find. A
call is therefore sent with the file of every module that its pickle names. The receiver imports these files under the same
names, so that objects of those modules can be returned.

Pickling by value (cloudpickle) copies a function's globals: ranks would not see the classes of the test module (`isinstance`
fails on results). It would also be a dependency of all users of core.
"""

from __future__ import annotations

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
class Packed:
    """Holds a pickle and the source file of each module that it names."""

    data: bytes
    files: Mapping[str, str]


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
    files = {name: _source_file(name) for name in sorted(pickler.modules) if name != "__main__"}
    return Packed(buffer.getvalue(), {name: file for name, file in files.items() if file})


def unpack(packed: Packed) -> Any:
    """Loads the needed modules and returns the value that was passed to `pack`."""
    for name, file in packed.files.items():
        _import_from(name, Path(file))
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


def _source_file(name: str) -> str | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return str(Path(file).resolve()) if file else None


def _import_from(name: str, file: Path) -> None:
    """Imports the module `name` from `file`, from which the parent process has imported it."""
    if _source_file(name) == str(file):
        return
    _import_package(name.rpartition(".")[0], file.parent.parent if file.name == "__init__.py" else file.parent)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} cannot be loaded from {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _import_package(name: str, folder: Path) -> None:
    """Imports the package `name` in `folder` and its parents, unless it is imported. pytest generates packages for folders
    without `__init__.py`.
    """
    if not name or name in sys.modules:
        return
    if (folder / "__init__.py").exists():
        _import_from(name, folder / "__init__.py")
        return
    _import_package(name.rpartition(".")[0], folder.parent)
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [str(folder)]
