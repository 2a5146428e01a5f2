"""Defines checkpoint folders on a disk or at a URL. On a disk, a file or folder gets its final name once it is complete."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

from sley_core.api.files import replace_atomically, sync_names
from sley_core.errors import UsageError, format_cause


class FileDigest(NamedTuple):
    """Holds the size in bytes and the CRC-32 of a file."""

    num_bytes: int
    crc: int


STAGING_PREFIX = ".saving-"  # the names of unfinished folders on a disk start with this
DELETED_SUFFIX = "gone"  # the names of folders that are being deleted also end with this

_READ_BYTES = 16 << 20  # the size of the buffer with which files are verified


class LocalFolder:
    """A folder in a mounted file system. The first `write` creates the folder. All methods may raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def uri(self) -> str:
        """The path or URL of the folder."""
        return str(self.path)

    def child(self, name: str) -> "LocalFolder":
        """Returns the subfolder `name`, which need not exist."""
        return LocalFolder(self.path / name)

    def names(self) -> list[str]:
        """Returns the sorted names of the folder's files and subfolders; [] if the folder does not exist."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(path.name for path in self.path.iterdir())
        return []

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> FileDigest:
        """Writes `chunks` to the file `name` on the disk and returns its digest. After an error, the file does not exist."""
        self.path.mkdir(parents=True, exist_ok=True)
        num_bytes = crc = 0
        with replace_atomically(self.path / name) as file:
            for chunk in chunks:
                crc = crc32(chunk, crc)
                num_bytes += file.write(chunk)
        return FileDigest(num_bytes, crc)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns the bytes [start, end) of a file; fewer if the file is shorter."""
        size = self.num_bytes(name)
        with (self.path / name).open("rb") as file:
            file.seek(start)
            return file.read(max(0, (size if end is None else min(end, size)) - start))

    def read_into(self, name: str, start: int, memory: memoryview) -> int:
        """Fills `memory` with the bytes of a file from byte `start`; returns the number of bytes read."""
        with (self.path / name).open("rb") as file:
            file.seek(start)
            return file.readinto(memory)

    def num_bytes(self, name: str) -> int:
        """Returns the size of a file in bytes."""
        return (self.path / name).stat().st_size

    def drop_cached_pages(self, name: str) -> None:
        """Makes the next read of a file come from the disk instead of the page cache, if the system supports that."""
        if fadvise := getattr(os, "posix_fadvise", None):
            with (self.path / name).open("rb") as file:
                fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def delete_file(self, name: str) -> None:
        """Deletes the file `name`."""
        (self.path / name).unlink()

    def staging_folder(self, token: str) -> "LocalFolder":
        """Returns a temporary folder for a save, which `publish` renames to this folder. token: unique to the save."""
        return LocalFolder(self.path.parent / f"{STAGING_PREFIX}{self.path.name}-{token}")

    def is_unfinished(self, name: str, last_file: str) -> bool:
        """Returns whether the subfolder `name` is an unfinished checkpoint. last_file: unused on a disk."""
        return name.startswith(STAGING_PREFIX)

    def publish(self, target: "Folder") -> None:
        """Renames this folder, the `staging_folder` of `target`, to `target`, and syncs the rename to the disk."""
        assert isinstance(target, LocalFolder), target
        sync_names(self.path)
        self.path.rename(target.path)
        sync_names(target.path.parent)

    def remove(self) -> None:
        """Deletes the folder and its content, if the folder exists."""
        if self.path.is_dir():
            trash = self.path.with_name(f"{STAGING_PREFIX}{self.path.name.removeprefix(STAGING_PREFIX)}-{DELETED_SUFFIX}")
            with suppress(OSError):  # renamed first, so that a partly deleted folder does not look like a checkpoint
                self.path.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)


class RemoteFolder:
    """A folder of an object store, opened by fsspec, with the methods of `LocalFolder`. A store cannot rename folders, so files
    have their final names from the start, and the index is written last.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self._system, self._path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            hint = "install fsspec and the fsspec backend for this URL scheme"
            raise UsageError("no-fsspec", f"{url} cannot be opened: {format_cause(error)}", hint=hint) from error
        self._url = url.rstrip("/")

    def _child_path(self, name: str) -> str:
        return f"{self._path}/{name}"

    @property
    def uri(self) -> str:
        return self._url

    def child(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self._url}/{name}")

    def names(self) -> list[str]:
        self._system.invalidate_cache(self._path)
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in self._system.ls(self._path, detail=False))
        return []

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> FileDigest:
        num_bytes = crc = 0
        self._system.makedirs(self._path, exist_ok=True)
        try:
            with self._system.open(self._child_path(name), "wb") as file:
                for chunk in chunks:
                    crc = crc32(chunk, crc)
                    num_bytes += len(chunk)
                    file.write(bytes(chunk))  # a copy, since fsspec may hold a reference, and the chunk's memory is reused
        except BaseException:
            with suppress(Exception):  # closing may have created a file with the first chunks
                self._system.rm_file(self._child_path(name))
            raise
        return FileDigest(num_bytes, crc)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return bytes(self._system.cat_file(self._child_path(name), start=start, end=end))

    def read_into(self, name: str, start: int, memory: memoryview) -> int:
        if not len(memory) or start >= self.num_bytes(name):
            return 0
        data = self._system.cat_file(self._child_path(name), start=start, end=start + len(memory))
        memory[: len(data)] = data
        return len(data)

    def num_bytes(self, name: str) -> int:
        self._system.invalidate_cache(self._path)
        info: dict[str, Any] = self._system.info(self._child_path(name))
        return int(info["size"])

    def drop_cached_pages(self, name: str) -> None:
        """Does nothing, since this host has no page cache for a store."""

    def delete_file(self, name: str) -> None:
        self._system.rm_file(self._child_path(name))

    def staging_folder(self, token: str) -> "RemoteFolder":
        return self

    def is_unfinished(self, name: str, last_file: str) -> bool:
        return last_file not in self.child(name).names()

    def publish(self, target: "Folder") -> None:
        """Does nothing, since the checkpoint is complete once its index is written."""

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            for name in sorted(self.names(), key=lambda name: name != "checkpoint.json"):  # the index first
                self.delete_file(name)
            self._system.rm(self._path, recursive=True)


Folder: TypeAlias = LocalFolder | RemoteFolder
"""A folder on a disk or in an object store."""


def compute_crc(folder: Folder, name: str) -> int:
    """Reads a file in blocks, from the disk instead of the page cache if possible, and returns its CRC-32."""
    folder.drop_cached_pages(name)
    memory, crc, position = memoryview(bytearray(_READ_BYTES)), 0, 0
    while num_read := folder.read_into(name, position, memory):
        crc = crc32(memory[:num_read], crc)
        position += num_read
    return crc


def open_folder(path: str | Path) -> Folder:
    """Returns the folder at `path`, a path or URL. Raises UsageError `no-fsspec` if fsspec cannot open the URL."""
    if "://" in str(path):
        return RemoteFolder(str(path))
    return LocalFolder(Path(path).absolute())
