"""Validates a table in the folder of the plan; paths that a base contains start in the base's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from sley_core.errors import KeyPath
from sley_core.plan.document import Document
from sley_core.table import BasePath, Table

AnyTable = TypeVar("AnyTable", bound=Table)


def validated(model: type[AnyTable], given: Mapping[str, Any], path: KeyPath, document: Document) -> AnyTable:
    """Returns `given`, the table at `path`, as a `model`. Raises pydantic's ValidationError."""
    keys = _with_paths(model, given, path, document) if document.bases else given
    return model.model_validate(keys, context={"folder": document.folder})


def _with_paths(model: type[Table], given: Mapping[str, Any], path: KeyPath, document: Document) -> dict[str, Any]:
    """Returns the keys of a table; each path that a file of another folder contains has that folder with it."""
    found = dict(given)
    for key, value in given.items():
        info = model.model_fields.get(key)
        if info is not None and _takes_path(info.annotation):
            found[key] = _with_folder(value, (*path, key), document)
    return found


def _with_folder(value: Any, path: KeyPath, document: Document) -> Any:
    """Returns a path, or a list of paths, with its folder if it comes from another folder than the plan's."""
    if isinstance(value, list):
        return [_with_folder(item, (*path, number), document) for number, item in enumerate(value)]
    folder = document.folder_of(path)
    is_elsewhere = isinstance(value, str) and folder is not None and folder != document.folder
    return BasePath(folder, value) if is_elsewhere and folder else value


def _takes_path(annotation: Any) -> bool:
    return annotation is Path or any(map(_takes_path, get_args(annotation)))
