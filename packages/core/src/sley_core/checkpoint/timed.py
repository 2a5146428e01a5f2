"""Reads with a time limit: a disk that stalls on one rank must not keep all ranks waiting silently.

main thread    | call ── waits ──────────── limit: StalledError, with the file
reader thread         └── the system's read, which cannot be interrupted
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from sley_core.errors import RunError
from sley_core.files.folders import ReadableFolder, crc_of

_STEP_BYTES = 16 << 20
"""What is read at once, within the limit."""


class StalledError(RunError):
    """Raised for a read that did not return within its time limit."""


class TimedReads(AbstractContextManager["TimedReads"]):
    """Reads files in a separate thread while it is entered. limit_s: seconds for a folder to give one answer, or 16 MiB.

    The buffer of a stalled read stays with that read, which may still complete at any time.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._tasks: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._stalled = ""

    def __enter__(self) -> TimedReads:
        Thread(target=self._run, name="sley-checkpoint-reads", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._tasks.put(None)

    def call(self, file: str, read: Callable[[], Any]) -> Any:
        """Returns `read()`. Raises what that raises, and StalledError if it has not returned within the limit; from then on, at
        once.
        """
        if not self._stalled:
            self._tasks.put(read)
            try:
                found, error = self._results.get(timeout=self.limit_s)
            except Empty:
                self._stalled = f"reading {file} has not gone on for {self.limit_s:g} s"
            else:
                if error is not None:
                    raise error
                return found
        raise StalledError("checkpoint-load", self._stalled, hint="its file system does not answer on this rank")

    def _run(self) -> None:
        """Runs in the thread: calls each task, and puts its result or its error into the queue."""
        while (read := self._tasks.get()) is not None:
            try:
                self._results.put((read(), None))
            except BaseException as error:  # whatever a file system raises is raised where it is waited for
                self._results.put((None, error))


class TimedFolder:
    """Is the folder `folder`, read through `reads`."""

    def __init__(self, folder: ReadableFolder, reads: TimedReads) -> None:
        self.folder = folder
        self.reads = reads

    @property
    def text(self) -> str:
        return self.folder.text

    def child(self, name: str) -> TimedFolder:
        return TimedFolder(self.folder.child(name), self.reads)

    def names(self) -> list[str]:
        return list(self._call("", self.folder.names))

    def read(self, name: str, first: int = 0, last: int | None = None) -> bytearray:
        return bytearray(self._call(name, partial(self.folder.read, name, first, last)))

    def read_into(self, name: str, first: int, memory: memoryview) -> int:
        for done in range(0, len(memory), _STEP_BYTES):
            part = memory[done : done + _STEP_BYTES]
            got = int(self._call(name, partial(self.folder.read_into, name, first + done, part)))
            if got < len(part):
                return done + got
        return len(memory)

    def num_bytes(self, name: str) -> int:
        return int(self._call(name, partial(self.folder.num_bytes, name)))

    def crc(self, name: str) -> int:
        return crc_of(self, name)

    def is_unfinished(self, name: str, last_file: str) -> bool:
        return bool(self._call(name, partial(self.folder.is_unfinished, name, last_file)))

    def _call(self, name: str, read: Callable[[], Any]) -> Any:
        return self.reads.call(f"{self.text}/{name}" if name else self.text, read)
