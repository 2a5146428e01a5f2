"""Makes relative paths of a base start where the base lies, before its table is validated in the folder of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from sley_core.errors import KeyPath
from sley_core.plan.document import Document
from sley_core.table import Table


def with_paths(model: type[Table], given: Mapping[str, Any], path: KeyPath, document: Document) -> dict[str, Any]:
    """Returns the keys of a table at `path`; paths that a file of another folder says are absolute."""
    if not document.bases:
        return dict(given)
    found = dict(given)
    for key, value in given.items():
        info = model.model_fields.get(key)
        if info is not None and _takes_path(info.annotation):
            found[key] = _absolute(value, (*path, key), document)
    return found


def _absolute(value: Any, path: KeyPath, document: Document) -> Any:
    if isinstance(value, list):
        return [_absolute(item, (*path, number), document) for number, item in enumerate(value)]
    folder = document.folder_of(path)
    # A path in the plan's own folder stays as it was written.
    return str(Path(folder, value)) if isinstance(value, str) and folder not in (None, document.folder) else value


def _takes_path(annotation: Any) -> bool:
    return annotation is Path or any(map(_takes_path, get_args(annotation)))
