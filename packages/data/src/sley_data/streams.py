"""Streams of documents: the tokens of a split, one document after another, in memory or in memory-mapped files; torch-free."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path

import numpy as np

from sley_core.api.data import Split
from sley_data.documents import find_copied_tokens
from sley_data.files import DataFile, build_plan_error, find_token_files
from sley_data.formats import Integers, read_blocks
from sley_data.plugin import TokensConfig

_SCAN_TOKENS = 1 << 22
"""The number of tokens that are in memory at a time while a file is searched for documents."""


@dataclass(frozen=True)
class Stream:
    """Holds the tokens of documents, one after another.

    parts: arrays of uint8, uint16 or uint32, in memory or memory-mapped, whose concatenation contains all tokens. offsets: the
    start of each document, followed by the number of all tokens, int64 [num_documents + 1]. No document is empty. known_digest:
    the value of `digest`, or None to compute it from all tokens and document lengths.
    """

    parts: Sequence[Integers]
    offsets: Integers
    known_digest: str | None = None

    @cached_property
    def _ends(self) -> Integers:
        return np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> Integers:
        """Returns a copy of tokens [start, stop) as int64. The range must be inside the stream."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        tokens = np.empty(stop - start, np.int64)
        part_index, position = int(np.searchsorted(self._ends, start, side="right")), start
        while position < stop:
            part, end = self.parts[part_index], int(self._ends[part_index])
            offset = end - len(part)
            tokens[position - start : end - start] = part[position - offset : stop - offset]
            part_index, position = part_index + 1, end
        return tokens

    @property
    def digest(self) -> str:
        """A string that changes if the tokens or the document lengths change."""
        if self.known_digest is not None:
            return self.known_digest
        digest = blake2b(digest_size=16)
        for arrays in (self.parts, [self.offsets]):
            digest.update(f"{arrays[0].dtype.char if arrays else None}{sum(map(len, arrays))}".encode())
            for tokens in arrays:
                digest.update(tokens.data)
                _release_pages(tokens)
        return digest.hexdigest()


def _release_pages(part: Integers, start: int = 0, stop: int | None = None) -> None:
    """Removes bytes [start, stop) of a mapped file from memory until the next access. Does nothing if `part` is not mapped."""
    file = getattr(part.base, "obj", None)
    if isinstance(file, mmap):
        file.madvise(MADV_DONTNEED, start, (len(file) if stop is None else stop) - start)


def map_tokens(path: Path, dtype: str) -> Integers:
    """Returns a file of little-endian integers as a memory-mapped, read-only array. The file may be larger than the memory."""
    assert sys.byteorder == "little", "token files are little-endian"
    with path.open("rb") as file:
        return np.frombuffer(mmap(file.fileno(), 0, access=ACCESS_READ), dtype)


def load_token_stream(config: TokensConfig, split: Split) -> Stream:
    """Returns the token files of a split as one memory-mapped stream. Its digest covers only some blocks of each file.

    With `documents = "cut"`, the stream is one document. Otherwise, files without an index are searched for `end_of_document`.
    Raises a PlanError that lists all problems of the files, such as missing files, or held-out tokens in the training files.
    """
    files, problems = find_token_files(config, split)
    if split == "held_out":
        problems += find_copied_tokens(find_token_files(config, "train")[0], files)
    if problems:
        raise build_plan_error(problems)
    parts = [map_tokens(file.path, file.dtype(config)) for file in files]
    ends: list[Integers] = [np.zeros(1, np.int64)]
    num_tokens, digest = 0, blake2b(digest_size=16)
    for file, part in zip(files, parts, strict=True):
        if config.documents != "cut":
            ends.append(num_tokens + _document_ends(file, part, config))
        num_tokens += len(part)
        digest.update(f"{part.dtype}{len(part)}".encode() + read_blocks(file.path))
    offsets = np.unique(np.concatenate([*ends, [num_tokens]]))
    digest.update(offsets.data)
    return Stream(parts, offsets, digest.hexdigest())


def _document_ends(file: DataFile, part: Integers, config: TokensConfig) -> Integers:
    """Returns the positions in a file at which its documents end. If the file has an index, they begin with position 0."""
    if file.index is not None:
        return file.index.offsets
    assert config.end_of_document is not None, file
    ends = [np.empty(0, np.int64)]
    for start in range(0, len(part), _SCAN_TOKENS):
        stop = min(start + _SCAN_TOKENS, len(part))
        ends.append(start + 1 + np.flatnonzero(part[start:stop] == config.end_of_document))
        _release_pages(part, start * part.itemsize, stop * part.itemsize)
    return np.concatenate(ends)
