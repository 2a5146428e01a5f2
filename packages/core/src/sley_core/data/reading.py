"""The documents of a text corpus, split by split; torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from sley_core.data.config import TextConfig
from sley_core.data.dataset import Split
from sley_core.data.documents import File, as_error, held_out, text_files


def read_documents(config: TextConfig, split: Split) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the documents of a split, in order; only files of which a document is wanted are read.

    Raises PlanError with every file that is missing or empty.
    """
    files, problems = text_files(config)
    if problems:
        raise as_error(problems)
    if config.separator is None:
        for file in of_split(files, config, split):
            yield file.name, file.path.read_bytes()
        return
    documents = [document for file in files for document in _separated(file, config.separator.encode())]
    chosen = held_out([name for name, _ in documents], config.held_out)
    yield from compress(documents, (side == (split == "held_out") for side in chosen))


def of_split(files: list[File], config: TextConfig, split: Split) -> list[File]:
    """The files of a split, where each file is one document."""
    chosen = held_out([file.name for file in files], config.held_out)
    return list(compress(files, (side == (split == "held_out") for side in chosen)))


def _separated(file: File, separator: bytes) -> Iterator[tuple[str, bytes]]:
    """The documents of a file, named `file#0`, `file#1`, ...; the separator belongs to none of them."""
    for number, text in enumerate(file.path.read_bytes().split(separator)):
        if text:
            yield f"{file.name}#{number}", text
