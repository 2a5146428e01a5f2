"""Writes safetensors files tensor by tensor, with their index, into a folder that appears completely or not at all.

    begin(folder) ──> TensorFiles: header ── add ── add ... ── close, each file by one process ──> complete

The library writes a file from all of its tensors at once; here a file is as long as its header says before the first of them is
gathered, so that one tensor is in memory at a time.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from sley_core.errors import RunError
from sley_core.sizes import split_by_size
from sley_core.weight_files.read import INDEX, SINGLE, TensorReader
from sley_core.whole_files import sync_names

FILE_BYTES = 5 * 10**9
"""The size of a file at most, as Hugging Face's own; a larger tensor has a file for itself."""

OURS = ("model*.safetensors", INDEX)
"""Names of files of weights."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.bool: "BOOL",
} | {whole: f"I{8 * whole.itemsize}" for whole in (torch.int64, torch.int32, torch.int16, torch.int8)}

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


class Spec(NamedTuple):
    """Name, dtype and shape of a tensor to be written. dtype: as safetensors calls it (`F32`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Iterable[int]) -> Spec:
        """Returns the spec of a tensor. Raises RunError "weight-files" for a dtype that has no name in safetensors here."""
        if dtype not in DTYPES:
            raise RunError("weight-files", f"{name!r} is {dtype}, which is not kept in files")
        return cls(name, DTYPES[dtype], tuple(shape))

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _BYTES[self.dtype]


def header_of(specs: Iterable[Spec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Returns the first bytes of a safetensors file, and where in the file each tensor starts. Wide formats come first, so that
    each tensor starts at a multiple of its element size.

        8 bytes: length of the header | header: JSON, name -> dtype, shape, bytes from .. to | data
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    starts: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -_BYTES[spec.dtype]):
        assert spec.name not in starts, f"{spec.name} twice in one file"
        starts[spec.name], end = end, end + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [starts[spec.name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host, as a view that keeps the tensor alive.

    Not through numpy: memory that numpy has seen can no longer be offloaded (torch marks it as not resizable).
    """
    if not tensor.numel():
        return memoryview(b"")
    whole = ctypes.c_char * (tensor.numel() * tensor.element_size())
    memory = whole.from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # for as long as anything looks at the memory
    return memoryview(memory).cast("B")


class TensorFile:
    """A new safetensors file of the tensors `specs`, each added once, in any order; `facts` are metadata. Raises OSError."""

    def __init__(self, path: Path, specs: Sequence[Spec], facts: Mapping[str, str] = MappingProxyType({})) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._missing = set(self._specs)
        header, self._starts = header_of(specs, facts)
        self._file: BinaryIO = path.open("xb")
        try:
            self._file.write(header)
            self._file.truncate(len(header) + sum(spec.num_bytes for spec in specs))
        except BaseException:
            self._file.close()
            raise

    def add(self, name: str, value: Tensor) -> None:
        spec = self._specs[name]
        assert name in self._missing, f"{name} is written twice"
        assert Spec.of(name, value.dtype, value.shape) == spec, f"{name}: {value.dtype} {list(value.shape)} for {spec}"
        self._missing.remove(name)
        self._file.seek(self._starts[name])
        self._file.write(bytes_of(value.detach().cpu().contiguous()))

    def close(self) -> None:
        assert not self._missing, f"{sorted(self._missing)} were not written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def drop(self) -> None:
        """Closes the file although it is incomplete."""
        self._file.close()


class TensorFiles(AbstractContextManager["TensorFiles"]):
    """New files in `folder`, by name, of the tensors that each is to have; one is open at a time. Raises OSError.

    Tensors are added in the order of `files`. What is not closed when the block is left is not complete. facts: for the
    metadata of each.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, Sequence[Spec]], facts: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._facts = facts
        self._folder = folder
        self._files = files
        self._of = {spec.name: name for name, specs in files.items() for spec in specs}
        self._open: tuple[str, TensorFile] | None = None

    def add(self, name: str, value: Tensor) -> None:
        """Writes the next tensor, which ends the file before where another one begins."""
        file = self._of[name]
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = file, TensorFile(self._folder / file, self._files[file], self._facts)
        self._open[1].add(name, value)

    def close(self) -> None:
        """Waits until the last file is on the disk."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            with suppress(OSError):
                self._open[1].drop()


def file_names(count: int) -> list[str]:
    """Returns the names of `count` files, as transformers calls them."""
    if count <= 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_text(path: Path, text: str) -> None:
    """Writes a new file, and waits until it is on the disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def unfinished(folder: Path) -> Path:
    """Returns the folder beside `folder` in which its files are written."""
    return folder.with_name(f".{folder.name}.unfinished")


def begin(folder: Path, ours: Iterable[str] = OURS) -> Path:
    """Makes the empty folder `unfinished(folder)`, and returns it. Raises RunError "weights-folder"."""
    check_replaceable(folder, ours)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = unfinished(folder)
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    return scratch


def check_replaceable(folder: Path, ours: Iterable[str] = OURS) -> None:
    """Raises RunError "weights-folder" if `folder` is there with files other than `ours`, which `complete` would remove."""
    if folder.exists() or folder.is_symlink():
        strange = not folder.is_dir() or folder.is_symlink()
        names = [] if strange else [path for path in folder.iterdir() if not any(path.match(name) for name in ours)]
        if strange or names:
            what = f"has `{names[0].name}`, which is no file of weights" if names else "is no folder"
            raise RunError("weights-folder", f"`{folder}` {what}, and would be replaced", hint="choose another folder")


def complete(folder: Path, files: Mapping[str, Sequence[Spec]]) -> None:
    """Writes the index of `files`, if they are several: the file of each tensor, and the bytes of all. Then replaces `folder`
    by `unfinished(folder)`; the previous content is kept until the new one is in place. Raises OSError.
    """
    scratch, before = unfinished(folder), folder.with_name(f".{folder.name}.before")
    if len(files) > 1:
        total = sum(spec.num_bytes for specs in files.values() for spec in specs)
        weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
        write_text(scratch / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    shutil.rmtree(before, ignore_errors=True)
    sync_names(scratch)
    if folder.exists():
        folder.rename(before)
    scratch.rename(folder)
    sync_names(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def unwritten(error: OSError, folder: Path) -> str:
    """Returns a sentence that says what could not be written, and why."""
    return f"cannot write `{error.filename or folder}`: {error.strerror or error}"


def discard(folder: Path) -> None:
    """Removes `unfinished(folder)`; `folder` stays as it was."""
    shutil.rmtree(unfinished(folder), ignore_errors=True)


def write_tensors(
    out: Path,
    source: TensorReader,
    names: Iterable[tuple[str, str]],
    max_file_bytes: int,
    more: Callable[[Path], None] | None = None,
) -> list[str]:
    """Writes tensors of `source` into the new folder `out`; returns the names of the files.

    names: (name in the source, name in the files) of each tensor that is written. more: writes what else the folder is to
    have, into the folder that it is given. `out` is there when all of it is on the disk, or not at all. Raises RunError
    "weight-files" if it cannot be written.
    """
    origin = {theirs: ours for ours, theirs in names}
    specs = [Spec(theirs, *source.kind(ours)) for theirs, ours in origin.items()]
    lists = split_by_size(specs, lambda spec: spec.num_bytes, max_file_bytes)
    files = dict(zip(file_names(len(lists)), lists, strict=True))
    try:
        scratch = begin(out, ours=())
        with TensorFiles(scratch, files) as written:
            for spec in specs:
                written.add(spec.name, source.tensor(origin[spec.name]))
            written.close()
        if more is not None:
            more(scratch)
        complete(out, files)
    except BaseException as error:  # Ctrl-C too
        discard(out)
        if isinstance(error, OSError):
            raise RunError("weight-files", unwritten(error, out)) from None
        raise
    return list(files)
