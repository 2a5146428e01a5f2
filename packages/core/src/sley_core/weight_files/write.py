"""Writes safetensors files and their index into a folder, which appears completely or not at all.

    begin_folder(folder) ──> TensorFilesWriter: add ── add ... ── close, each file by one process ──> complete_folder

Unlike the safetensors library, this module writes one tensor at a time, so only one gathered tensor is in memory.
"""

import ctypes
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sley_core.comm.world import Group
from sley_core.errors import RunError, format_cause
from sley_core.files import sync_names, write_atomically
from sley_core.weight_files.read import INDEX_FILE, SINGLE_FILE, TensorReader

MAX_FILE_BYTES = 5 * 10**9
"""The largest size of a file in bytes, as in Hugging Face's libraries; a larger tensor gets a file of its own."""

WEIGHT_FILE_PATTERNS = ("model*.safetensors", INDEX_FILE)
"""Patterns that match the names of weight files and of their index."""

DTYPES = {  # the safetensors name of each dtype that can be written
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.bool: "BOOL",
} | {dtype: f"I{8 * dtype.itemsize}" for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)}

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
"""The keys of `DTYPES`, by their names in safetensors."""

Item = TypeVar("Item")


class Spec(NamedTuple):
    """The name, dtype and shape of a tensor to write. dtype: its name in safetensors (`F32`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_dtype(cls, name: str, dtype: torch.dtype, shape: Iterable[int]) -> "Spec":
        """Returns the spec of a tensor. Raises RunError "weight-files" for a dtype that is not in `DTYPES`."""
        if dtype not in DTYPES:
            raise RunError("weight-files", f"{name!r} is {dtype}, which weight files do not support")
        return cls(name, DTYPES[dtype], tuple(shape))

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


def split_by_size(items: Iterable[Item], size_of: Callable[[Item], float], cap: float) -> list[list[Item]]:
    """Splits `items`, in order, into lists whose sizes sum to at most `cap`. An item larger than `cap` is a list by itself."""
    parts: list[list[Item]] = []
    remaining = -1.0
    for item in items:
        size = size_of(item)
        if not parts or size > remaining:
            parts.append([])
            remaining = cap
        parts[-1].append(item)
        remaining -= size
    return parts


def build_header(specs: Iterable[Spec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Returns the first bytes of a safetensors file, up to its data, and the offset of each tensor in the file. Tensors with
    wide dtypes come first, so that each offset is a multiple of the element size.

        8 bytes: length of the header | header: JSON, name -> dtype, shape, bytes from .. to | data
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    starts: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -BY_NAME[spec.dtype].itemsize):
        assert spec.name not in starts, f"{spec.name} twice in one file"
        starts[spec.name], end = end, end + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [starts[spec.name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor, as a view that keeps the tensor alive but does not prevent its offload."""
    if not tensor.numel():
        return memoryview(b"")
    buffer_type = ctypes.c_char * (tensor.numel() * tensor.element_size())
    memory = buffer_type.from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # keeps the tensor alive
    return memoryview(memory).cast("B")


class TensorFilesWriter(AbstractContextManager["TensorFilesWriter"]):
    """Writes new safetensors files into `folder`, one after the other. Methods raise OSError if they cannot write.

    files: the specs of the tensors in each file, by file name. Each tensor must be added once, and the tensors of a file one
    after the other. Call `close` after the last tensor: a file that is still open at the end of the `with` block is incomplete.
    metadata: the metadata of each file.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, Sequence[Spec]], metadata: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._metadata = metadata
        self._folder = folder
        self._files = files
        self._pending = {spec.name: (file, spec) for file, specs in files.items() for spec in specs}
        self._file: BinaryIO | None = None
        self._file_name = ""
        self._starts: dict[str, int] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Writes a tensor. The first tensor of a file closes the previous file."""
        assert name in self._pending, f"{name} is added twice"
        file_name, spec = self._pending.pop(name)
        if self._file is None or self._file_name != file_name:
            self.close()
            self._file = self._open(file_name)
        assert Spec.from_dtype(name, value.dtype, value.shape) == spec, f"{name}: {value.dtype} {list(value.shape)} for {spec}"
        self._file.seek(self._starts[name])
        self._file.write(bytes_of(value.detach().cpu().contiguous()))

    def close(self) -> None:
        """Syncs the open file to the disk and closes it. All of its tensors must have been added."""
        if self._file is not None:
            missing = sorted(name for name, (file_name, _) in self._pending.items() if file_name == self._file_name)
            assert not missing, f"{missing} were not written"
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _open(self, name: str) -> BinaryIO:
        specs, self._file_name = self._files[name], name
        header, self._starts = build_header(specs, self._metadata)
        file = self._file = (self._folder / name).open("xb")
        file.write(header)
        file.truncate(len(header) + sum(spec.num_bytes for spec in specs))
        return file


def weight_file_names(num_files: int) -> list[str]:
    """Returns the names of `num_files` files, as transformers would name them."""
    if num_files <= 1:
        return [SINGLE_FILE]
    return [f"model-{number:05}-of-{num_files:05}.safetensors" for number in range(1, num_files + 1)]


def scratch_folder(folder: Path) -> Path:
    """Returns the path of the folder next to `folder` in which its files are written first."""
    return folder.with_name(f".{folder.name}.unfinished")


def begin_folder(folder: Path, patterns: Iterable[str] = WEIGHT_FILE_PATTERNS) -> Path:
    """Creates an empty `scratch_folder(folder)` and returns it. Raises OSError and the errors of `check_replaceable`."""
    check_replaceable(folder, patterns)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_folder(folder)
    shutil.rmtree(scratch, ignore_errors=True)  # a killed process may have left files
    scratch.mkdir()
    return scratch


def check_replaceable(folder: Path, patterns: Iterable[str] = WEIGHT_FILE_PATTERNS) -> None:
    """Raises RunError "weights-folder" if `folder` exists and is not a folder, or has files that match none of `patterns`,
    since `complete_folder` would remove them.
    """
    if os.path.lexists(folder):
        is_folder = folder.is_dir() and not folder.is_symlink()
        foreign_files = [path for path in folder.iterdir() if not any(map(path.match, patterns))] if is_folder else []
        if not is_folder or foreign_files:
            reason = f"has `{foreign_files[0].name}`, which is not a weight file" if foreign_files else "is not a folder"
            raise RunError("weights-folder", f"`{folder}` would be replaced, but it {reason}", hint="choose another folder")


def complete_folder(folder: Path, files: Mapping[str, Sequence[Spec]]) -> None:
    """Writes the index if there are several files, and replaces `folder` with `scratch_folder(folder)`. Removes the previous
    folder only after the new folder is in place. Raises OSError if this fails.
    """
    scratch, backup = scratch_folder(folder), folder.with_name(f".{folder.name}.before")
    if len(files) > 1:
        total = sum(spec.num_bytes for specs in files.values() for spec in specs)
        weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomically(scratch / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    shutil.rmtree(backup, ignore_errors=True)
    sync_names(scratch)
    if folder.exists():
        folder.rename(backup)
    scratch.rename(folder)
    sync_names(folder.parent)
    shutil.rmtree(backup, ignore_errors=True)


def describe_write_error(error: OSError, folder: Path) -> str:
    """Returns a message that names the path that cannot be written, and the reason."""
    return f"cannot write `{error.filename or folder}`: {error.strerror or error}"


def discard_scratch_folder(folder: Path) -> None:
    """Removes `scratch_folder(folder)`; does not change `folder`."""
    shutil.rmtree(scratch_folder(folder), ignore_errors=True)


def write_tensors(
    out: Path,
    source: TensorReader,
    names: Iterable[tuple[str, str]],
    max_file_bytes: int,
    write_extras: Callable[[Path], None] | None = None,
) -> list[str]:
    """Writes tensors of `source` into the new folder `out`, which appears once all files are on the disk. Returns the names of
    the weight files.

    names: (name in `source`, name in the files) of each tensor. max_file_bytes: the size limit of a file. write_extras: writes
    more files into a given folder. Raises RunError "weight-files" if `out` cannot be written, and "weights-folder" unless `out`
    is empty or missing.
    """
    source_names = {file_name: source_name for source_name, file_name in names}
    specs = [Spec(file_name, *source.info(source_name)) for file_name, source_name in source_names.items()]
    lists = split_by_size(specs, lambda spec: spec.num_bytes, max_file_bytes)
    files = dict(zip(weight_file_names(len(lists)), lists, strict=True))
    try:
        scratch = begin_folder(out, patterns=())
        with TensorFilesWriter(scratch, files) as writer:
            for spec in specs:
                writer.add(spec.name, source.tensor(source_names[spec.name]))
            writer.close()
        if write_extras is not None:
            write_extras(scratch)
        complete_folder(out, files)
    except BaseException as error:  # including KeyboardInterrupt
        discard_scratch_folder(out)
        if isinstance(error, OSError):
            raise RunError("weight-files", describe_write_error(error, out)) from None
        raise
    return list(files)


VISIBILITY_TIMEOUT_S = 10.0
"""The time limit in seconds for a network file system to show the files of one host on all other hosts."""


class ProbeFolder(Protocol):
    """A temporary folder for `probe`. The first write creates it."""

    def write(self, name: str, chunks: Iterable[bytes]) -> object:
        """Writes the file `name`, which appears once it is complete."""

    def names(self) -> list[str]:
        """Returns the names of the files; [] if the folder does not exist."""
        ...

    def remove(self) -> None:
        """Deletes the folder."""


class LocalProbeFolder(ProbeFolder):
    """A temporary folder in the local folder `parent`, with `token` in its name."""

    def __init__(self, parent: Path, token: str) -> None:
        self.path = parent / f".probe-{token}"

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_bytes(b"".join(chunks))

    def names(self) -> list[str]:
        return [file.name for file in self.path.iterdir()] if self.path.is_dir() else []

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def probe(
    place: str,
    open_folder: Callable[[str], ProbeFolder],
    control: Group,
    timeout_s: float,
    problem: Callable[[], str] = lambda: "",
    *,
    writes: bool = True,
) -> None:
    """Raises RunError "checkpoint-folder" on all ranks unless every rank that writes sees the same folder and can write into
    it. A collective of `control`. Leaves no files behind.

    place: the path or URL of the folder. open_folder: a function that takes a token and returns a temporary folder in the
    folder, with the token in its name. timeout_s: the time limit of an exchange between ranks. problem: a function that returns
    the reason why rank 0 refuses the folder, or "". writes: whether this rank will write into the folder; rank 0 always does.
    """

    def report(write: Callable[[], str]) -> str:
        """Returns the result of `write`, or a description of its error, since the other ranks wait for an answer."""
        try:
            return write()
        except Exception as error:  # whatever a file system raises
            return format_cause(error)

    def write_first() -> str:
        if not (reason := problem()):
            open_folder(token).write("rank-00000", [b"probe"])
        return reason

    def write_after_rank_0() -> str:
        # The limit is halved, so that a rank can report a missing file before the other ranks stop waiting for this rank.
        deadline = time.monotonic() + min(VISIBILITY_TIMEOUT_S, timeout_s / 2)
        folder = open_folder(token)
        while "rank-00000" not in folder.names():
            if time.monotonic() > deadline:
                return "it cannot see the file of rank 0"
            time.sleep(0.05)
        folder.write(f"rank-{control.coord:05}", [b"probe"])
        return ""

    token, failure = secrets.token_hex(8), ""
    if control.coord == 0:
        failure = report(write_first)
    token, first_failure = control.gather_objects([token, failure], label="the location of the checkpoints")[0]
    if writes and control.coord != 0 and not first_failure:
        failure = report(write_after_rank_0)
    failures = control.gather_objects(failure, label="whether ranks can write checkpoints")
    if control.coord == 0:
        with suppress(Exception):  # whatever a file system raises
            open_folder(token).remove()
    for rank, reason in zip(control.ranks, failures, strict=True):
        if reason:
            hint = "all ranks write checkpoints and weights into one folder; use a folder that every host can read and write"
            raise RunError("checkpoint-folder", f"rank {rank} cannot save in {place}: {reason}", hint=hint)
