"""Writes and reads files past the system's page cache, if the file system permits that (O_DIRECT, Linux).

    a chunk | checksum | into 4 MiB of aligned memory | the device reads that

A checkpoint is written once and hardly ever read, and the cache's pages would have to be allocated, zeroed and written first:
that costs more than writing to the disk, and takes memory bandwidth from training. What is read back comes from the disk, so
the disk is what is checked. If direct I/O is refused, the same calls go through the cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from zlib import crc32

BUFFER_BYTES = 4 << 20
_BLOCK_BYTES = 4096
"""Direct writes are multiples of it; no disk in use has longer sectors."""

_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_SMALL_BYTES = 64 << 10


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Writes `chunks` to a file, which is on the disk afterwards; returns the number of bytes, and their CRC-32."""
    crc = 0
    with _File(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        for chunk in chunks:
            crc = crc32(chunk, crc)
            file.add(memoryview(chunk))
        file.end()
        return file.done, crc


def crc_of_file(path: Path) -> int:
    """Returns the CRC-32 of a file's bytes, read from the disk."""
    crc = 0
    with _File(path, os.O_RDONLY) as file:
        while got := file.fill():
            crc = crc32(file.memory[:got], crc)
    return crc


class _File(AbstractContextManager["_File"]):
    """Reads or writes a file through `memory`, an aligned buffer. done: bytes written or read so far."""

    def __init__(self, path: Path, flags: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # begins at a page
        self.done = self._filled = 0
        self._is_direct = bool(_DIRECT)
        try:
            self._descriptor = os.open(path, flags | _DIRECT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._is_direct = False
            self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def add(self, chunk: memoryview) -> None:
        """Copies `chunk` into the aligned buffer, and writes the buffer each time that it is full."""
        while chunk:
            part = chunk[: BUFFER_BYTES - self._filled]
            _copy(self.memory[self._filled :], part)
            self._filled += len(part)
            chunk = chunk[len(part) :]
            if self._filled == BUFFER_BYTES:
                self._write()

    def end(self) -> None:
        """Writes the rest, and waits until everything is on the disk."""
        if self._filled % _BLOCK_BYTES:
            self._go_through_cache()
        self._write()
        os.fsync(self._descriptor)

    def fill(self) -> int:
        """Reads the next bytes into `memory`; returns how many, 0 at the end."""
        left = os.fstat(self._descriptor).st_size - self.done
        got = self._try(lambda: os.preadv(self._descriptor, [self.memory], self.done)) if left > 0 else 0
        self.done += got
        return got

    def _write(self) -> None:
        """Writes the filled part of the buffer to the file."""
        written = 0
        while written < self._filled:
            rest = self.memory[written : self._filled]
            written += self._try(lambda rest=rest: os.write(self._descriptor, rest))  # type: ignore[misc]
        self.done += self._filled
        self._filled = 0

    def _try(self, call: Callable[[], int]) -> int:
        """Makes the system call; if direct I/O is refused (alignment, or part of a block), goes through the cache from now
        on.
        """
        try:
            return call()
        except OSError as error:
            if error.errno not in _REFUSALS or not self._is_direct:
                raise
            self._go_through_cache()
            return call()

    def _go_through_cache(self) -> None:
        """Turns off direct I/O for the rest of the file."""
        if self._is_direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
            self._is_direct = False


def _copy(target: memoryview, source: memoryview) -> None:
    """Copies to the beginning of `target`; large copies release the GIL, so that other threads continue."""
    if source.readonly or len(source) < _SMALL_BYTES:
        target[: len(source)] = source
    else:
        holder = ctypes.c_char * len(source)
        ctypes.memmove(holder.from_buffer(target), holder.from_buffer(source), len(source))
