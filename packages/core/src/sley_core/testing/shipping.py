"""Pickles a call so that another process can load it, even where pytest made up the module's name.

With `--import-mode=importlib` a test module is called `packages.core.tests.test_x` and no import statement finds it.
A call is therefore sent with the file of every module that its pickle names, and the receiver loads by file what it
cannot import by name, under the same name, so that objects of those modules can travel back.

Pickling by value (cloudpickle) was the alternative: it copies a function's globals, so that two ranks would not see the
test module's own classes (`isinstance` fails on results), and it would be a dependency of everyone who installs core.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def pack(value: Any) -> tuple[bytes, dict[str, str]]:
    """`value` as a pickle, and the files of the modules that it names.

    Raises TypeError that says what to do if `value` holds a lambda, a nested function or anything else unpicklable.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot be sent to another process: {error}; use a function at module level and pass the rest as arguments"
        ) from error
    return buffer.getvalue(), {name: file for name in sorted(pickler.modules) if (file := _file_of(name))}


def unpack(data: bytes, files: Mapping[str, str]) -> Any:
    """The value that `pack` was given; loads the modules of `files` first."""
    for name, file in files.items():
        _ensure_module(name, file)
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    """Notes the module of every class and function that it pickles by reference."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        owner = value if hasattr(value, "__qualname__") else type(value)
        if isinstance(module := getattr(owner, "__module__", None), str):
            self.modules.add(module)
        return NotImplemented


def _file_of(name: str) -> str | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return str(Path(file).resolve()) if file and name != "__main__" else None


def _ensure_module(name: str, file: str) -> None:
    if _file_of(name) == file:
        return
    try:
        importable = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        importable = None
    if importable and importable.origin and str(Path(importable.origin).resolve()) == file:
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} cannot be loaded from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
