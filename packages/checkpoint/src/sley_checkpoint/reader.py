"""Defines the format of checkpoints. Reads checkpoints, verifies their files, and finds the newest intact checkpoint.

A checkpoint has safetensors files with tensor parts, and the index `checkpoint.json`, which is written last: a folder without
it is not a checkpoint. A file header stores the offset of each part in the full tensor, in the format of
torch.distributed.checkpoint (`HuggingFaceStorageReader`), and the run, step and rank of the file. Reading a file cannot execute
code.

    checkpoint = read("runs/small/checkpoints/step-00000100")
    checkpoint.step, checkpoint.names
    weight = checkpoint["weights/blocks.0.norm.weight"]
    state = dict(checkpoint.weights())               # by parameter name
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sley_checkpoint.folders import STAGING_PREFIX, FileDigest, Folder, compute_crc, open_folder
from sley_core.api import state
from sley_core.api.files import TensorInfo
from sley_core.errors import RunError, format_cause

INDEX_NAME = "checkpoint.json"  # the file name of the index
FORMAT_VERSION = 3  # an index with another version cannot be read


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor: its safetensors dtype, its full shape, and the file and rectangle of each of its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[str, state.Rectangle]]


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex(state.SavedRun):
    """All data of a checkpoint except its tensors. token: a string that is unique to each save and begins with the id of the
    attempt that made it. files: the digest of each file. tensors: the description of each tensor, by name.
    """

    token: str
    files: dict[str, FileDigest]
    tensors: dict[str, SavedTensor]

    def to_bytes(self) -> bytes:
        """Returns the content of the index file, which begins with a checksum of the index."""
        content = json.dumps({"format": FORMAT_VERSION, **asdict(self)}, separators=(",", ":"))
        return f'{{"checksum":"{sha256(content.encode()).hexdigest()}",\n"index":{content}}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "CheckpointIndex":
        """Parses the content of the index file. Raises ValueError if the content is damaged or has another format."""
        head, _, tail = data.partition(b',\n"index":')
        content = tail.removesuffix(b"}\n")
        if not tail or head != f'{{"checksum":"{sha256(content).hexdigest()}"'.encode():
            raise ValueError("its checksum does not match its content")
        fields: dict[str, Any] = json.loads(content)
        if (version := fields.pop("format")) != FORMAT_VERSION:
            raise ValueError(f"its format must be {FORMAT_VERSION}, but is {version}")
        fields["files"] = {name: FileDigest(*digest) for name, digest in fields["files"].items()}
        fields["tensors"] = {name: _parse_tensor_info(info) for name, info in fields["tensors"].items()}
        return cls(**fields)


def read_index(folder: Folder) -> CheckpointIndex:
    """Returns the index of the checkpoint in `folder`. Raises RunError `no-checkpoint` if the folder has no index, and
    `checkpoint-damaged` if the index cannot be parsed.
    """
    try:
        data = folder.read(INDEX_NAME)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError("no-checkpoint", f"{folder.uri} is not a checkpoint: it has no {INDEX_NAME}") from None
    try:
        return CheckpointIndex.from_bytes(data)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError("checkpoint-damaged", f"{folder.uri}/{INDEX_NAME} is damaged: {error}") from error


def _parse_tensor_info(fields: Mapping[str, Any]) -> SavedTensor:
    pieces = [(file, state.Rectangle(tuple(offsets), tuple(sizes))) for file, (offsets, sizes) in fields["pieces"]]
    return SavedTensor(fields["dtype"], tuple(fields["shape"]), pieces)


CHUNK_BYTES = 16 << 20
"""The maximum size of one write, in bytes. The GIL is free during each write."""


class StoredTensor(NamedTuple):
    """A rectangle of a tensor in a file. Its row-major data are the bytes [start, end) of the file."""

    dtype: torch.dtype
    rectangle: state.Rectangle
    start: int
    end: int


def build_file_header(pieces: Sequence[state.TensorPiece], info: Mapping[str, Any]) -> bytes:
    """Returns the header of a file with `pieces`, sorted from wide to narrow dtypes. info: JSON data about the file."""
    specs = [state.Spec.from_dtype(piece.name, piece.tensor.dtype, piece.rectangle.sizes) for piece in pieces]
    offsets = {piece.name: {"saved_offsets": list(piece.rectangle.offsets)} for piece in pieces}
    header, starts = state.build_header(
        specs, {"sley": json.dumps(info), "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    )
    assert list(starts) == [piece.name for piece in pieces], "pieces must be sorted from wide to narrow dtypes"
    return header


def read_header(folder: Folder, file: str) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Returns the tensors of a file by name, and the JSON data about the file. Raises RunError `checkpoint-damaged` if the
    header cannot be parsed, and OSError if the file does not exist.
    """
    try:
        data_start = 8 + int.from_bytes(folder.read(file, 0, 8), "little")
        header = json.loads(folder.read(file, 8, data_start))
        metadata = header.pop("__metadata__")
        offsets, info = json.loads(metadata["DCP_SHARDING_INFO"]), json.loads(metadata["sley"])
        tensors = {}
        for name, fields in header.items():
            rectangle = state.Rectangle(tuple(offsets[name]["saved_offsets"]), tuple(fields["shape"]))
            start, end = fields["data_offsets"]
            tensors[name] = StoredTensor(state.BY_NAME[fields["dtype"]], rectangle, data_start + start, data_start + end)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError("checkpoint-damaged", f"the header of {folder.uri}/{file} cannot be read: {error}") from error
    return tensors, info


def split_into_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the row-major bytes of `tensor` in chunks. Does not copy a contiguous tensor on the host."""
    data = state.bytes_of(tensor.detach().cpu().contiguous())
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def format_file_name(rank: int, index: int) -> str:
    """Returns the name of a rank's file. index: the number of the file on its rank, from 0."""
    return f"rank-{rank:05}{f'-{index}' if index else ''}.safetensors"


_STEP_PATTERN = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # matches checkpoint names; the groups are the step and the rewinds


class Checkpoint(Mapping[str, Tensor]):
    """A mapping from the names of a checkpoint's tensors to the full tensors on the CPU, each of which is read on access. Reads
    do not verify the files; call `verify` for that.
    """

    def __init__(self, folder: Folder, index: CheckpointIndex) -> None:
        self.folder = folder
        self.index = index
        self._headers: dict[str, dict[str, StoredTensor]] = {}

    @property
    def step(self) -> int:
        """The number of optimizer steps before the save."""
        return self.index.step

    @property
    def names(self) -> list[str]:
        return list(self.index.tensors)

    @property
    def description(self) -> CheckpointIndex:
        return self.index

    @property
    def place(self) -> str:
        return self.folder.uri

    def info(self, name: str) -> TensorInfo:
        """Returns the dtype and full shape of a tensor."""
        info = self.index.tensors[name]
        return TensorInfo(info.dtype, info.shape)

    def tensor(self, name: str) -> Tensor:
        return self[name]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the full-precision value of each parameter, for `run.load_weights`."""
        return ((name.removeprefix(state.WEIGHTS), self[name]) for name in self.names if name.startswith(state.WEIGHTS))

    def __getitem__(self, name: str) -> Tensor:
        info = self.index.tensors[name]
        tensor = torch.empty(info.shape, dtype=state.BY_NAME[info.dtype])
        self.read_into(name, state.Rectangle.from_shape(info.shape), tensor)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.index.tensors  # the default of `Mapping` reads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.tensors)

    def __len__(self) -> int:
        return len(self.index.tensors)

    @torch.no_grad()
    def read_into(self, name: str, requested: state.Rectangle, target: Tensor) -> None:
        """Reads the rectangle `requested` of the tensor `name` into `target`, a tensor of the same sizes and any dtype. Raises
        RunError `checkpoint-damaged` if the files do not match the index.
        """
        num_missing = requested.numel
        for file, rectangle in self.index.tensors[name].pieces:
            overlap = rectangle.intersection(requested)
            if overlap is not None:
                self._read_overlap(file, name, rectangle, overlap, target[overlap.slices_in(requested)])
                num_missing -= overlap.numel
        if num_missing:
            raise self._build_damage_error(f"{num_missing} elements of {name!r} are in no file")

    def _read_overlap(self, file: str, name: str, rectangle: state.Rectangle, overlap: state.Rectangle, target: Tensor) -> None:
        """Copies the elements in `overlap` from `file`, which stores `rectangle` of the tensor `name`, to `target`. Reads full
        rows of `rectangle`, and reads them directly into `target` if `overlap` is as wide as the rows and the dtypes match.
        """
        stored = self._read_header(file).get(name)
        if stored is None or stored.rectangle != rectangle:
            raise self._build_damage_error(f"{file} does not contain the part of {name!r} that the index lists")
        sizes = list(rectangle.sizes)
        row_offset = 0
        if sizes:
            row_offset = (overlap.offsets[0] - rectangle.offsets[0]) * prod(sizes[1:]) * stored.dtype.itemsize
            sizes[0] = overlap.sizes[0]
        is_direct = (
            target.device.type == "cpu"
            and target.dtype == stored.dtype
            and target.is_contiguous()
            and tuple(sizes) == overlap.sizes
        )
        rows = target if is_direct else torch.empty(sizes, dtype=stored.dtype)
        memory = state.bytes_of(rows)
        if self.folder.read_into(file, stored.start + row_offset, memory) != len(memory):
            raise self._build_damage_error(f"{file} is truncated")
        if not is_direct:
            slices = overlap.slices_in(rectangle)
            target.copy_(rows[(slice(None), *slices[1:])] if slices else rows)

    def _read_header(self, file: str) -> dict[str, StoredTensor]:
        """Returns the tensors of the file `file` by name. Reads the header of each file only once."""
        if file not in self._headers:
            self._headers[file] = read_header(self.folder, file)[0]
        return self._headers[file]

    def _build_damage_error(self, description: str) -> RunError:
        return RunError("checkpoint-damaged", f"the checkpoint {self.folder.uri} is damaged: {description}")


def read(path: str | Path) -> Checkpoint:
    """Returns the checkpoint in the folder `path`. Raises the errors of `read_index`."""
    folder = open_folder(path)
    return Checkpoint(folder, read_index(folder))


def try_read_index(folder: Folder) -> CheckpointIndex | None:
    """Returns the index of the checkpoint in `folder`, or None if it cannot be read."""
    try:
        return read_index(folder)
    except Exception:  # a file system may raise any error
        return None


class Damage(NamedTuple):
    """A damaged file of a checkpoint. description: the predicate of a sentence about the file, such as "is missing"."""

    file: str
    description: str

    def __str__(self) -> str:
        return f"{self.file} {self.description}"


DamagedCheckpoint = tuple[str, list[Damage]]
"""The path of a damaged checkpoint and its damages."""


class NewestCheckpoint(NamedTuple):
    """The path of the newest intact checkpoint, or None if there is none, and the newer, damaged checkpoints."""

    path: str | None
    damaged_checkpoints: list[DamagedCheckpoint]


def verify(path: str | Path) -> list[Damage]:
    """Reads all files of the checkpoint in the folder `path`, and returns the damages, or [] if it is intact. Raises RunError
    `no-checkpoint` if the folder is empty or does not exist.
    """
    folder = open_folder(path)
    if not folder.names():
        raise RunError("no-checkpoint", f"there is no checkpoint in {folder.uri}")
    return verify_share(folder)[1]


def newest(path: str | Path) -> NewestCheckpoint:
    """Returns the newest intact checkpoint in `path`, a folder of checkpoints. Reads all files of each candidate."""
    folder = open_folder(path)
    damaged_checkpoints: list[DamagedCheckpoint] = []
    for name in list_checkpoints(folder):
        damages = verify_share(folder.child(name))[1]
        if not damages:
            return NewestCheckpoint(folder.child(name).uri, damaged_checkpoints)
        damaged_checkpoints.append((folder.child(name).uri, damages))
    return NewestCheckpoint(None, damaged_checkpoints)


def list_checkpoints(folder: Folder) -> list[str]:
    """Returns the names of the complete checkpoints in a folder of checkpoints, from new to old."""
    names = [name for name in folder.names() if _STEP_PATTERN.fullmatch(name) and not folder.is_unfinished(name, INDEX_NAME)]
    return sorted(names, key=_sort_key, reverse=True)


def is_checkpoint_name(name: str) -> bool:
    """Returns whether `name` is the folder name of a checkpoint or of an unfinished save."""
    return name.startswith(STAGING_PREFIX) or _STEP_PATTERN.fullmatch(name) is not None


def choose_checkpoint_name(step: int, used_names: Iterable[str]) -> str:
    """Returns an unused name for the checkpoint after `step`. The name sorts as the newest. If the run has resumed from
    an older checkpoint or saves a step again, the name ends with the number of such rewinds.
    """
    keys = [_sort_key(name) for name in used_names if _STEP_PATTERN.fullmatch(name)]
    num_rewinds, last_step = max(keys, default=(0, -1))
    num_rewinds += step <= last_step
    return f"step-{step:08}-{num_rewinds}" if num_rewinds else f"step-{step:08}"


def verify_share(folder: Folder, rank: int = 0, num_ranks: int = 1) -> tuple[CheckpointIndex | None, list[Damage]]:
    """Reads the index of the checkpoint in `folder`, and verifies the share of rank `rank`: every `num_ranks`-th of the files,
    from file number `rank` on. Returns the index, or None if the index cannot be read, and the damages that were found.
    """
    try:
        if INDEX_NAME not in folder.names():
            return None, [Damage(INDEX_NAME, "is missing")]
        index = read_index(folder)
    except RunError as error:
        return None, [Damage(INDEX_NAME, f"is damaged: {error.diagnostics[0].message.rpartition(' is damaged: ')[2]}")]
    except Exception as error:  # a file system may raise any error
        return None, [Damage(INDEX_NAME, f"cannot be read: {format_cause(error)}")]
    damages = (_find_damage(folder, name, index) for name in sorted(index.files)[rank::num_ranks])
    return index, [damage for damage in damages if damage is not None]


def _find_damage(folder: Folder, name: str, index: CheckpointIndex) -> Damage | None:
    """Reads the file `name` of a checkpoint, and returns its damage, or None if the file is intact."""
    info = index.files[name]
    try:
        if (num_bytes := folder.num_bytes(name)) != info.num_bytes:
            return Damage(name, f"has {num_bytes} of {info.num_bytes} bytes")
        return None if compute_crc(folder, name) == info.crc else Damage(name, "does not match its checksum")
    except FileNotFoundError:
        return Damage(name, "is missing")
    except Exception as error:  # a file system may raise any error
        return Damage(name, f"cannot be read: {format_cause(error)}")


def _sort_key(name: str) -> tuple[int, int]:
    """Returns the key by which checkpoints sort from old to new: the number of rewinds and the step in the name."""
    match = _STEP_PATTERN.fullmatch(name)
    assert match is not None, name
    return int(match[2] or 0), int(match[1])


class CheckpointFileReader:
    """Reads checkpoints for the command line, without a run. Implements `protocols.CheckpointFiles`."""

    def names(self, folder: str) -> list[str]:
        return list_checkpoints(open_folder(folder))

    def describe(self, path: str) -> CheckpointIndex | None:
        folder = open_folder(path)
        return read_index(folder) if INDEX_NAME in folder.names() else None

    def is_intact(self, path: str) -> bool:
        return not verify_share(open_folder(path))[1]

    def open(self, path: str) -> state.CheckpointReader | None:
        folder = open_folder(path)
        if INDEX_NAME in folder.names():
            if damages := verify(path):
                message = f"the checkpoint {folder.uri} is damaged: {', '.join(map(str, damages))}"
                raise RunError("checkpoint-damaged", message)
            return read(path)
        result = newest(path)
        if result.path is None and result.damaged_checkpoints:
            message = f"no checkpoint in {folder.uri} is intact: {result.damaged_checkpoints[0][1][0]}"
            raise RunError("checkpoint-damaged", message)
        return None if result.path is None else read(result.path)
