"""Writes tensors of a run, under names of choice, into a new folder: one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.errors import RunError
from sley_core.weight_files.write import Spec, TensorFiles, begin, complete, discard, file_names, split, unwritten

if TYPE_CHECKING:
    from sley_core.weight_files.read import Tensors


def write_tensors(
    out: Path,
    source: Tensors,
    names: Iterable[tuple[str, str]],
    max_file_bytes: int,
    more: Callable[[Path], None] | None = None,
) -> list[str]:
    """Writes tensors of `source` into the new folder `out`; returns the names of the files.

    names: (name in the source, name in the files) of each tensor that is written. more: writes what else the folder is to
    have, into the folder that it is given. `out` is there when all of it is on the disk, or not at all. Raises RunError
    "weight-files" if it cannot be written.
    """
    origin = {theirs: ours for ours, theirs in names}
    specs = [Spec(theirs, *source.kind(ours)) for theirs, ours in origin.items()]
    lists = split(specs, max_file_bytes)
    files = dict(zip(file_names(len(lists)), lists, strict=True))
    try:
        scratch = begin(out, ours=())
        with TensorFiles(scratch, files) as written:
            for spec in specs:
                written.add(spec.name, source.tensor(origin[spec.name]))
            written.close()
        if more is not None:
            more(scratch)
        complete(out, files)
    except BaseException as error:  # Ctrl-C too
        discard(out)
        if isinstance(error, OSError):
            raise RunError("weight-files", unwritten(error, out)) from None
        raise
    return list(files)
