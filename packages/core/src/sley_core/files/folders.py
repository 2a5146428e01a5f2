"""Folders of files: a file is complete once it has its name, and a folder appears at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol
from zlib import crc32

from sley_core.errors import RunError
from sley_core.factory import cause
from sley_core.files.direct_files import crc_of_file, write_file


class Written(NamedTuple):
    """Holds a file's number of bytes, and their CRC-32."""

    num_bytes: int
    crc: int


class ReadableFolder(Protocol):
    """Reads a folder, by path or URL. All methods raise OSError for what the system refuses."""

    @property
    def text(self) -> str:
        """Its path or URL, for people."""
        ...

    def child(self, name: str) -> ReadableFolder: ...

    def names(self) -> list[str]:
        """Returns the names of its entries, sorted; [] if there is no such folder."""
        ...

    def read(self, name: str, first: int = 0, last: int | None = None) -> bytearray:
        """Returns the bytes of a file from `first` to before `last`; fewer if the file ends before."""
        ...

    def read_into(self, name: str, first: int, memory: memoryview) -> int:
        """Reads from the byte `first` on into `memory`; returns the number of bytes read."""
        ...

    def num_bytes(self, name: str) -> int:
        """Returns the size of a file in bytes."""
        ...

    def crc(self, name: str) -> int:
        """Reads a file, and returns the CRC-32 of its bytes."""
        ...

    def is_unfinished(self, name: str, last_file: str) -> bool:
        """Returns whether the folder `name` in this one is a checkpoint that was not written up to its `last_file`."""
        ...


class Folder(ReadableFolder, Protocol):
    """Reads and writes a folder."""

    def child(self, name: str) -> Folder: ...

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        """Writes a file, which then is on the disk, under its name and complete; or, if this raises, does not exist."""
        ...

    def delete(self, name: str) -> None:
        """Deletes a file."""
        ...

    def staging(self, token: str) -> Folder:
        """Returns the folder in which this one is prepared; `publish` of that gives it this one's name."""
        ...

    def publish(self, target: Folder) -> None:
        """Gives this folder, a `staging` of `target`, the name of `target`, permanently."""
        ...

    def remove(self) -> None:
        """Deletes it with everything in it, if it exists."""
        ...


STAGING = ".saving-"
"""How the names of folders begin that are not ready."""

GONE = "gone"
"""How the names of those end that are being deleted."""

_STEP_BYTES = 16 << 20


class LocalFolder:
    """Is a folder of a mounted file system, created when the first file is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def text(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def names(self) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(one.name for one in self.path.iterdir())
        return []

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = self.path / f".{name}"
        try:
            written = Written(*write_file(unfinished, chunks))
            unfinished.replace(self.path / name)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()  # frees the space on a full disk
            raise
        return written

    def read(self, name: str, first: int = 0, last: int | None = None) -> bytearray:
        end = self.num_bytes(name)
        data = bytearray(max(0, min(end, end if last is None else last) - first))
        found = self.read_into(name, first, memoryview(data))
        return data[:found]

    def read_into(self, name: str, first: int, memory: memoryview) -> int:
        done = 0
        with (self.path / name).open("rb", buffering=0) as file:
            while done < len(memory):
                got = os.preadv(file.fileno(), [memory[done : done + _STEP_BYTES]], first + done)
                if not got:
                    break
                done += got
        return done

    def num_bytes(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def crc(self, name: str) -> int:
        return crc_of_file(self.path / name)

    def delete(self, name: str) -> None:
        (self.path / name).unlink()

    def staging(self, token: str) -> LocalFolder:
        return LocalFolder(self.path.parent / f"{STAGING}{self.path.name}-{token}")

    def is_unfinished(self, name: str, last_file: str) -> bool:
        return name.startswith(STAGING)

    def publish(self, target: Folder) -> None:
        assert isinstance(target, LocalFolder), target
        _sync(self.path)
        self.path.rename(target.path)
        _sync(target.path.parent)

    def remove(self) -> None:
        if self.path.is_dir():
            gone = self.path.with_name(f"{STAGING}{self.path.name.removeprefix(STAGING)}-{GONE}")
            with suppress(OSError):  # renamed first, so that a partly deleted folder is not taken for a checkpoint
                self.path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def open_folder(path: str | Path) -> Folder:
    """Returns the folder at `path`. Raises UsageError `no-fsspec` for a URL that nothing here can open."""
    if "://" in str(path):
        from sley_core.files.remote import RemoteFolder

        return RemoteFolder(str(path))
    return LocalFolder(Path(path).absolute())


def _sync(path: Path) -> None:
    """Makes creations and renames in a folder durable (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def crc_of(folder: ReadableFolder, name: str) -> int:
    """Reads a file in parts, into one buffer, and returns the CRC-32 of its bytes."""
    memory, crc, done = memoryview(bytearray(_STEP_BYTES)), 0, 0
    while got := folder.read_into(name, done, memory):
        crc = crc32(memory[:got], crc)
        done += got
    return crc


def said(error: Exception) -> str:
    """Returns an error as one line of text."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return error.diagnostics[0].message if isinstance(error, RunError) else cause(error)
