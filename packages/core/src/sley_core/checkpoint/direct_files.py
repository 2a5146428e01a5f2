"""Files written and read past the system's page cache, where a file system permits that (O_DIRECT, Linux).

    a chunk | checksum | into 4 MiB of aligned memory | the device reads that

A checkpoint is written once and hardly ever read, and the cache's pages would have to be found, zeroed and written first: that
costs more than the bytes' way to the disk, and takes bandwidth from training. What is read back comes from the disk, so it is
the disk that is checked. Where direct I/O is refused the same calls go through the cache.
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
    """Writes `chunks` to a file, which is on the disk afterwards; returns how many bytes they are, and their CRC-32."""
    crc = 0
    with _File(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        for chunk in chunks:
            crc = crc32(chunk, crc)
            file.add(memoryview(chunk))
        file.end()
        return file.done, crc


def crc_of_file(path: Path) -> int:
    """Returns the CRC-32 of a file's bytes, as the disk has them."""
    crc = 0
    with _File(path, os.O_RDONLY) as file:
        while got := file.fill():
            crc = crc32(file.memory[:got], crc)
    return crc


class _File(AbstractContextManager["_File"]):
    """A file that goes through `memory`. done: bytes that are written, or read."""

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
        """Writes what is left, and waits until all is on the disk."""
        if self._filled % _BLOCK_BYTES:
            self._go_through_cache()
        self._write()
        os.fsync(self._descriptor)

    def fill(self) -> int:
        """Reads what comes next into `memory`; returns how many bytes, 0 at the end."""
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
        """Calls the system, through the cache from now on if it refuses otherwise: another alignment, or a part of a block."""
        try:
            return call()
        except OSError as error:
            if error.errno not in _REFUSALS or not self._is_direct:
                raise
            self._go_through_cache()
            return call()

    def _go_through_cache(self) -> None:
        """Turns off direct I/O for the rest of the file, whose length is no multiple of a block."""
        if self._is_direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
            self._is_direct = False


def _copy(target: memoryview, source: memoryview) -> None:
    """Copies to the beginning of `target`; other threads of Python go on meanwhile where it is much."""
    if source.readonly or len(source) < _SMALL_BYTES:
        target[: len(source)] = source
    else:
        holder = ctypes.c_char * len(source)
        ctypes.memmove(holder.from_buffer(target), holder.from_buffer(source), len(source))
