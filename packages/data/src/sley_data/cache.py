"""Tokenizes documents once, and caches the tokens on disk for later runs and for all ranks of a host; torch-free.

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
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from sley_core.api.data import Split
from sley_core.api.files import replace_atomically
from sley_data.documents import Document, TextDocument, read_documents
from sley_data.files import DataFile, find_cache_home, find_split_files, print_note
from sley_data.formats import Integers, read_blocks
from sley_data.plugin import ChatConfig, TextConfig
from sley_data.streams import Stream, map_tokens
from sley_data.tokenizer import Tokenizer

PART_BYTES = 1 << 25
"""A part ends once its text has at least this size in bytes."""

MIN_CACHED_BYTES = 1 << 23
"""With a tokenizer, the minimum size of cached text in bytes. Each run tokenizes smaller text again, in about a second."""

MAX_BYTES_IN_MEMORY = 1 << 27
"""Without a tokenizer, the minimum size of cached text in bytes. Each rank holds smaller text in memory."""

_REPORT_S = 5.0
"""The minimum time in seconds between two progress lines."""

_COMPLETE = "complete.json"
_OFFSETS = "offsets"

Encoded: TypeAlias = "tuple[array[int], array[int], Any]"
"""The concatenated tokens of documents, the length of each document (64 bits), and statistics as values that JSON supports."""

D = TypeVar("D", bound=Document)
T = TypeVar("T")


class _Part(NamedTuple):
    """The paths of a part's files, in the order in which they are written."""

    tokens: Path
    stats: Path
    lengths: Path


def load_text_stream(config: TextConfig, split: Split, tokenizer: Tokenizer | None, notes: list[str]) -> Stream:
    """Returns the stream of the non-empty documents of a split of text, in order.

    tokenizer: None for bytes. notes: the list that receives sentences for the user. Raises a PlanError that lists all missing
    and empty files, or PlanError for the first document that cannot be read.
    """

    def read() -> Iterator[TextDocument]:
        notes.clear()
        return read_documents(files, config, split, notes)

    files, held_out = find_split_files(config, split)
    options = (config.separator, config.field, config.end_of_document, config.held_out, config.largest_share, split)
    stream, summary = load_tokens(
        find_cache_folder(config, files, held_out, (6, tokenizer and tokenizer.digest, *options)),
        "uint8" if tokenizer is None else "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        sum(file.num_bytes for file in files),
        read,
        partial(_encode_documents, tokenizer),
        lambda _: {"notes": notes},
    )
    notes[:] = summary["notes"]
    return stream


def _encode_documents(tokenizer: Tokenizer | None, documents: Iterable[TextDocument]) -> Encoded:
    if tokenizer is not None:
        return *tokenizer.encode(documents), None
    tokens, lengths = array("B"), array("q")
    for document in documents:
        tokens.frombytes(document.content)
        lengths.append(document.num_bytes)
    return tokens, lengths, None


def find_cache_folder(
    config: TextConfig | ChatConfig, files: Sequence[DataFile], held_out: Sequence[DataFile], settings: object
) -> Path | None:
    """Returns the cache folder for the tokens of `files`, or None if they are not cached.

    held_out: the files whose documents are excluded. settings: all other values that determine the tokens. A file is identified
    by its name, size, modification time and 16 blocks of its bytes.
    """
    min_bytes = MIN_CACHED_BYTES if config.tokenizer else MAX_BYTES_IN_MEMORY
    if config.cache == "none" or sum(file.num_bytes for file in files) < min_bytes:
        return None
    digest = blake2b(repr((settings, PART_BYTES, len(held_out))).encode(), digest_size=16)
    for file in (*files, *held_out):
        digest.update(f"{file.name}/{file.num_bytes}/{file.path.stat().st_mtime_ns}/".encode() + read_blocks(file.path))
    folder = find_cache_home() if config.cache == "auto" else Path(config.cache)
    return folder and folder / digest.hexdigest()


def load_tokens(
    folder: Path | None,
    dtype: str,
    num_bytes: int,
    read: Callable[[], Iterable[D]],
    encode: Callable[[Iterable[D]], Encoded],
    summarize: Callable[[list[Any]], dict[str, Any]],
) -> tuple[Stream, dict[str, Any]]:
    """Returns the stream of the non-empty documents, and the result of `summarize`. Raises the errors of the three functions.

    Maps the tokens in the cache `folder`, after writing them if they are missing. If `folder` is None or cannot be written, all
    tokens are in memory.

    dtype: the dtype of the tokens. num_bytes: the size of all text, for progress lines. read: yields all documents. encode:
    tokenizes documents. summarize: takes the statistics in all results of `encode`, and returns a dict that JSON supports, with
    sentences for the user under `notes`.
    """
    problems: list[str] = []
    if folder is not None:
        try:
            if (complete := _read_complete(folder)) is None:
                folder.mkdir(parents=True, exist_ok=True)
                with _hold_lock(folder):
                    if (complete := _read_complete(folder)) is None:
                        written_parts = _write_parts(folder, read(), encode, num_bytes)
                        complete = _write_summary(folder, dtype, written_parts, summarize)
            parts = [_build_part(folder, number) for number in range(complete["parts"])]
            return _map_parts(folder, dtype, parts, complete["digest"]), complete
        except OSError as error:
            problems = [f"the tokens are not kept in {folder}: {error}"]
    tokens, lengths, stats = encode(read())
    summary = summarize([stats])
    arrays = [np.frombuffer(tokens, dtype)] if tokens else []
    return Stream(arrays, _compute_offsets(lengths)), {**summary, "notes": [*problems, *summary["notes"]]}


def _read_complete(folder: Path) -> dict[str, Any] | None:
    """Returns the content of `complete.json`, or None if it is missing, damaged or does not match the sizes of the files."""
    try:
        complete: dict[str, Any] = json.loads((folder / _COMPLETE).read_text("utf-8"))
        return complete if complete["sizes"] == _file_sizes(folder) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _file_sizes(folder: Path) -> dict[str, int]:
    """Returns the size of each file by name. Leaves out the lock, `complete.json` and temporary files."""
    paths = (path for path in sorted(folder.iterdir()) if path.name not in ("lock", _COMPLETE) and path.name[0] != ".")
    return {path.name: path.stat().st_size for path in paths}


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Holds the folder's lock in the block. Prints a line if it has to wait for another process."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_note(f"waiting for another process on this host, which tokenizes the same text into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_parts(folder: Path, documents: Iterable[D], encode: Callable[[list[D]], Encoded], num_bytes: int) -> list[_Part]:
    if (folder / _COMPLETE).exists():  # a file is damaged
        for path in (*folder.glob("*.lengths"), folder / _COMPLETE):
            path.unlink()
    start = last_report = time.monotonic()
    parts: list[_Part] = []
    num_read = num_encoded = 0
    for part_documents, part_bytes in _read_ahead(_split_parts(documents)):
        part = _build_part(folder, len(parts))
        parts.append(part)
        num_read += part_bytes
        if part.lengths.exists():
            continue
        tokens, lengths, stats = encode(part_documents)
        for path, content in zip(part, (tokens.tobytes(), json.dumps(stats).encode(), lengths.tobytes()), strict=True):
            with replace_atomically(path) as file:
                file.write(content)
        num_encoded += part_bytes
        now = time.monotonic()
        if now - last_report > _REPORT_S:
            last_report, speed = now, num_encoded / (now - start)
            progress = f"{num_read / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s"
            print_note(f"tokenized {progress}, {max(0, num_bytes - num_read) / speed:.0f} s left")
    return parts


def _split_parts(documents: Iterable[D]) -> Iterator[tuple[list[D], int]]:
    """Yields the documents of each part, and their size in bytes. A part ends once it has `PART_BYTES`."""
    part: list[D] = []
    num_bytes = 0
    for document in documents:
        part.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= PART_BYTES:
            yield part, num_bytes
            part, num_bytes = [], 0
    if part:
        yield part, num_bytes


def _read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields `items`, none of which is None. A thread reads the next item while the caller processes one."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(next, items, None)
        while (item := pending.result()) is not None:
            pending = pool.submit(next, items, None)
            yield item


def _build_part(folder: Path, number: int) -> _Part:
    return _Part(*(folder / f"{number:05}.{suffix}" for suffix in _Part._fields))


def _write_summary(
    folder: Path, dtype: str, parts: Sequence[_Part], summarize: Callable[[list[Any]], dict[str, Any]]
) -> dict[str, Any]:
    with replace_atomically(folder / _OFFSETS) as file:
        offsets = _compute_offsets(array("q"))
        for part in parts:
            file.write(offsets[:-1].data)
            offsets = _compute_offsets(array("q", part.lengths.read_bytes()), int(offsets[-1]))
        file.write(offsets.data)
    summary = summarize([json.loads(part.stats.read_text("utf-8")) for part in parts])
    digest = _map_parts(folder, dtype, parts).digest
    complete = {"parts": len(parts), "sizes": _file_sizes(folder), "digest": digest, **summary}
    with replace_atomically(folder / _COMPLETE) as file:
        file.write(json.dumps(complete).encode())
    return complete


def _map_parts(folder: Path, dtype: str, parts: Iterable[_Part], digest: str | None = None) -> Stream:
    """Returns the tokens of the parts as one memory-mapped stream. digest: the digest of the stream, or None to compute it."""
    tokens = [map_tokens(part.tokens, dtype) for part in parts if part.tokens.stat().st_size]
    return Stream(tokens, map_tokens(folder / _OFFSETS, "int64"), digest)


def _compute_offsets(lengths: "array[int]", start: int = 0) -> Integers:
    """Returns the offset of each non-empty document and the end of the last one. start: the offset of the first document."""
    sizes = np.array(lengths, np.int64)
    offsets: Integers = np.cumsum(np.concatenate([[start], sizes[sizes > 0]]), dtype=np.int64)
    return offsets
