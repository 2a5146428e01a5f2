"""Loads the tokens of a split of text or token files as one stream of documents; torch-free."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sley_core.api.data import Split
from sley_core.api.files import replace_atomically
from sley_data.documents import find_copied_tokens, read_documents
from sley_data.files import DataFile, cache_home, merge_problems, split_files, token_files
from sley_data.formats import Integers, read_blocks
from sley_data.plugin import ChatConfig, TextConfig, TokensConfig

if TYPE_CHECKING:
    from sley_data.cache import Encoded, Part
    from sley_data.tokenizer import Tokenizer

T = TypeVar("T")

MIN_CACHED_BYTES = 1 << 23
"""The minimum size of cached text with a tokenizer. Less text is tokenized again in each run, in about a second."""

_SCAN_TOKENS = 1 << 22
"""The number of tokens of a file that are in memory while it is searched for documents."""

MAX_BYTES_IN_MEMORY = 1 << 27
"""The minimum size of bytes that are cached as mapped files. Each rank holds smaller text in memory."""


@dataclass(frozen=True)
class Stream:
    """Holds the tokens of documents, one after another.

    parts: arrays of uint8, uint16 or uint32, in memory or mapped. A document may be in several parts. offsets: the start of
    each document, and the number of tokens, int64 [num_documents + 1]. No document is empty. stored_digest: `digest`, if known.
    """

    parts: Sequence[Integers]
    offsets: Integers
    stored_digest: str | None = None

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
        """A digest of all tokens and document lengths."""
        return self.stored_digest or _digest([self.parts, [self.offsets]])

    @property
    def sampled_digest(self) -> str:
        """A digest of the length of each part, of blocks of at most 128 KiB per part, and of the document lengths."""
        blocks = ([np.array([len(part)]), *_sample_blocks(part)] for part in self.parts)
        return _digest([*blocks, [self.offsets]])


def _digest(values: Iterable[Sequence[Integers]]) -> str:
    """Returns a digest of values, each of which may have several parts."""
    digest = blake2b(digest_size=16)
    for parts in values:
        digest.update(f"{parts[0].dtype.char if parts else None}{sum(map(len, parts))}".encode())
        for part in parts:
            digest.update(part.data)
            _release_pages(part)
    return digest.hexdigest()


def _release_pages(part: Integers, start: int = 0, stop: int | None = None) -> None:
    """Removes pages of a mapped file from this process's memory. The next access loads them again."""
    file = getattr(part.base, "obj", None)
    if isinstance(file, mmap):
        file.madvise(MADV_DONTNEED, start, (len(file) if stop is None else stop) - start)


def _sample_blocks(part: Integers) -> Iterator[Integers]:
    """Yields 16 blocks of at most 2,048 elements that are spread over a part, from its start to its end."""
    size = 1 << 11 if len(part) > 1 << 15 else max(1, -(-len(part) // 16))
    for number in range(16):
        start = max(0, len(part) - size) * number // 15
        yield part[start : start + size]


def text_stream(config: TextConfig, split: Split, tokenizer: Tokenizer | None, notes: list[str]) -> Stream:
    """Returns the non-empty documents of a split of text in order.

    tokenizer: None for bytes. notes: the list that receives sentences for the user. Raises PlanError with all missing and empty
    files, or for an unreadable file.
    """

    def read() -> Iterator[tuple[str, bytes]]:
        notes.clear()
        return read_documents(files, config, split, notes)

    files, held_out = split_files(config, split)
    options = (config.separator, config.field, config.end_of_document, config.held_out, config.largest_share, split)
    stream, summary = load_tokens(
        cache_folder(config, files, held_out, (5, tokenizer and tokenizer.digest, *options)),
        "uint8" if tokenizer is None else "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        sum(file.num_bytes for file in files),
        read,
        lambda document: len(document[1]),
        partial(_encode_documents, tokenizer),
        lambda _: {"notes": notes},
    )
    notes[:] = summary["notes"]
    return stream


def _encode_documents(tokenizer: Tokenizer | None, documents: Iterable[tuple[str, bytes]]) -> Encoded:
    if tokenizer is not None:
        return *tokenizer.encode(documents), None
    tokens, lengths = array("B"), array("q")
    for _, text in documents:
        tokens.frombytes(text)
        lengths.append(len(text))
    return tokens, lengths, None


def cache_folder(
    config: TextConfig | ChatConfig, files: Sequence[DataFile], held_out: Sequence[DataFile], settings: object
) -> Path | None:
    """Returns the cache folder for the tokens of `files`, or None if they are not cached.

    held_out: the files whose documents are excluded. settings: all other values that determine the tokens. The name, size,
    modification time and 16 blocks of bytes identify a file.
    """
    min_bytes = MIN_CACHED_BYTES if config.tokenizer else MAX_BYTES_IN_MEMORY
    if config.cache == "none" or sum(file.num_bytes for file in files) < min_bytes:
        return None
    from sley_data.cache import PART_BYTES

    digest = blake2b(repr((settings, PART_BYTES, len(held_out))).encode(), digest_size=16)
    for file in (*files, *held_out):
        digest.update(f"{file.name}/{file.num_bytes}/{file.path.stat().st_mtime_ns}/".encode() + read_blocks(file.path))
    folder = cache_home() if config.cache == "auto" else Path(config.cache)
    return folder and folder / digest.hexdigest()


def load_tokens(
    folder: Path | None,
    dtype: str,
    num_bytes: int,
    read: Callable[[], Iterable[T]],
    size_of: Callable[[T], int],
    encode: Callable[[Iterable[T]], Encoded],
    summarize: Callable[[list[Any]], dict[str, Any]],
) -> tuple[Stream, dict[str, Any]]:
    """Returns the tokens of the non-empty documents, and the result of `summarize`. Raises the errors of the functions.

    Maps the tokens in the cache `folder`, which are computed first if they are missing. If `folder` is None or cannot be
    written, all tokens are in memory.

    dtype: the dtype of the tokens. num_bytes: the size of all text, for progress lines. read: yields all documents. size_of:
    returns the size of a document in bytes. encode: tokenizes documents, possibly in a worker process. summarize: returns JSON
    data, with sentences for the user in `notes`, for the statistics in all results of `encode`.
    """
    problems: list[str] = []
    if folder is not None:
        from sley_data import cache  # small texts need neither files nor worker processes

        try:
            finish = partial(_finish_parts, folder, dtype, summarize)
            complete = cache.prepare_parts(folder, read(), size_of, encode, num_bytes, finish)
            return _map_parts(folder, dtype, cache.list_parts(folder, complete["parts"]), complete["digest"]), complete
        except OSError as error:
            problems = [f"the tokens are not kept in {folder}: {error}"]
    tokens, lengths, stats = encode(read())
    summary = summarize([] if stats is None else [stats])
    parts = [np.frombuffer(tokens, dtype)] if tokens else []
    return Stream(parts, _offsets(lengths)), {**summary, "notes": [*problems, *summary["notes"]]}


def _finish_parts(
    folder: Path, dtype: str, summarize: Callable[[list[Any]], dict[str, Any]], parts: Sequence[Part]
) -> dict[str, Any]:
    """Writes the offsets of the documents. Returns the summary and the digest of the tokens."""
    with replace_atomically(folder / _OFFSETS) as file:
        offsets = _offsets(array("q"))
        for part in parts:
            file.write(offsets[:-1].data)
            offsets = _offsets(array("q", part.lengths.read_bytes()), int(offsets[-1]))
        file.write(offsets.data)
    summary = summarize([stats for part in parts for stats in part.read_stats()])
    return {"digest": _map_parts(folder, dtype, parts).digest, **summary}


_OFFSETS = "offsets"


def _map_parts(folder: Path, dtype: str, parts: Iterable[Part], digest: str | None = None) -> Stream:
    tokens = [map_tokens(part.tokens, dtype) for part in parts if part.tokens.stat().st_size]
    return Stream(tokens, map_tokens(folder / _OFFSETS, "int64"), digest)


def _offsets(lengths: array[int], start: int = 0) -> Integers:
    """Returns the offsets of the non-empty documents. start: the offset of the first document."""
    sizes = np.array(lengths, np.int64)
    offsets: Integers = np.cumsum(np.concatenate([[start], sizes[sizes > 0]]), dtype=np.int64)
    return offsets


def map_tokens(path: Path, dtype: str) -> Integers:
    """Maps a file of integers as a read-only array. The map is shared, so that a file can be larger than the memory."""
    assert sys.byteorder == "little", "token files are little-endian"
    with path.open("rb") as file:
        return np.frombuffer(mmap(file.fileno(), 0, access=ACCESS_READ), dtype)


def token_stream(config: TokensConfig, split: Split) -> Stream:
    """Returns the token files of a split as one mapped stream.

    With `documents = "cut"`, the stream is one document. Otherwise, files without an index are searched for `end_of_document`.
    Raises PlanError with all files that are missing, empty or not a whole number of tokens long.
    """
    files, problems = token_files(config, split)
    if split == "held_out":
        problems += find_copied_tokens(token_files(config, "train")[0], files)
    if problems:
        raise merge_problems(problems)
    parts = [map_tokens(file.path, file.dtype(config)) for file in files]
    total = sum(map(len, parts))
    if config.documents == "cut":
        return Stream(parts, np.array([0, total]))
    ends, part_start = [np.array([0, total])], 0
    for file, part in zip(files, parts, strict=True):
        ends.append(part_start + _document_ends(file, part, config))
        part_start += len(part)
    return Stream(parts, np.unique(np.concatenate(ends)))


def _document_ends(file: DataFile, part: Integers, config: TokensConfig) -> Integers:
    """Returns the ends of the documents in a file, or also the start of the first document."""
    if file.index is not None:
        return file.index.offsets
    assert config.end_of_document is not None, file
    ends = [np.empty(0, np.int64)]
    for start in range(0, len(part), _SCAN_TOKENS):
        stop = min(start + _SCAN_TOKENS, len(part))
        ends.append(start + 1 + np.flatnonzero(part[start:stop] == config.end_of_document))
        _release_pages(part, start * part.itemsize, stop * part.itemsize)
    return np.concatenate(ends)
