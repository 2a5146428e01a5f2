"""Files that appear complete or not at all; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically."""
    with appearing(path) as file:
        file.write(text.encode())


@contextmanager
def appearing(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file, which replaces `path` when the block ends, and is on the disk then; if the block raises, or this
    process is killed, the old file stays. Raises OSError, naming the file, if it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)  # of a process that was killed; or a link, which must not say where this writes
    try:
        with scratch.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        scratch.unlink(missing_ok=True)  # frees the space on a full disk


def sync_names(folder: Path) -> None:
    """Waits until the names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
