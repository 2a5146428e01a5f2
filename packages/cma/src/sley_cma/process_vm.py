"""Cross-memory attach (CMA): copies between two processes by Linux's `process_vm_readv` and `process_vm_writev`."""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

MAX_SPANS = 1024
"""The maximum number of spans per call (IOV_MAX of Linux)."""

MAX_BYTES = 1 << 30
"""The maximum number of bytes per call. Linux itself silently truncates a copy just below 2 GiB (MAX_RW_COUNT)."""


class MemorySpan(NamedTuple):
    """A span of `num_bytes` bytes at `address` in the memory of a process."""

    address: int
    num_bytes: int


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None  # on other systems, ranks never connect


def read(pid: int, local: Sequence[MemorySpan], remote: Sequence[MemorySpan]) -> int:
    """Copies the spans `remote` of process `pid` to the spans `local` of equal sizes, without the GIL.

    Returns the number of copied bytes, or -1 if a system call fails.
    """
    return _copy(_LIBC.process_vm_readv, pid, local, remote)


def write(pid: int, local: Sequence[MemorySpan], remote: Sequence[MemorySpan]) -> int:
    """Copies the spans `local`, one after another, to the spans `remote` of process `pid`, without the GIL.

    Returns the number of copied bytes, or -1 if a system call fails.
    """
    return _copy(_LIBC.process_vm_writev, pid, local, remote)


def _copy(function: Any, pid: int, local: Sequence[MemorySpan], remote: Sequence[MemorySpan]) -> int:
    """Calls `function` as often as Linux's limits require, and returns the number of copied bytes, or -1 if a call fails."""
    num_copied = 0
    for local_part, remote_part in _split_calls(local, remote):
        local_vectors, remote_vectors = _vectors(local_part), _vectors(remote_part)
        num_bytes = int(function(pid, local_vectors, len(local_vectors), remote_vectors, len(remote_vectors), 0))
        if num_bytes < 0:
            return -1
        num_copied += num_bytes
    return num_copied


def _split_calls(
    local: Sequence[MemorySpan], remote: Sequence[MemorySpan]
) -> Iterator[tuple[Sequence[MemorySpan], Sequence[MemorySpan]]]:
    """Yields the local and remote spans of each call. Splits them if they exceed the limits of a call."""
    if len(remote) <= MAX_SPANS and len(local) <= MAX_SPANS and sum(span.num_bytes for span in remote) <= MAX_BYTES:
        yield local, remote
        return
    local_part: list[MemorySpan] = []
    remote_part: list[MemorySpan] = []
    num_remaining = MAX_BYTES
    for local_span, remote_span in zip(local, remote, strict=True):
        assert local_span.num_bytes == remote_span.num_bytes, f"{local_span} for {remote_span}"
        offset = 0
        while offset < local_span.num_bytes:
            if not num_remaining or len(local_part) == MAX_SPANS:
                yield local_part, remote_part
                local_part, remote_part, num_remaining = [], [], MAX_BYTES
            size = min(local_span.num_bytes - offset, num_remaining)
            local_part.append(MemorySpan(local_span.address + offset, size))
            remote_part.append(MemorySpan(remote_span.address + offset, size))
            offset += size
            num_remaining -= size
    yield local_part, remote_part


def _vectors(spans: Sequence[MemorySpan]) -> ctypes.Array[_Vector]:
    """Returns `spans` as an array of `iovec` structs."""
    return (_Vector * len(spans))(*(_Vector(*span) for span in spans))
