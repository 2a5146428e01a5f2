"""Tokenizes a corpus once and caches the tokens on disk. Later runs, and all ranks of a host, map the files; torch-free.

    ~/.cache/sley/data/DIGEST/           the digest of files, tokenizer and settings
        00000.tokens                     the tokens of about 32 MiB of text
        00000.stats                      statistics about them as JSON, if the dataset has any
        00000.lengths                    the number of tokens of each document; written last
        complete.json                    written when all parts are complete

One process of a host holds a lock and tokenizes, while the other processes wait. If that process is killed, its parts remain,
and the next process writes only the missing parts.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from sley_core.api.files import replace_atomically
from sley_data.formats import read_blocks
from sley_data.workers import map_batches

if TYPE_CHECKING:
    from sley_data.files import DataFile

PART_BYTES = 1 << 25
"""The size of the text of a part."""

BATCH_BYTES = 1 << 18
"""The size of the text that a worker process tokenizes at a time."""

MIN_CACHED_BYTES = 1 << 23
"""The minimum size of cached text. Less text is tokenized again in each run, in about a second."""

_REPORT_S = 5.0
"""The time in seconds between two progress lines."""

Encoded: TypeAlias = "tuple[array[int], array[int], Any]"
"""The concatenated tokens of documents, the length of each document (64 bits), and their statistics or None."""

T = TypeVar("T")

_COMPLETE = "complete.json"


class Part(NamedTuple):
    """The paths of a part's files."""

    tokens: Path
    lengths: Path
    stats: Path

    def read_stats(self) -> list[Any]:
        """Returns the statistics of the part's batches."""
        stats: list[Any] = json.loads(self.stats.read_text("utf-8"))
        return stats


def cache_folder(
    cache: Path | str, files: Sequence[DataFile], held_out: Sequence[DataFile], settings: object, min_bytes: int
) -> Path | None:
    """Returns the folder for the tokens of `files`, or None if they are not cached.

    cache: the plan's value. held_out: the files whose documents are excluded. settings: all other values that determine the
    tokens. min_bytes: the minimum size of all `files` for caching. The name, size, modification time and 16 blocks of bytes
    identify a file.
    """
    if cache == "none" or sum(file.num_bytes for file in files) < min_bytes:
        return None
    digest = blake2b(repr((settings, PART_BYTES, len(held_out))).encode(), digest_size=16)
    for file in (*files, *held_out):
        digest.update(f"{file.name}/{file.num_bytes}/{file.path.stat().st_mtime_ns}/".encode() + read_blocks(file.path))
    folder = cache_home() if cache == "auto" else Path(cache)
    return folder and folder / digest.hexdigest()


def cache_home() -> Path | None:
    """Returns the default folder for prepared data, or None if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sley" / "data"
    except RuntimeError:
        return None


def prepare_parts(
    folder: Path,
    documents: Iterable[T],
    size_of: Callable[[T], int],
    encode: Callable[[list[T]], Encoded],
    num_bytes: int,
    summarize: Callable[[list[Part]], dict[str, Any]],
) -> dict[str, Any]:
    """Writes the missing parts in `folder`, or waits for a process that does. Returns the content of `complete.json`.

    size_of: returns the number of bytes of a document. encode: tokenizes documents in a worker process. num_bytes: the size of
    all text, for progress lines. summarize: returns the remaining content of `complete.json`. Raises OSError if the folder
    cannot be written.
    """
    if (complete := _read_complete(folder)) is None:
        folder.mkdir(parents=True, exist_ok=True)
        with _hold_lock(folder):
            if (complete := _read_complete(folder)) is None:
                num_parts = _write_parts(folder, documents, size_of, encode, num_bytes)
                summary = summarize(list_parts(folder, num_parts))
                complete = {"parts": num_parts, "sizes": _file_sizes(folder), **summary}
                with replace_atomically(folder / _COMPLETE) as file:
                    file.write(json.dumps(complete).encode())
    return complete


def list_parts(folder: Path, num_parts: int) -> list[Part]:
    """Returns the paths of all parts."""
    return [_part_paths(folder, number) for number in range(num_parts)]


def _part_paths(folder: Path, number: int) -> Part:
    return Part(*(folder / f"{number:05}.{suffix}" for suffix in Part._fields))


def _read_complete(folder: Path) -> dict[str, Any] | None:
    """Returns the content of `complete.json`, or None if it is missing, damaged or does not match the sizes of the files."""
    try:
        complete: dict[str, Any] = json.loads((folder / _COMPLETE).read_text("utf-8"))
        return complete if complete["sizes"] == _file_sizes(folder) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _file_sizes(folder: Path) -> dict[str, int]:
    """Returns the size of each file by name, without the lock, `complete.json` and temporary files."""
    paths = (path for path in sorted(folder.iterdir()) if path.name not in ("lock", _COMPLETE) and path.name[0] != ".")
    return {path.name: path.stat().st_size for path in paths}


def _is_complete(part: Part) -> bool:
    """Returns whether a part exists and its number of tokens matches its lengths."""
    if not part.tokens.exists() or not part.lengths.exists():
        return False
    lengths = part.lengths.read_bytes()
    if len(lengths) % 8:
        return False
    num_tokens = sum(array("q", lengths))
    return part.tokens.stat().st_size in (num_tokens, 2 * num_tokens, 4 * num_tokens)


class _Batch(NamedTuple):
    """Documents of the part with the number `part`, and their size in bytes."""

    part: int
    num_bytes: int
    documents: list[Any]

    def __str__(self) -> str:
        """Describes the batch by the name of its first document, which is a (name, content) pair or has an attribute `name`."""
        first, count = self.documents[0], len(self.documents) - 1
        name = first[0] if isinstance(first, tuple) else first.name
        return f"`{name}` and the next {count} documents" if count else f"`{name}`"


def _split_batches(documents: Iterable[T], size_of: Callable[[T], int]) -> Iterator[_Batch]:
    """Yields all documents in batches. A part or batch ends once it has PART_BYTES or BATCH_BYTES."""
    part = part_bytes = batch_bytes = 0
    batch: list[T] = []
    for document in documents:
        if batch and (part_bytes >= PART_BYTES or batch_bytes >= BATCH_BYTES):
            yield _Batch(part, batch_bytes, batch)
            batch, batch_bytes = [], 0
        if part_bytes >= PART_BYTES:
            part, part_bytes = part + 1, 0
        batch.append(document)
        part_bytes += size_of(document)
        batch_bytes += size_of(document)
    if batch:
        yield _Batch(part, batch_bytes, batch)


def _encode_batch(encode: Callable[[list[Any]], Encoded], batch: _Batch) -> tuple[int, int, Encoded]:
    return batch.part, batch.num_bytes, encode(batch.documents)


def _write_parts(
    folder: Path, documents: Iterable[T], size_of: Callable[[T], int], encode: Callable[[list[T]], Encoded], num_bytes: int
) -> int:
    """Writes the missing parts, and returns the number of all parts."""
    start = last_report = time.monotonic()
    num_parts = skipped_bytes = encoded_bytes = 0

    def missing_batches() -> Iterator[_Batch]:
        nonlocal num_parts, skipped_bytes
        for number, batches in groupby(_split_batches(documents, size_of), lambda batch: batch.part):
            num_parts, is_complete = number + 1, _is_complete(_part_paths(folder, number))
            for batch in batches:
                if is_complete:
                    skipped_bytes += batch.num_bytes
                else:
                    yield batch

    with closing(map_batches(partial(_encode_batch, encode), missing_batches())) as results:
        for number, part_results in groupby(results, lambda result: result[0]):
            part, lengths, stats = _part_paths(folder, number), array("q"), []
            with replace_atomically(part.tokens) as file:
                for _, batch_bytes, (tokens, batch_lengths, batch_stats) in part_results:
                    file.write(tokens)
                    lengths += batch_lengths
                    stats += [] if batch_stats is None else [batch_stats]
                    encoded_bytes += batch_bytes
                    now = time.monotonic()
                    if now - last_report > _REPORT_S:
                        last_report, speed, done_bytes = now, encoded_bytes / (now - start), skipped_bytes + encoded_bytes
                        progress = f"{done_bytes / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s"
                        report(f"tokenized {progress}, {max(0, num_bytes - done_bytes) / speed:.0f} s left")
            if stats:
                with replace_atomically(part.stats) as file:
                    file.write(json.dumps(stats).encode())
            with replace_atomically(part.lengths) as file:
                file.write(lengths)
    return num_parts


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Holds the folder's lock in the block. Prints a line if another process holds it."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process on this host, which tokenizes the same text into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def report(text: str) -> None:
    """Prints a line to stderr, on any rank."""
    print(f"data: {text}", file=sys.stderr, flush=True)
