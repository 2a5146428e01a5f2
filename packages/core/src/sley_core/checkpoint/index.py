"""The index of a checkpoint: `checkpoint.json`, the file that is written last; without it there is no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from sley_core.attempt import Lineage, lineage_of
from sley_core.checkpoint.rectangles import Rectangle
from sley_core.errors import RunError
from sley_core.files.folders import ReadableFolder

INDEX = "checkpoint.json"
FORMAT = 1

WEIGHTS, OPTIMIZER, BUFFERS = "weights/", "optimizer/", "buffers/"
"""How the names of tensors begin: `weights/norm.weight`, `optimizer/norm.weight/exp_avg`, `buffers/norm.running_mean`."""


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


@dataclass(frozen=True)
class CheckpointIndex:
    """Holds everything about a checkpoint except its tensors.

    run, step, token: identify it; the token is drawn for each save. lineage: the attempts that took its steps. plan: resolved,
    as text. versions: of torch and of plugins. layout: ranks along each axis, and `world`. optimizer: its name in the plan.
    values: by name, what the optimizer keeps besides tensors (`values.to_json`). paths: where a tensor lies in the nested state
    of its parameter. state: steps done, loss scale, position in the data and the like. ranks: what each rank keeps for itself.
    """

    run: str
    step: int
    token: str
    lineage: Lineage
    plan: str
    versions: dict[str, str]
    layout: dict[str, int]
    optimizer: str
    files: dict[str, FileFacts]
    tensors: dict[str, TensorFacts]
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)

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
        found: dict[str, Any] = json.loads(content)
        if (kind := found.pop("format")) != FORMAT:
            raise ValueError(f"it has format {kind}, and this version reads {FORMAT}")
        found["lineage"] = lineage_of(found["lineage"])
        found["files"] = {name: FileFacts(*one) for name, one in found["files"].items()}
        found["tensors"] = {name: _tensor(one) for name, one in found["tensors"].items()}
        return cls(**found)


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
