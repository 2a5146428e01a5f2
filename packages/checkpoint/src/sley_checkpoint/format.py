"""The files of a checkpoint: safetensors files with tensor parts, and the index `checkpoint.json`. The index is written last: a
folder without an index is not a checkpoint.

A file header stores the offset of each part in the full tensor, in the format of torch.distributed.checkpoint
(`HuggingFaceStorageReader`), and the run, step and rank of the file. No file can run code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sley_checkpoint.folders import Folder
from sley_core.api.state import BY_NAME, Rectangle, SavedRun, Spec, TensorPiece, build_header, bytes_of
from sley_core.errors import RunError

INDEX = "checkpoint.json"
FORMAT = 1


class FileInfo(NamedTuple):
    """Holds the size in bytes and the CRC-32 of a checkpoint file, for verification. rank: the rank that wrote the file."""

    num_bytes: int
    crc: int
    rank: int


@dataclass(frozen=True)
class TensorInfo:
    """Describes a saved tensor: its safetensors dtype, its full shape, and the file of each of its rectangles."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[str, Rectangle]]


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex(SavedRun):
    """Holds all data of a checkpoint except its tensors. token: a random text for each save; it begins with the id of the
    attempt that saved.
    """

    token: str
    files: dict[str, FileInfo]
    tensors: dict[str, TensorInfo]

    def to_bytes(self) -> bytes:
        """Returns the content of the index file, which includes a checksum of the index."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))
        return f'{{"checksum":"{sha256(content.encode()).hexdigest()}",\n"index":{content}}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> CheckpointIndex:
        """Parses the content of the index file. Raises ValueError if the content is damaged or has another format."""
        head, _, tail = bytes(data).partition(b',\n"index":')
        content = tail.removesuffix(b"}\n")
        if not tail or head != f'{{"checksum":"{sha256(content).hexdigest()}"'.encode():
            raise ValueError("its checksum does not match its content")
        fields: dict[str, Any] = json.loads(content)
        if (version := fields.pop("format")) != FORMAT:
            raise ValueError(f"its format must be {FORMAT}, but is {version}")
        fields["files"] = {name: FileInfo(*info) for name, info in fields["files"].items()}
        fields["tensors"] = {name: _parse_tensor_info(info) for name, info in fields["tensors"].items()}
        return cls(**fields)


def read_index(folder: Folder) -> CheckpointIndex:
    """Returns the index of the checkpoint in `folder`.

    Raises RunError `no-checkpoint` if the folder has no index, and `checkpoint-damaged` if the index cannot be parsed.
    """
    try:
        data = folder.read(INDEX)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError("no-checkpoint", f"{folder.text} is not a checkpoint: it has no {INDEX}") from None
    try:
        return CheckpointIndex.from_bytes(data)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError("checkpoint-damaged", f"{folder.text}/{INDEX} is damaged: {error}") from error


def _parse_tensor_info(fields: Mapping[str, Any]) -> TensorInfo:
    pieces = [(file, Rectangle(tuple(offsets), tuple(sizes))) for file, (offsets, sizes) in fields["pieces"]]
    return TensorInfo(fields["dtype"], tuple(fields["shape"]), pieces)


CHUNK_BYTES = 16 << 20
"""The size of one write in bytes. Python's lock is free during each write."""

_LENGTH = struct.Struct("<Q")


class StoredTensor(NamedTuple):
    """Describes a rectangle in a file: its row-major bytes are in the range [start, end)."""

    dtype: torch.dtype
    rectangle: Rectangle
    start: int
    end: int


def file_header(pieces: Sequence[TensorPiece], info: Mapping[str, Any]) -> bytes:
    """Returns the header of a file that holds `pieces`, which are sorted from wide to narrow dtypes. info: JSON data about the
    file.
    """
    specs = [Spec.from_dtype(piece.name, piece.tensor.dtype, piece.rectangle.sizes) for piece in pieces]
    offsets = {piece.name: {"saved_offsets": list(piece.rectangle.offsets)} for piece in pieces}
    header, starts = build_header(
        specs, {"sley": json.dumps(info), "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    )
    assert list(starts) == [piece.name for piece in pieces], "pieces must be sorted from wide to narrow dtypes"
    return header


def parse_header(data: bytes) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Returns a file's tensors by name, and the JSON data about the file. Raises ValueError if the header cannot be parsed.

    data: the first bytes of the file, at least its header.
    """
    if len(data) < _LENGTH.size or len(data) < header_size(data):
        raise ValueError("it ends within its header")
    data_start = header_size(data)
    header = json.loads(data[_LENGTH.size : data_start])
    metadata = header.pop("__metadata__")
    offsets, info = json.loads(metadata["DCP_SHARDING_INFO"]), json.loads(metadata["sley"])
    tensors = {}
    for name, fields in header.items():
        rectangle = Rectangle(tuple(offsets[name]["saved_offsets"]), tuple(fields["shape"]))
        start, end = fields["data_offsets"]
        tensors[name] = StoredTensor(BY_NAME[fields["dtype"]], rectangle, data_start + start, data_start + end)
    return tensors, info


def header_size(data: bytes | bytearray) -> int:
    """Returns the header size in bytes. data: at least the first eight bytes of a file."""
    return _LENGTH.size + int(_LENGTH.unpack_from(data)[0])


def tensor_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the row-major bytes of `tensor`, without a copy if the tensor is contiguous and on the host."""
    contiguous = tensor.detach().cpu().contiguous()
    data = bytes_of(contiguous)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def file_name(rank: int, index: int) -> str:
    """Returns the name of a rank's file. index: the number of the file on its rank, from 0."""
    return f"rank-{rank:05}{f'-{index}' if index else ''}.safetensors"
