"""Tokenizes a corpus once, on all cores, and caches the tokens on disk, for later runs and all ranks of a host; torch-free.

    ~/.cache/sley/data/DIGEST/           the digest of files, tokenizer and settings
        00000.tokens                     the tokens of about 32 MiB of text
        00000.stats                      statistics about them as JSON, if the dataset has any
        00000.lengths                    the number of tokens of each document; written last
        complete.json                    written when all parts are complete

One process of a host holds a lock and tokenizes, while the other processes wait. If that process is killed, its parts remain,
and the next process writes only the missing parts. Worker processes tokenize, one for each core. They are new Python processes,
since a rank may have threads and a GPU, and its main module may lack a guard.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE, Popen
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

from sley_core.api.files import replace_atomically
from sley_core.errors import RunError
from sley_data.files import report

PART_BYTES = 1 << 25
"""The size of the text of a part."""

BATCH_BYTES = 1 << 18
"""The size of the text that a worker process tokenizes at a time."""

_REPORT_S = 5.0
"""The time in seconds between two progress lines."""

Encoded: TypeAlias = "tuple[array[int], array[int], Any]"
"""The concatenated tokens of documents, the length of each document (64 bits), and their statistics or None."""

T = TypeVar("T")
R = TypeVar("R")

_COMPLETE = "complete.json"


class Part(NamedTuple):
    """The paths of a part's files."""

    tokens: Path
    lengths: Path
    stats: Path

    def read_stats(self) -> list[Any]:
        """Returns the statistics of the part's batches, if the dataset has any."""
        stats: list[Any] = json.loads(self.stats.read_text("utf-8")) if self.stats.exists() else []
        return stats


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
                if (folder / _COMPLETE).exists():  # some file is damaged
                    for path in (*folder.glob("*.lengths"), folder / _COMPLETE):
                        path.unlink()
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
            num_parts, is_complete = number + 1, _part_paths(folder, number).lengths.exists()
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


_COMMAND = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from sley_data.cache import run_worker; run_worker()"
)


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def map_batches(function: Callable[[T], R], batches: Iterable[T]) -> Generator[R]:
    """Yields the result of `function` for each batch, in order. With one core, this process calls the function.

    At most four batches per core are in memory. Function, batches and results must be picklable. Raises the errors of
    `function`, and RunError "data-worker" if a worker process dies.
    """
    if num_cores() == 1:
        yield from map(function, batches)
        return
    idle_workers: SimpleQueue[_Worker] = SimpleQueue()

    def call(batch: T) -> R:
        worker = idle_workers.get()
        try:
            result: R = worker.call(batch)
            return result
        finally:
            idle_workers.put(worker)

    pending: deque[Future[R]] = deque()
    with ExitStack() as stack:
        for _ in range(num_cores()):
            idle_workers.put(stack.enter_context(_Worker(function)))
        pool = stack.enter_context(ThreadPoolExecutor(num_cores()))
        for batch in batches:
            pending.append(pool.submit(call, batch))
            if len(pending) == 4 * num_cores():
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _Worker:
    """A process that calls `function` on each batch that it receives. Closing its pipe ends it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # one thread: each core has a process
        self._process = Popen([sys.executable, "-c", _COMMAND], stdin=PIPE, stdout=PIPE, env=environment)
        self._send(sys.path)
        self._send(function)

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(value, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def call(self, batch: Any) -> Any:
        assert self._process.stdout is not None
        try:
            self._send(batch)
            is_error, result = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # the last if the process died mid-reply
            message = f"a worker process exited with status {self._process.wait()} while tokenizing {batch}"
            hint = "if the system killed the process, split large documents with `separator`, or use a host with more memory"
            raise RunError("data-worker", message, path=("data",), hint=hint) from None
        if is_error:
            raise result
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def run_worker() -> None:
    """Runs a worker: reads the function and the batches from stdin, and writes the results to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which stops the workers
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that output of libraries is not part of a reply
    try:
        function = pickle.load(requests)
        while True:
            batch = pickle.load(requests)
            try:
                reply = (False, function(batch))
            except Exception as error:
                reply = (True, error)
            pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent has ended
