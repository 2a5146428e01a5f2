"""Streams of tokens: the tokens of documents, in memory, in token files, or in a cache on disk. Does not import torch.

    ~/.cache/sley/data/DIGEST/           DIGEST identifies the files, the tokenizer and the settings
        00000.tokens                     part 0: the tokens of about 32 MiB of text
        00000.stats                      statistics about these tokens as JSON, or `null`
        00000.lengths                    the number of tokens of each document; written last
        offsets                          the start of each document in the tokens of all parts
        complete.json                    written when all parts are complete

One process of a host holds a lock and tokenizes, while the other processes wait. If that process is killed, its complete parts
remain, and the next process writes only the missing parts. The threads of `tokenizers` use all cores.
"""

import fcntl
import json
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from sley_core.api.data import Split
from sley_core.api.files import replace_atomically
from sley_data.documents import Document, TextDocument, find_copied_tokens, read_documents
from sley_data.files import DataFile, build_plan_error, find_cache_home, find_split_files, find_token_files, print_note
from sley_data.formats import IntegerArray, read_blocks
from sley_data.plugin import ChatConfig, TextConfig, TokensConfig
from sley_data.tokenizer import Tokenizer, read_ahead

_SCAN_TOKENS = 1 << 22
"""The number of tokens of a file that are searched for the ends of documents at a time, to limit memory use."""


@dataclass(frozen=True)
class TokenStream:
    """The concatenated tokens of documents, none of which is empty. parts: arrays of uint8, uint16 or uint32, in memory or
    memory-mapped, whose concatenation contains all tokens. offsets: the start of each document, and the number of all tokens,
    int64 [num_documents + 1]. known_digest: the value of `digest`, or None to compute it from `parts` and `offsets`.
    """

    parts: Sequence[IntegerArray]
    offsets: IntegerArray
    known_digest: str | None = None

    @cached_property
    def _ends(self) -> IntegerArray:  # the end of each part in the stream
        return np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> IntegerArray:
        """Returns a copy of the tokens from `start` to `stop` (excluded), int64 [stop - start]."""
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


def _release_pages(part: IntegerArray, start: int = 0, stop: int | None = None) -> None:
    """Removes the bytes [start, stop) of a memory-mapped array from memory until the next access. Does nothing if `part` is not
    memory-mapped. start: a multiple of the page size. stop: None for the end of the file.
    """
    file = getattr(part.base, "obj", None)
    if isinstance(file, mmap):
        file.madvise(MADV_DONTNEED, start, (len(file) if stop is None else stop) - start)


def map_tokens(path: Path, dtype: str) -> IntegerArray:
    """Returns a file of little-endian integers as a memory-mapped, read-only array. The file must not be empty."""
    assert sys.byteorder == "little", "token files are little-endian"
    with path.open("rb") as file:
        return np.frombuffer(mmap(file.fileno(), 0, access=ACCESS_READ), dtype)


def load_token_stream(config: TokensConfig, split: Split) -> TokenStream:
    """Returns the token files of a split as one memory-mapped stream. The digest of the stream covers only some blocks of each
    file. With `documents = "cut"`, the stream is one document. Otherwise, the index of a file defines its documents; a file
    without an index is searched for `end_of_document`. Raises PlanError with all problems of the files, such as held-out tokens
    in the training files.
    """
    files, problems = find_token_files(config, split)
    if split == "held_out":
        problems += find_copied_tokens(find_token_files(config, "train")[0], files)
    if problems:
        raise build_plan_error(problems)
    parts = [map_tokens(file.path, file.dtype(config)) for file in files]
    ends: list[IntegerArray] = [np.zeros(1, np.int64)]
    num_tokens, digest = 0, blake2b(digest_size=16)
    for file, part in zip(files, parts, strict=True):
        if config.documents != "cut":
            ends.append(num_tokens + _find_document_ends(file, part, config))
        num_tokens += len(part)
        digest.update(f"{part.dtype}{len(part)}".encode() + read_blocks(file.path))
    offsets = np.unique(np.concatenate([*ends, [num_tokens]]))
    digest.update(offsets.data)
    return TokenStream(parts, offsets, digest.hexdigest())


def _find_document_ends(file: DataFile, part: IntegerArray, config: TokensConfig) -> IntegerArray:
    """Returns the positions, in tokens, at which the documents of a file end, int64. With an index, the first is 0."""
    if file.index is not None:
        return file.index.offsets
    assert config.end_of_document is not None, file
    ends = [np.empty(0, np.int64)]
    for start in range(0, len(part), _SCAN_TOKENS):
        stop = min(start + _SCAN_TOKENS, len(part))
        ends.append(start + 1 + np.flatnonzero(part[start:stop] == config.end_of_document))
        _release_pages(part, start * part.itemsize, stop * part.itemsize)
    return np.concatenate(ends)


MIN_PART_BYTES = 1 << 25
"""The minimum size in bytes of the text of a cached part, except for the last part. A part ends once it reaches this size."""

MIN_CACHED_BYTES = 1 << 23
"""The size in bytes from which text is cached if there is a tokenizer. Tokenizing smaller text takes about a second."""

MAX_BYTES_IN_MEMORY = 1 << 27
"""The size in bytes from which text is cached if there is no tokenizer. Each rank holds smaller text in memory."""

_REPORT_INTERVAL_S = 5.0  # the minimum time in seconds between two progress lines

_SUMMARY_NAME = "complete.json"  # the summary of a cache folder
_OFFSETS_NAME = "offsets"  # the offsets of all documents in a cache folder

EncodedDocuments: TypeAlias = "tuple[array[int], array[int], Any]"
"""The concatenated tokens of documents, the length of each document (int64), and statistics that JSON can encode."""

D = TypeVar("D", bound=Document)


class _PartPaths(NamedTuple):
    """The paths of the files of a cached part, in the order in which they are written."""

    tokens: Path
    stats: Path
    lengths: Path


def load_text_stream(config: TextConfig, split: Split, tokenizer: Tokenizer | None, notes: list[str]) -> TokenStream:
    """Returns the stream of the non-empty documents of a split of text, in order. tokenizer: None for bytes. notes: a list
    whose content is replaced with sentences for the user. Raises PlanError with all missing and empty files, or with the first
    unreadable document.
    """
    files, held_out = find_split_files(config, split)
    options = (config.separator, config.field, config.end_of_document, config.held_out, config.max_held_out, split)
    stream, summary = load_tokens(
        find_cache_folder(config, files, held_out, (6, tokenizer and tokenizer.digest, *options)),
        "uint8" if tokenizer is None else "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        sum(file.num_bytes for file in files),
        partial(read_documents, files, config, split, notes),
        partial(_encode_documents, tokenizer),
        lambda _: {"notes": notes},
    )
    notes[:] = summary["notes"]
    return stream


def _encode_documents(tokenizer: Tokenizer | None, documents: Iterable[TextDocument]) -> EncodedDocuments:
    if tokenizer is not None:
        return *tokenizer.encode(documents), None
    tokens, lengths = array("B"), array("q")
    for document in documents:
        tokens.frombytes(document.content)
        lengths.append(len(document.content))
    return tokens, lengths, None


def find_cache_folder(
    config: TextConfig | ChatConfig, files: Sequence[DataFile], held_out: Sequence[DataFile], settings: object
) -> Path | None:
    """Returns the cache folder for the tokens of `files`, or None if the tokens are not cached. held_out: the files whose
    documents are excluded. settings: all values of `config` that determine the tokens. The name of the folder is a digest of
    the settings, of the settings by which other sources split `held_out` into documents, and of each file's name, size,
    modification time and 16 blocks of bytes.
    """
    min_bytes = MIN_CACHED_BYTES if config.tokenizer else MAX_BYTES_IN_MEMORY
    if config.cache == "none" or sum(file.num_bytes for file in files) < min_bytes:
        return None
    siblings = [table for table in config.all_tables[1:] if table.held_out_files]
    if siblings and held_out:
        settings = settings, [(table.field, getattr(table, "separator", None)) for table in siblings]
    digest = blake2b(repr((settings, MIN_PART_BYTES, len(held_out))).encode(), digest_size=16)
    for file in (*files, *held_out):
        digest.update(f"{file.name}/{file.num_bytes}/{file.path.stat().st_mtime_ns}/".encode() + read_blocks(file.path))
    folder = find_cache_home() if config.cache == "auto" else Path(config.cache)
    return folder and folder / digest.hexdigest()


def load_tokens(
    folder: Path | None,
    dtype: str,
    num_bytes: int,
    read: Callable[[], Iterable[D]],
    encode: Callable[[Iterable[D]], EncodedDocuments],
    summarize: Callable[[list[Any]], dict[str, Any]],
) -> tuple[TokenStream, dict[str, Any]]:
    """Returns the stream of the non-empty documents, and the result of `summarize`. Maps the tokens in the cache `folder`, and
    first writes missing tokens. If `folder` is None or cannot be written, all tokens are in memory. dtype: the numpy dtype of
    the tokens. num_bytes: the size of all text in bytes, for progress lines. read: yields all documents. encode: tokenizes
    documents. summarize: takes the list of the statistics from each call of `encode`, and returns a dict that JSON can encode,
    with sentences for the user under `notes`. Raises the errors of these three functions.
    """
    problems: list[str] = []
    if folder is not None:
        try:
            if (summary := _read_summary(folder)) is None:
                folder.mkdir(parents=True, exist_ok=True)
                with _hold_lock(folder):
                    if (summary := _read_summary(folder)) is None:
                        num_parts = _write_parts(folder, read(), encode, num_bytes)
                        summary = _write_summary(folder, dtype, num_parts, summarize)
            return _map_parts(folder, dtype, summary["parts"], summary["digest"]), summary
        except OSError as error:
            problems = [f"the tokens cannot be cached in {folder}: {error}"]
    tokens, lengths, stats = encode(read())
    summary = summarize([stats])
    arrays = [np.frombuffer(tokens, dtype)] if tokens else []
    return TokenStream(arrays, _compute_offsets(lengths)), {**summary, "notes": [*problems, *summary["notes"]]}


def _read_summary(folder: Path) -> dict[str, Any] | None:
    """Returns the content of `complete.json`, or None if it is missing, damaged or does not match the sizes of the files."""
    try:
        summary: dict[str, Any] = json.loads((folder / _SUMMARY_NAME).read_text("utf-8"))
        return summary if summary["sizes"] == _list_file_sizes(folder) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _list_file_sizes(folder: Path) -> dict[str, int]:
    """Returns the size in bytes of each file in `folder` by name. Leaves out the lock, `complete.json` and temporary files."""
    paths = (path for path in sorted(folder.iterdir()) if path.name not in ("lock", _SUMMARY_NAME) and path.name[0] != ".")
    return {path.name: path.stat().st_size for path in paths}


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Holds the folder's lock within the block. Prints a line if another process holds the lock, and waits."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_note(f"waiting for another process on this host that is tokenizing the same text into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_parts(folder: Path, documents: Iterable[D], encode: Callable[[list[D]], EncodedDocuments], num_bytes: int) -> int:
    """Writes the missing parts of the cache, and returns the number of all parts. num_bytes: the size of all text in bytes."""
    if (folder / _SUMMARY_NAME).exists():  # a file is damaged
        for path in (*folder.glob("*.lengths"), folder / _SUMMARY_NAME):
            path.unlink()
    start = last_report = time.monotonic()
    num_parts = num_read = num_encoded = 0
    for part_documents, part_bytes in read_ahead(_split_parts(documents)):
        part = _build_part_paths(folder, num_parts)
        num_parts += 1
        num_read += part_bytes
        if part.lengths.exists():
            continue
        tokens, lengths, stats = encode(part_documents)
        for path, content in zip(part, (tokens.tobytes(), json.dumps(stats).encode(), lengths.tobytes()), strict=True):
            with replace_atomically(path) as file:
                file.write(content)
        num_encoded += part_bytes
        now = time.monotonic()
        if now - last_report > _REPORT_INTERVAL_S:
            last_report, speed = now, num_encoded / (now - start)
            progress = f"{num_read / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s"
            print_note(f"tokenized {progress}, {max(0, num_bytes - num_read) / speed:.0f} s left")
    return num_parts


def _split_parts(documents: Iterable[D]) -> Iterator[tuple[list[D], int]]:
    """Yields the documents of each part, and their total size in bytes. A part ends when it reaches `MIN_PART_BYTES`."""
    part: list[D] = []
    num_bytes = 0
    for document in documents:
        part.append(document)
        num_bytes += len(document.content)
        if num_bytes >= MIN_PART_BYTES:
            yield part, num_bytes
            part, num_bytes = [], 0
    if part:
        yield part, num_bytes


def _build_part_paths(folder: Path, number: int) -> _PartPaths:
    return _PartPaths(*(folder / f"{number:05}.{suffix}" for suffix in _PartPaths._fields))


def _write_summary(
    folder: Path, dtype: str, num_parts: int, summarize: Callable[[list[Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Writes the offsets and `complete.json` of a cache with complete parts, and returns the content of `complete.json`."""
    parts = [_build_part_paths(folder, number) for number in range(num_parts)]
    with replace_atomically(folder / _OFFSETS_NAME) as file:
        offsets = _compute_offsets(array("q"))
        for part in parts:
            file.write(offsets[:-1].data)
            offsets = _compute_offsets(array("q", part.lengths.read_bytes()), int(offsets[-1]))
        file.write(offsets.data)
    summary = summarize([json.loads(part.stats.read_text("utf-8")) for part in parts])
    digest = _map_parts(folder, dtype, num_parts).digest
    summary = {"parts": num_parts, "sizes": _list_file_sizes(folder), "digest": digest, **summary}
    with replace_atomically(folder / _SUMMARY_NAME) as file:
        file.write(json.dumps(summary).encode())
    return summary


def _map_parts(folder: Path, dtype: str, num_parts: int, digest: str | None = None) -> TokenStream:
    """Returns the tokens of the parts as one memory-mapped stream. digest: the digest of the stream, or None to compute it."""
    paths = [_build_part_paths(folder, number).tokens for number in range(num_parts)]
    tokens = [map_tokens(path, dtype) for path in paths if path.stat().st_size]
    return TokenStream(tokens, map_tokens(folder / _OFFSETS_NAME, "int64"), digest)


def _compute_offsets(lengths: "array[int]", start: int = 0) -> IntegerArray:
    """Returns the offset of each non-empty document and the end of the last one, int64. start: the first document's offset."""
    sizes = np.array(lengths, np.int64)
    offsets: IntegerArray = np.cumsum(np.concatenate([[start], sizes[sizes > 0]]), dtype=np.int64)
    return offsets
