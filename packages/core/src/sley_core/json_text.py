"""Makes JSON that every reader accepts, and writes files completely or not at all. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Returns `value` as JSON text; infinities and NaN become null, since JSON has no such numbers.

    Raises TypeError for a type that JSON has no form for.
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path`, indented; a reader sees, at any moment, either the old text or the new one, complete.

    Raises OSError, naming the file, if it cannot be written.
    """
    write_whole(path, to_json(value, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically: on a full disk, or if this process is killed, the old file stays.

    Raises OSError, naming the file, if it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)  # of a process that was killed; or a link, which must not say where this writes
    try:
        with scratch.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        scratch.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    """Returns `value` with floats that are not finite replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
