"""Folders of checkpoints, on a disk or behind a URL: a file is complete once it has its name, and a folder appears at once.

Reading may have a time limit (`TimedReads`): a disk that stalls on one rank must not keep all ranks waiting silently.

    main thread    | call ── waits ──────────── limit: StalledError, with the file
    reader thread         └── the system's read, which cannot be interrupted
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from sley_core.api.files import appearing, sync_names
from sley_core.errors import RunError, UsageError, cause


class Written(NamedTuple):
    """Describes a file that was written: its number of bytes, and their CRC-32."""

    num_bytes: int
    crc: int


class ReadableFolder(Protocol):
    """Reads a folder, by path or URL. All methods raise OSError where the system refuses."""

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
        num_bytes = crc = 0
        with appearing(self.path / name) as file:
            for chunk in chunks:
                crc = crc32(chunk, crc)
                num_bytes += file.write(chunk)
        return Written(num_bytes, crc)

    def read(self, name: str, first: int = 0, last: int | None = None) -> bytearray:
        end = self.num_bytes(name)
        data = bytearray(max(0, min(end, end if last is None else last) - first))
        num_read = self.read_into(name, first, memoryview(data))
        return data[:num_read]

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
        if fadvise := getattr(os, "posix_fadvise", None):  # so that the disk is what is checked, and not the page cache
            with (self.path / name).open("rb") as file:
                fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return crc_of(self, name)

    def delete(self, name: str) -> None:
        (self.path / name).unlink()

    def staging(self, token: str) -> LocalFolder:
        return LocalFolder(self.path.parent / f"{STAGING}{self.path.name}-{token}")

    def is_unfinished(self, name: str, last_file: str) -> bool:
        return name.startswith(STAGING)

    def publish(self, target: Folder) -> None:
        assert isinstance(target, LocalFolder), target
        sync_names(self.path)
        self.path.rename(target.path)
        sync_names(target.path.parent)

    def remove(self) -> None:
        if self.path.is_dir():
            gone = self.path.with_name(f"{STAGING}{self.path.name.removeprefix(STAGING)}-{GONE}")
            with suppress(OSError):  # renamed first, so that a partly deleted folder is not taken for a checkpoint
                self.path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


class RemoteFolder:
    """Reads and writes the folder at `url`, opened by fsspec: an object store, which cannot rename folders. Files have their
    final names from the beginning, and the index is written last.
    """

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
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in self._system.ls(self._path, detail=False))
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
            with suppress(Exception):  # closing may have created a file with the first chunks
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
        info: dict[str, Any] = self._system.info(self._at(name))
        return int(info["size"])

    def crc(self, name: str) -> int:
        return crc_of(self, name)

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


def open_folder(path: str | Path) -> Folder:
    """Returns the folder at `path`. Raises UsageError `no-fsspec` for a URL that nothing here can open."""
    if "://" in str(path):
        return RemoteFolder(str(path))
    return LocalFolder(Path(path).absolute())


def crc_of(folder: ReadableFolder, name: str) -> int:
    """Reads a file in parts, into one buffer, and returns the CRC-32 of its bytes."""
    memory, crc, done = memoryview(bytearray(_STEP_BYTES)), 0, 0
    while got := folder.read_into(name, done, memory):
        crc = crc32(memory[:got], crc)
        done += got
    return crc


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
        """Returns `read()`. Raises its errors, and StalledError if it has not returned within the limit; from then on, at
        once.
        """
        if not self._stalled:
            self._tasks.put(read)
            try:
                result, error = self._results.get(timeout=self.limit_s)
            except Empty:
                self._stalled = f"reading {file} has not gone on for {self.limit_s:g} s"
            else:
                if error is not None:
                    raise error
                return result
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
