"""Reads a checkpoint: names first, then whole tensors, or only the wanted part of each.

found = read("runs/small/checkpoints/step-00000100")
found.step, found.names
weight = found["weights/blocks.0.norm.weight"]
state = found.weights()                              # a mapping, read on access; `run.load_weights` takes it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from sley_core.checkpoint.index import WEIGHTS, CheckpointIndex, TensorFacts, read_index
from sley_core.checkpoint.rectangles import Rectangle, all_of
from sley_core.checkpoint.tensor_file import InFile, bytes_of, header_bytes, parsed
from sley_core.errors import RunError
from sley_core.files.folders import ReadableFolder, open_folder
from sley_core.weight_files.write import BY_NAME

_GUESS_BYTES = 1 << 16
"""Of a header; a longer one is read a second time."""


class Checkpoint(Mapping[str, Tensor]):
    """Maps the names of a checkpoint's tensors to whole tensors on the host, which are read on access; also holds its index.

    Reading it cannot run code. Files are not verified as they are read: `verify` does that.
    """

    def __init__(self, folder: ReadableFolder, index: CheckpointIndex) -> None:
        self.folder = folder
        self.index = index
        self._files: dict[str, dict[str, InFile]] = {}

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.index.step

    @property
    def names(self) -> list[str]:
        return list(self.index.tensors)

    def weights(self) -> Mapping[str, Tensor]:
        """Returns the weights by the names of the parameter book: masters if there were any."""
        return _Part(self, WEIGHTS)

    def facts(self, name: str) -> TensorFacts:
        """Returns format, full shape and places of a tensor."""
        return self.index.tensors[name]

    def __getitem__(self, name: str) -> Tensor:
        facts = self.facts(name)
        whole = torch.empty(facts.shape, dtype=BY_NAME[facts.dtype])
        self.read_into(name, all_of(facts.shape), whole)
        return whole

    def __contains__(self, name: object) -> bool:
        return name in self.index.tensors  # what a mapping does by itself reads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.tensors)

    def __len__(self) -> int:
        return len(self.index.tensors)

    @torch.no_grad()
    def read_into(self, name: str, wanted: Rectangle, target: Tensor) -> None:
        """Reads the rectangle `wanted` of a tensor into `target`, which has its sizes; converts to the dtype of `target`.

        Raises RunError `checkpoint-damaged` if files do not have what the index says.
        """
        num_missing = wanted.numel
        for file, rectangle in self.facts(name).pieces:
            common = rectangle.common(wanted)
            if common is not None:
                self._read_common(file, name, rectangle, common, target[common.slices_in(wanted)])
                num_missing -= common.numel
        if num_missing:
            raise self._damaged(f"{num_missing} elements of {name!r} are in no file")

    def _read_common(self, file: str, name: str, rectangle: Rectangle, common: Rectangle, target: Tensor) -> None:
        """Reads the rows of a file's rectangle that contain wanted elements, and copies those; directly into `target`, if all
        of the rows is wanted.
        """
        there = self._header(file).get(name)
        if there is None or there.rectangle != rectangle:
            raise self._damaged(f"{file} does not have the {name!r} that the index says")
        sizes = list(rectangle.sizes)
        first = 0
        if sizes:
            first = (common.offsets[0] - rectangle.offsets[0]) * prod(sizes[1:]) * there.dtype.itemsize
            sizes[0] = common.sizes[0]
        is_direct = (
            target.device.type == "cpu"
            and target.dtype == there.dtype
            and target.is_contiguous()
            and tuple(sizes) == common.sizes
        )
        rows = target if is_direct else torch.empty(sizes, dtype=there.dtype)
        memory = bytes_of(rows)
        if self.folder.read_into(file, there.first + first, memory) != len(memory):
            raise self._damaged(f"{file} is cut short")
        if not is_direct:
            inside = common.slices_in(rectangle)
            target.copy_(rows[(slice(None), *inside[1:])] if inside else rows)

    def _header(self, file: str) -> dict[str, InFile]:
        if file not in self._files:
            self._files[file] = read_header(self.folder, file)[0]
        return self._files[file]

    def _damaged(self, how: str) -> RunError:
        return RunError("checkpoint-damaged", f"the checkpoint {self.folder.text} is damaged: {how}")


class _Part(Mapping[str, Tensor]):
    """Maps the tensors whose names begin with `prefix`, by the rest of their names."""

    def __init__(self, whole: Checkpoint, prefix: str) -> None:
        self._whole = whole
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._whole

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._whole if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read(path: str | Path) -> Checkpoint:
    """Returns the checkpoint in the folder `path`. Raises RunError `no-checkpoint`, or `checkpoint-damaged` for its index."""
    folder = open_folder(path)
    return Checkpoint(folder, read_index(folder))


def read_header(folder: ReadableFolder, file: str) -> tuple[dict[str, InFile], dict[str, object]]:
    """Returns a file's tensors by name, and the facts of the file. Raises RunError `checkpoint-damaged`, OSError if it is not
    there.
    """
    start = folder.read(file, 0, _GUESS_BYTES)
    try:
        if len(start) >= 8 and (length := header_bytes(start)) > len(start):
            start = folder.read(file, 0, length)
        return parsed(bytes(start))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError("checkpoint-damaged", f"{folder.text}/{file} has no header that can be read: {error}") from error
