"""The names of files in a run folder, and files that appear completely or not at all. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, text: str) -> None:
    with replace_atomically(path) as file:
        file.write(text.encode())


@contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends, after it has been synced to the disk.

    If the block raises or the process is killed, the old file remains. Raises OSError with the file name.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)  # a file of a killed process, or a link, which must not be followed
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
    """Syncs the directory entries of `folder` to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


PLAN = "plan.toml"
WEIGHTS = "weights"
CHECKPOINTS = "checkpoints"
"""Names in a run's folder: its plan, its final weights, and its checkpoints unless the plan names another folder for them."""

COPIES = {
    ("data", "tokenizer"): "tokenizer",
    ("data", "template"): "tokenizer/chat_template.jinja",
    ("model", "weights"): "start",
    ("model", "config"): "start",
}
"""Keys of the plan that name files, and the folder or file within the run's own where a run keeps copies of the small ones."""
