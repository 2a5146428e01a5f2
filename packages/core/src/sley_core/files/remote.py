"""Folders of checkpoints behind a URL, opened by fsspec: an object store, which cannot rename folders.

Files have their final names from the beginning, and the index is written last: a folder without it is no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from zlib import crc32

from sley_core.errors import UsageError
from sley_core.factory import cause
from sley_core.files.folders import Folder, Written

_STEP_BYTES = 16 << 20


class RemoteFolder:
    """Reads and writes the folder at `url`."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self._system, self._path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            hint = "install fsspec, and the package that it names for this kind of URL"
            raise UsageError("no-fsspec", f"{url} cannot be opened: {cause(error)}", hint=hint) from error
        self._url = url.rstrip("/")

    @property
    def text(self) -> str:
        return self._url

    def child(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self._url}/{name}")

    def names(self) -> list[str]:
        self._system.invalidate_cache(self._path)
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(
                str(path).rstrip("/").rpartition("/")[2] for path in self._system.ls(self._path, detail=False)
            )
        return []

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        num_bytes = crc = 0
        self._system.makedirs(self._path, exist_ok=True)
        try:
            with self._system.open(self._at(name), "wb") as file:
                for chunk in chunks:
                    crc = crc32(chunk, crc)
                    num_bytes += len(chunk)
                    file.write(bytes(chunk))  # a copy: the file system may keep it, and the chunk's memory is reused
        except BaseException:
            with suppress(Exception):  # closing may have created a file with what was written
                self._system.rm_file(self._at(name))
            raise
        return Written(num_bytes, crc)

    def read(self, name: str, first: int = 0, last: int | None = None) -> bytearray:
        return bytearray(self._system.cat_file(self._at(name), start=first, end=last))

    def read_into(self, name: str, first: int, memory: memoryview) -> int:
        if not len(memory) or first >= self.num_bytes(name):
            return 0
        data = self._system.cat_file(self._at(name), start=first, end=first + len(memory))
        memory[: len(data)] = data
        return len(data)

    def num_bytes(self, name: str) -> int:
        self._system.invalidate_cache(self._path)
        found: dict[str, Any] = self._system.info(self._at(name))
        return int(found["size"])

    def crc(self, name: str) -> int:
        crc, num_bytes = 0, self.num_bytes(name)
        for first in range(0, num_bytes, _STEP_BYTES):
            crc = crc32(self.read(name, first, min(first + _STEP_BYTES, num_bytes)), crc)
        return crc

    def delete(self, name: str) -> None:
        self._system.rm_file(self._at(name))

    def staging(self, token: str) -> RemoteFolder:
        return self

    def is_unfinished(self, name: str, last_file: str) -> bool:
        return last_file not in self.child(name).names()

    def publish(self, target: Folder) -> None:
        """Does nothing: the checkpoint is complete once its index is written."""

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            names = self.names()
            for name in sorted(names, key=lambda name: not name.endswith("checkpoint.json")):  # the index first
                self._system.rm_file(self._at(name))
            self._system.rm(self._path, recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"
