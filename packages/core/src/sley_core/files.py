"""The names of files in a run folder, and atomic writes of files. Imports no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PLAN_FILE = "plan.toml"
WEIGHTS_FOLDER = "weights"
CHECKPOINTS_FOLDER = "checkpoints"
"""The names, in a run's folder, of its plan, of its final weights, and of its checkpoints (unless the plan names another)."""

COPIED_FILES = {
    ("data", "tokenizer"): "tokenizer",
    ("data", "template"): "template.jinja",
    ("model", "weights"): "start",
    ("model", "config"): "start",
}
"""The keys of a plan that name files, each with the path in the run's folder to which the run copies the small files."""


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` in UTF-8 to the file `path`, atomically. If that fails, raises OSError and keeps the old file."""
    with replace_atomically(path) as file:
        file.write(text.encode())


@contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
    """Yields a new binary file, to which the block writes. At the end of the block, syncs it to the disk and replaces the file
    `path` with it. If the block raises or the process is killed, the old file remains. Raises OSError with the name `path`.
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
    """Syncs the directory `folder`, i.e. the names of its files, to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
