"""The documents of a text corpus, split by split; torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

from sley_core.data.config import TextConfig
from sley_core.data.dataset import Split
from sley_core.data.documents import File, held_out


def read_documents(files: Sequence[File], config: TextConfig, split: Split) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the documents of a split, in the order of `files`, which are those of `text_files`.

    Where each file is a document, the other split's files are not opened.
    """
    if config.separator is None:
        for file in of_split(files, config, split):
            yield file.name, file.path.read_bytes()
        return
    documents = [document for file in files for document in _separated(file, config.separator.encode())]
    yield from compress(documents, _chosen([name for name, _ in documents], config, split))


def of_split(files: Sequence[File], config: TextConfig, split: Split) -> list[File]:
    """The files of a split, where each file is one document."""
    return list(compress(files, _chosen([file.name for file in files], config, split)))


def _chosen(names: Sequence[str], config: TextConfig, split: Split) -> list[bool]:
    if config.held_out_files:
        return [True] * len(names)
    return [side == (split == "held_out") for side in held_out(names, config.held_out)]


def _separated(file: File, separator: bytes) -> Iterator[tuple[str, bytes]]:
    """The documents of a file, named `file#0`, `file#1`, ...; the separator belongs to none of them."""
    for number, text in enumerate(file.path.read_bytes().split(separator)):
        if text:
            yield f"{file.name}#{number}", text
