"""Tokenizes a corpus once, and keeps the result on disk: every later start, and every rank of a host, maps it; torch-free.

    ~/.cache/sley/data/DIGEST/           of files, tokenizer and settings
        00000.tokens  00000.lengths      of about 32 MiB of text each; the second is written last
        complete.json                    written when all parts are there

One process of a host works, under a lock; others wait for it. A process that was killed leaves whole parts, and the next one
goes on after them.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sley_core.api.files import appearing
from sley_data.files import File, sample_of

PART_BYTES = 1 << 25
"""Bytes of text in a part."""

WORTH_BYTES = 1 << 23
"""Less text than this is tokenized anew each time: it takes about a second."""

_TELL_S = 5.0
"""Seconds between two lines about progress."""

Part: TypeAlias = "tuple[array[int], array[int]]"
"""Tokens of documents joined, and the length of each, 64 bits."""

T = TypeVar("T")

_COMPLETE = "complete.json"


def folder_of(cache: Path | str, files: Sequence[File], held_out: Sequence[File], settings: object) -> Path | None:
    """Returns where the tokens of `files` lie; None if they are not kept.

    cache: the plan's. held_out: the files whose documents are left out. settings: all else that decides the tokens. Files are
    told apart by their names, sizes, times of change, and 16 blocks of bytes of each.
    """
    if cache == "none" or sum(file.num_bytes for file in files) < WORTH_BYTES:
        return None
    digest = blake2b(repr((settings, PART_BYTES, len(held_out))).encode(), digest_size=16)
    for file in (*files, *held_out):
        digest.update(f"{file.name}/{file.num_bytes}/{file.path.stat().st_mtime_ns}/".encode() + sample_of(file.path))
    folder = home() if cache == "auto" else Path(cache)
    return folder and folder / digest.hexdigest()


def home() -> Path | None:
    """Returns the folder in which data are kept by default; None if the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sley" / "data"
    except RuntimeError:
        return None


def prepare(
    folder: Path,
    documents: Iterable[T],
    size: Callable[[T], int],
    make: Callable[[int, Iterator[T]], Part],
    num_bytes: int,
    facts: Callable[[int], dict[str, Any]],
) -> dict[str, Any]:
    """Returns what `complete.json` of `folder` says; first writes the parts that are missing, or waits for a process that does.

    size: returns the bytes of a document. make: tokenizes the documents of a part, of which it gets the number. num_bytes: of
    all text, for the progress. facts: returns what to keep, from the number of parts. Raises OSError if the folder cannot be
    written.
    """
    if (complete := _read(folder)) is None:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if (complete := _read(folder)) is None:
                count = _write_parts(folder, documents, size, make, num_bytes)
                complete = {"parts": count, "sizes": _sizes(folder, count), **facts(count)}
                with appearing(folder / _COMPLETE) as file:
                    file.write(json.dumps(complete).encode())
    return complete


def part_files(folder: Path, count: int) -> list[tuple[Path, Path]]:
    """Returns the files of tokens and lengths of each of `count` parts."""
    return [(folder / f"{number:05}.tokens", folder / f"{number:05}.lengths") for number in range(count)]


def _read(folder: Path) -> dict[str, Any] | None:
    """Returns what `complete.json` says; None if it is missing or damaged, or if a part has not the size that it says."""
    try:
        complete: dict[str, Any] = json.loads((folder / _COMPLETE).read_text("utf-8"))
        return complete if complete["sizes"] == _sizes(folder, complete["parts"]) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _sizes(folder: Path, count: int) -> list[int]:
    return [path.stat().st_size for pair in part_files(folder, count) for path in pair]


def _is_whole(tokens: Path, lengths: Path) -> bool:
    """Returns whether a part is there, with as many tokens as its lengths say."""
    if not tokens.exists() or not lengths.exists():
        return False
    stored = lengths.read_bytes()
    if len(stored) % 8:
        return False
    count = sum(array("q", stored))
    return tokens.stat().st_size in (2 * count, 4 * count)


def _write_parts(
    folder: Path, documents: Iterable[T], size: Callable[[T], int], make: Callable[[int, Iterator[T]], Part], num_bytes: int
) -> int:
    """Writes the parts that are missing; returns how many there are."""
    begun = last = time.monotonic()
    sizes = [0]
    num_done = 0

    def part_of(document: T) -> int:
        if sizes[-1] >= PART_BYTES:
            sizes.append(0)
        sizes[-1] += size(document)
        return len(sizes)

    count = 0
    for number, (_, part) in enumerate(groupby(documents, part_of)):
        count = number + 1
        ((tokens, lengths),) = part_files(folder, count)[number:]
        if _is_whole(tokens, lengths):
            continue
        for path, value in zip((tokens, lengths), make(number, part), strict=True):
            with appearing(path) as file:
                file.write(value)
        num_done += sizes[number]
        now = time.monotonic()
        if now - last > _TELL_S:
            last, speed, num_read = now, num_done / (now - begun), sum(sizes)
            left = max(0, num_bytes - num_read) / speed
            say(f"tokenized {num_read / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB, {speed / 1e6:.1f} MB/s, {left:.0f} s left")
    return count


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; says that it waits, if another process has it."""
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waits for another process of this host, which tokenizes the same text into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """Prints a line for the user, from whichever rank."""
    print(f"data: {text}", file=sys.stderr, flush=True)
