"""Tokenizes a corpus once and keeps the tokens on disk. Later starts, and all ranks of a host, map them; torch-free.

    ~/.cache/sley/data/DIGEST/           the digest of files, tokenizer and settings
        00000.tokens                     the tokens of about 32 MiB of text
        00000.stats                      JSON about them, if the dataset has any
        00000.lengths                    the number of tokens of each document; written last
        complete.json                    written when all parts are complete

One process of a host works and holds a lock; the others wait for it. If it is killed, its parts remain, and the next process
writes only the missing ones.
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
    from sley_data.files import File

PART_BYTES = 1 << 25
"""The bytes of text in a part."""

BATCH_BYTES = 1 << 18
"""The bytes of text that a worker process tokenizes at a time."""

WORTH_BYTES = 1 << 23
"""Less text than this is tokenized at each start, in about a second."""

_REPORT_S = 5.0
"""The seconds between two lines about the progress."""

Encoded: TypeAlias = "tuple[array[int], array[int], Any]"
"""The tokens of documents, concatenated; the length of each document, 64 bits; and their stats, or None."""

T = TypeVar("T")

_COMPLETE = "complete.json"


class Part(NamedTuple):
    """The files of a part."""

    tokens: Path
    lengths: Path
    stats: Path

    def read_stats(self) -> list[Any]:
        """Returns the stats of the part's batches."""
        stats: list[Any] = json.loads(self.stats.read_text("utf-8"))
        return stats


def cache_folder(
    cache: Path | str, files: Sequence[File], held_out: Sequence[File], settings: object, min_bytes: int
) -> Path | None:
    """Returns the folder for the tokens of `files`, or None if they are not kept.

    cache: the plan's value. held_out: the files whose documents are excluded. settings: everything else that decides the
    tokens. min_bytes: the size of `files` from which on tokens are kept. The name, the size, the modification time and 16
    blocks of bytes identify a file.
    """
    if cache == "none" or sum(file.num_bytes for file in files) < min_bytes:
        return None
    digest = blake2b(repr((settings, PART_BYTES, len(held_out))).encode(), digest_size=16)
    for file in (*files, *held_out):
        digest.update(f"{file.name}/{file.num_bytes}/{file.path.stat().st_mtime_ns}/".encode() + read_blocks(file.path))
    folder = home() if cache == "auto" else Path(cache)
    return folder and folder / digest.hexdigest()


def home() -> Path | None:
    """Returns the default folder for prepared data, or None if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sley" / "data"
    except RuntimeError:
        return None


def prepare(
    folder: Path,
    documents: Iterable[T],
    size: Callable[[T], int],
    encode: Callable[[list[T]], Encoded],
    num_bytes: int,
    summarize: Callable[[list[Part]], dict[str, Any]],
) -> dict[str, Any]:
    """Returns the content of `complete.json` in `folder`. First writes the missing parts, or waits for a process that does.

    size: returns the number of bytes of a document. encode: tokenizes documents, in worker processes. num_bytes: the size of
    all text, for the progress. summarize: returns what `complete.json` keeps of all parts. Raises OSError if the folder cannot
    be written.
    """
    if (complete := _read_complete(folder)) is None:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if (complete := _read_complete(folder)) is None:
                count = _write_parts(folder, documents, size, encode, num_bytes)
                summary = summarize(part_files(folder, count))
                complete = {"parts": count, "sizes": _file_sizes(folder), **summary}
                with replace_atomically(folder / _COMPLETE) as file:
                    file.write(json.dumps(complete).encode())
    return complete


def part_files(folder: Path, count: int) -> list[Part]:
    """Returns the files of each of `count` parts."""
    return [_part(folder, number) for number in range(count)]


def _part(folder: Path, number: int) -> Part:
    return Part(*(folder / f"{number:05}.{suffix}" for suffix in Part._fields))


def _read_complete(folder: Path) -> dict[str, Any] | None:
    """Returns the content of `complete.json`, or None if it is missing or damaged or a file has another size than it says."""
    try:
        complete: dict[str, Any] = json.loads((folder / _COMPLETE).read_text("utf-8"))
        return complete if complete["sizes"] == _file_sizes(folder) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _file_sizes(folder: Path) -> dict[str, int]:
    """Returns the sizes of all files by name, except those of the lock, `complete.json` and files that are being written."""
    paths = (path for path in sorted(folder.iterdir()) if path.name not in ("lock", _COMPLETE) and path.name[0] != ".")
    return {path.name: path.stat().st_size for path in paths}


def _is_complete(part: Part) -> bool:
    """Returns whether a part exists and has as many tokens as its lengths say."""
    if not part.tokens.exists() or not part.lengths.exists():
        return False
    lengths = part.lengths.read_bytes()
    if len(lengths) % 8:
        return False
    count = sum(array("q", lengths))
    return part.tokens.stat().st_size in (count, 2 * count, 4 * count)


class _Batch(NamedTuple):
    """Documents of one part, and their size in bytes."""

    part: int
    num_bytes: int
    documents: list[Any]


def _batches(documents: Iterable[T], size: Callable[[T], int]) -> Iterator[_Batch]:
    """Yields all documents in batches. A part and a batch end with the document with which they reach their size."""
    part = part_bytes = batch_bytes = 0
    batch: list[T] = []
    for document in documents:
        if batch and (part_bytes >= PART_BYTES or batch_bytes >= BATCH_BYTES):
            yield _Batch(part, batch_bytes, batch)
            batch, batch_bytes = [], 0
        if part_bytes >= PART_BYTES:
            part, part_bytes = part + 1, 0
        batch.append(document)
        part_bytes += size(document)
        batch_bytes += size(document)
    if batch:
        yield _Batch(part, batch_bytes, batch)


def _encode_batch(encode: Callable[[list[Any]], Encoded], batch: _Batch) -> tuple[int, int, Encoded]:
    return batch.part, batch.num_bytes, encode(batch.documents)


def _write_parts(
    folder: Path, documents: Iterable[T], size: Callable[[T], int], encode: Callable[[list[T]], Encoded], num_bytes: int
) -> int:
    """Writes the missing parts, and returns the number of all parts."""
    start = last_report = time.monotonic()
    count = num_skipped = num_encoded = 0

    def missing_batches() -> Iterator[_Batch]:
        nonlocal count, num_skipped
        for number, batches in groupby(_batches(documents, size), lambda batch: batch.part):
            count, is_complete = number + 1, _is_complete(_part(folder, number))
            for batch in batches:
                if is_complete:
                    num_skipped += batch.num_bytes
                else:
                    yield batch

    with closing(map_batches(partial(_encode_batch, encode), missing_batches())) as results:
        for number, part_results in groupby(results, lambda result: result[0]):
            part, lengths, stats = _part(folder, number), array("q"), []
            with replace_atomically(part.tokens) as file:
                for _, batch_bytes, (tokens, batch_lengths, batch_stats) in part_results:
                    file.write(tokens)
                    lengths += batch_lengths
                    stats += [] if batch_stats is None else [batch_stats]
                    num_encoded += batch_bytes
                    now = time.monotonic()
                    if now - last_report > _REPORT_S:
                        last_report, speed, num_done = now, num_encoded / (now - start), num_skipped + num_encoded
                        progress = f"{num_done / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s"
                        say(f"tokenized {progress}, {max(0, num_bytes - num_done) / speed:.0f} s left")
            if stats:
                with replace_atomically(part.stats) as file:
                    file.write(json.dumps(stats).encode())
            with replace_atomically(part.lengths) as file:
                file.write(lengths)
    return count


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, and reports if another process has it."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process on this host, which tokenizes the same text into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """Prints a line for the user, on any rank."""
    print(f"data: {text}", file=sys.stderr, flush=True)
