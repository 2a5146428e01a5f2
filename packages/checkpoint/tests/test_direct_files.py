"""Files that go past the page cache, where they may, have the bytes that went in."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_checkpoint import direct_files
from sley_checkpoint.direct_files import crc_of_file, write_file

BUFFER = 16 << 10

needs_direct = pytest.mark.skipif(not direct_files._DIRECT, reason="this system has no direct I/O")


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_files, "BUFFER_BYTES", BUFFER)


def chunks_of(sizes: list[int]) -> list[bytes | memoryview]:
    """Every other one as `TensorPiece` has them: writable memory."""
    drawn = [os.urandom(size) for size in sizes]
    return [memoryview(bytearray(one)) if at % 2 else one for at, one in enumerate(drawn)]


@given(st.lists(st.one_of(st.integers(0, 40_000), st.sampled_from([4096, BUFFER, 2 * BUFFER, 70_000])), max_size=6))
@settings(deadline=None, max_examples=60)
def test_a_file_has_what_was_written_and_its_checksum(tmp_path_factory, sizes):
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_files, "BUFFER_BYTES", BUFFER)
        chunks = chunks_of(sizes)
        found = write_file(folder / "file", chunks)
        data = b"".join(chunks)
        assert (folder / "file").read_bytes() == data
        assert found == (len(data), crc32(data))
        assert crc_of_file(folder / "file") == crc32(data)


def test_a_longer_file_of_before_is_gone(small_buffer, tmp_path):
    for size in (3 * BUFFER + 5, 7):
        write_file(tmp_path / "file", [bytes(size)])
        assert (tmp_path / "file").stat().st_size == size


@needs_direct
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("where", ["open", "write", "preadv"])
def test_a_file_system_that_refuses_direct_io_is_written_through_the_cache(small_buffer, tmp_path, monkeypatch, where, code):
    """Some refuse as a file is opened, some as it is written."""
    try:
        os.close(os.open(tmp_path / "tried", os.O_WRONLY | os.O_CREAT | direct_files._DIRECT))
    except OSError:
        pytest.skip("this folder has no direct I/O")
    refused = []
    system = getattr(os, where)

    def refuse(*arguments: Any) -> Any:
        flags = arguments[1] if where == "open" else direct_files.fcntl.fcntl(arguments[0], direct_files.fcntl.F_GETFL)
        if flags & direct_files._DIRECT:
            refused.append(where)
            raise OSError(code, os.strerror(code))
        return system(*arguments)

    monkeypatch.setattr(direct_files.os, where, refuse)
    data = os.urandom(3 * BUFFER + 5)
    assert write_file(tmp_path / "file", [data]) == (len(data), crc32(data))
    assert crc_of_file(tmp_path / "file") == crc32(data)
    assert (tmp_path / "file").read_bytes() == data
    assert len(refused) == (2 if where == "open" else 1), "each file once"


@pytest.mark.parametrize("limit", [1000, 4096, BUFFER - 1])
def test_what_the_system_takes_in_parts_is_whole(small_buffer, tmp_path, monkeypatch, limit):
    """A direct write may end within a block: the rest is no longer aligned."""
    write = os.write
    monkeypatch.setattr(direct_files.os, "write", lambda descriptor, data: write(descriptor, data[:limit]))
    data = os.urandom(2 * BUFFER + 5)
    assert write_file(tmp_path / "file", [data]) == (len(data), crc32(data))
    assert (tmp_path / "file").read_bytes() == data


def test_another_error_of_the_system_is_raised(small_buffer, tmp_path, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(Path("/proc/self/fd").iterdir()) if Path("/proc/self/fd").is_dir() else set()
    monkeypatch.setattr(direct_files.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "file", [bytes(BUFFER)])
    after = set(Path("/proc/self/fd").iterdir()) if before else set()
    assert {one.name for one in after} == {one.name for one in before}, "the file is closed"
