"""The files of a checkpoint: safetensors with parts of tensors, and `checkpoint.json`, the index, which is written last: a
folder without it is no checkpoint.

The header of a file says where each tensor begins in the whole one, as torch.distributed.checkpoint reads it
(`HuggingFaceStorageReader`), and to which run, step and rank the file belongs. Nothing in a file can run code.
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

from sley_checkpoint.folders import ReadableFolder
from sley_core.api.state import BY_NAME, Rectangle, SavedRun, Spec, TensorPiece, bytes_of, header_of
from sley_core.errors import RunError

INDEX = "checkpoint.json"
FORMAT = 1


class FileFacts(NamedTuple):
    """Describes a file of a checkpoint, for verification. rank: which rank wrote it."""

    num_bytes: int
    crc: int
    rank: int


@dataclass(frozen=True)
class TensorFacts:
    """Describes a tensor of the run: its format (of safetensors), its full shape, and which file has which rectangle."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[str, Rectangle]]


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex(SavedRun):
    """Describes a checkpoint: everything about it except its tensors. token: drawn for each save; it begins with the id of the
    attempt that saved.
    """

    token: str
    files: dict[str, FileFacts]
    tensors: dict[str, TensorFacts]

    def to_bytes(self) -> bytes:
        """Returns the content of the file, with a checksum of the rest in it."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))
        return f'{{"checksum":"{sha256(content.encode()).hexdigest()}",\n"index":{content}}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> CheckpointIndex:
        """Parses the content of the file. Raises ValueError if it is damaged, or of another format."""
        head, _, rest = bytes(data).partition(b',\n"index":')
        content = rest.removesuffix(b"}\n")
        if not rest or head != f'{{"checksum":"{sha256(content).hexdigest()}"'.encode():
            raise ValueError("its checksum does not fit its text")
        fields: dict[str, Any] = json.loads(content)
        if (kind := fields.pop("format")) != FORMAT:
            raise ValueError(f"it has format {kind}, and this version reads {FORMAT}")
        fields["files"] = {name: FileFacts(*one) for name, one in fields["files"].items()}
        fields["tensors"] = {name: _tensor(one) for name, one in fields["tensors"].items()}
        return cls(**fields)


def read_index(folder: ReadableFolder) -> CheckpointIndex:
    """Returns the index of the checkpoint in `folder`. Raises RunError `no-checkpoint` if there is none, and
    `checkpoint-damaged`.
    """
    try:
        data = folder.read(INDEX)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError("no-checkpoint", f"{folder.text} is no checkpoint: it has no {INDEX}") from None
    try:
        return CheckpointIndex.from_bytes(data)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError("checkpoint-damaged", f"{folder.text}/{INDEX} is damaged: {error}") from error


def _tensor(one: Mapping[str, Any]) -> TensorFacts:
    pieces = [(file, Rectangle(tuple(where[0]), tuple(where[1]))) for file, where in one["pieces"]]
    return TensorFacts(one["dtype"], tuple(one["shape"]), pieces)


CHUNK_BYTES = 16 << 20
"""The bytes of one call of the system: the lock of Python is free meanwhile."""

_LENGTH = struct.Struct("<Q")


class InFile(NamedTuple):
    """Says where a file has a rectangle: bytes from `first` to before `last`, row by row."""

    dtype: torch.dtype
    rectangle: Rectangle
    first: int
    last: int


def file_header(pieces: Sequence[TensorPiece], facts: Mapping[str, Any]) -> bytes:
    """Returns the first bytes of a file that holds `pieces`, wide formats first. facts: JSON, of the file itself."""
    specs = [Spec.of(piece.name, piece.tensor.dtype, piece.rectangle.sizes) for piece in pieces]
    offsets = {piece.name: {"saved_offsets": list(piece.rectangle.offsets)} for piece in pieces}
    header, starts = header_of(
        specs, {"sley": json.dumps(facts), "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    )
    assert list(starts) == [piece.name for piece in pieces], "pieces are not in the order of a file"
    return header


def parsed(start: bytes) -> tuple[dict[str, InFile], dict[str, Any]]:
    """Returns a file's tensors by name, and its facts. start: at least the header. Raises ValueError for a header that is not
    ours.
    """
    if len(start) < _LENGTH.size or len(start) < header_bytes(start):
        raise ValueError("it ends within its header")
    begin = header_bytes(start)
    header = json.loads(start[_LENGTH.size : begin])
    about = header.pop("__metadata__")
    offsets, facts = json.loads(about["DCP_SHARDING_INFO"]), json.loads(about["sley"])
    tensors = {}
    for name, one in header.items():
        rectangle = Rectangle(tuple(offsets[name]["saved_offsets"]), tuple(one["shape"]))
        first, last = one["data_offsets"]
        tensors[name] = InFile(BY_NAME[one["dtype"]], rectangle, begin + first, begin + last)
    return tensors, facts


def header_bytes(start: bytes | bytearray) -> int:
    """Returns the size of the header, from the first eight or more bytes of a file."""
    return _LENGTH.size + int(_LENGTH.unpack_from(start)[0])


def chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the bytes of `tensor`, row by row, without a copy if it is contiguous and on the host."""
    contiguous = tensor.detach().cpu().contiguous()
    data = bytes_of(contiguous)
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def file_name(rank: int, number: int) -> str:
    """Returns the name of a rank's file with this number, from 0."""
    return f"rank-{rank:05}{f'-{number}' if number else ''}.safetensors"
