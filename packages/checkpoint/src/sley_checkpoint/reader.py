"""Reads a checkpoint, verifies that it is as it was written, and finds the newest intact one.

found = read("runs/small/checkpoints/step-00000100")
found.step, found.names
weight = found["weights/blocks.0.norm.weight"]
state = found.weights()                              # a mapping, read on access; `run.load_weights` takes it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sley_checkpoint.folders import STAGING, ReadableFolder, StalledError, open_folder
from sley_checkpoint.format import INDEX, CheckpointIndex, FileFacts, InFile, TensorFacts, header_bytes, parsed, read_index
from sley_core.api.files import TensorKind
from sley_core.api.state import BY_NAME, WEIGHTS, Rectangle, Saved, bytes_of
from sley_core.errors import RunError, cause

_STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")

_GUESS_BYTES = 1 << 16
"""Of a header; a longer one is read a second time."""


class Checkpoint(Mapping[str, Tensor]):
    """Maps the names of a checkpoint's tensors to whole tensors on the host, which are read on access; also has its index.

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

    @property
    def description(self) -> CheckpointIndex:
        return self.index

    @property
    def place(self) -> str:
        return self.folder.text

    def kind(self, name: str) -> TensorKind:
        """Returns format and full shape of a tensor."""
        return TensorKind(self.facts(name).dtype, self.facts(name).shape)

    def tensor(self, name: str) -> Tensor:
        return self[name]

    def weights(self) -> Mapping[str, Tensor]:
        """Returns the weights by the names of the parameter registry: masters if there were any."""
        return _Part(self, WEIGHTS)

    def facts(self, name: str) -> TensorFacts:
        """Returns format, full shape and places of a tensor."""
        return self.index.tensors[name]

    def __getitem__(self, name: str) -> Tensor:
        facts = self.facts(name)
        whole = torch.empty(facts.shape, dtype=BY_NAME[facts.dtype])
        self.read_into(name, Rectangle.all_of(facts.shape), whole)
        return whole

    def __contains__(self, name: object) -> bool:
        return name in self.index.tensors  # the default of a mapping reads the tensor

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


def index_or_none(folder: ReadableFolder) -> CheckpointIndex | None:
    """Returns the index of a checkpoint; None if it is damaged, or gone. Raises StalledError."""
    try:
        return read_index(folder)
    except StalledError:
        raise
    except Exception:  # whatever a file system raises
        return None


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


class Damage(NamedTuple):
    """Names a damaged file, and says how it differs from the file that was written."""

    file: str
    how: str

    def __str__(self) -> str:
        return f"{self.file} {self.how}"


class Newest(NamedTuple):
    """Names the newest intact checkpoint of a folder, None if there is none; and newer ones that are damaged, each with its
    damages.
    """

    path: str | None
    passed_over: list[tuple[str, list[Damage]]]


def verify(path: str | Path) -> list[Damage]:
    """Returns the damaged files of the checkpoint in the folder `path`; [] if it is as it was written.

    Reads all of it. Raises RunError `no-checkpoint` for a folder that has nothing of one.
    """
    folder = open_folder(path)
    if not folder.names():
        raise RunError("no-checkpoint", f"there is no checkpoint in {folder.text}")
    return damages(folder)


def newest(path: str | Path) -> Newest:
    """Returns the newest intact checkpoint in the folder `path`, which has several; reads their files."""
    folder = open_folder(path)
    passed_over: list[tuple[str, list[Damage]]] = []
    for name in ready(folder):
        wrong = damages(folder.child(name))
        if not wrong:
            return Newest(folder.child(name).text, passed_over)
        passed_over.append((folder.child(name).text, wrong))
    return Newest(None, passed_over)


def ready(folder: ReadableFolder) -> list[str]:
    """Returns the names of the complete checkpoints in a folder of several, the newest first."""
    names = [name for name in folder.names() if _STEP.fullmatch(name) and not folder.is_unfinished(name, INDEX)]
    return sorted(names, key=_age, reverse=True)


def is_ours(name: str) -> bool:
    """Returns whether a folder with this name is a checkpoint of a run, or the unfinished save of one."""
    return name.startswith(STAGING) or _STEP.fullmatch(name) is not None


def step_name(step: int, taken: Iterable[str]) -> str:
    """Returns an unused name for the checkpoint after `step`, which sorts as the newest of all.

    If a run has been resumed from an older checkpoint, or saves the same step again, a number is added after the step from then
    on.
    """
    ages = [_age(name) for name in taken if _STEP.fullmatch(name)]
    times_back, last = max(ages, default=(0, -1))
    times_back += step <= last
    return f"step-{step:08}-{times_back}" if times_back else f"step-{step:08}"


def damages(folder: ReadableFolder) -> list[Damage]:
    """Returns the damages of the checkpoint in `folder`; reads all of it."""
    return examined(folder)[1]


def examined(folder: ReadableFolder, rank: int = 0, num_ranks: int = 1) -> tuple[CheckpointIndex | None, list[Damage]]:
    """Returns the index, None if it cannot be read, and the damages that one of `num_ranks` ranks finds. Each rank reads
    different files, and all read the index. Raises StalledError.
    """
    try:
        if INDEX not in folder.names():
            return None, [Damage(INDEX, "is missing")]
        index = read_index(folder)
    except StalledError:
        raise
    except RunError as error:
        return None, [Damage(INDEX, f"is damaged: {error.diagnostics[0].message.rpartition(' is damaged: ')[2]}")]
    except Exception as error:  # whatever a file system raises
        return None, [Damage(INDEX, f"cannot be read: {cause(error)}")]
    every = (_damage(folder, name, index) for name in sorted(index.files)[rank::num_ranks])
    return index, [one for one in every if one is not None]


def _damage(folder: ReadableFolder, name: str, index: CheckpointIndex) -> Damage | None:
    """Returns the damage of a file of a checkpoint, None if there is none; reads all of it."""
    facts = index.files[name]
    try:
        num_bytes = folder.num_bytes(name)
        if num_bytes == facts.num_bytes and folder.crc(name) == facts.crc:
            return None
        return Damage(name, _whose(folder, name, index, facts) or _how(num_bytes, facts))
    except FileNotFoundError:
        return Damage(name, "is missing")
    except StalledError:
        raise
    except Exception as error:  # whatever a file system raises
        return Damage(name, f"cannot be read: {cause(error)}")


def _how(num_bytes: int, facts: FileFacts) -> str:
    """Returns in words how a file differs from the file that was written, in size or content."""
    if num_bytes < facts.num_bytes:
        return f"is cut short: it has {num_bytes} bytes of {facts.num_bytes}"
    if num_bytes > facts.num_bytes:
        return f"is too long: it has {num_bytes} bytes, not {facts.num_bytes}"
    return "has other bytes than were written"


def _whose(folder: ReadableFolder, name: str, index: CheckpointIndex, facts: FileFacts) -> str:
    """Returns a text if the file says that it belongs to another checkpoint or rank; else ""."""
    try:
        _, header = read_header(folder, name)
    except StalledError:
        raise
    except RunError:
        return ""
    if (header.get("run"), header.get("step")) != (index.run, index.step):
        return f"is of step {header.get('step')} of the run {header.get('run')!r}"
    if header.get("token") != index.token:
        return f"is of another checkpoint of step {index.step}"
    if header.get("rank") != facts.rank:
        return f"is the file of rank {header.get('rank')}"
    return ""


def _age(name: str) -> tuple[int, int]:
    """Returns a sort key that grows from each save of a run to the next: how often it went back, and its steps."""
    match = _STEP.fullmatch(name)
    assert match is not None, name
    return int(match[2] or 0), int(match[1])


class Files:
    """Reads checkpoints for the command line, without a run (`protocols.CheckpointFiles`)."""

    def names(self, folder: str) -> list[str]:
        return ready(open_folder(folder))

    def describe(self, path: str) -> CheckpointIndex | None:
        folder = open_folder(path)
        return read_index(folder) if INDEX in folder.names() else None

    def is_whole(self, path: str) -> bool:
        return not damages(open_folder(path))

    def open(self, path: str) -> Saved | None:
        folder = open_folder(path)
        if INDEX not in folder.names():
            if not ready(folder):
                return None
            seen = newest(path)
            if seen.path is None:
                message = f"no checkpoint in {folder.text} is whole: {seen.passed_over[0][1][0]}"
                raise RunError("checkpoint-damaged", message)
            path = seen.path
        elif wrong := verify(path):
            message = f"the checkpoint {folder.text} is damaged: {', '.join(map(str, wrong))}"
            raise RunError("checkpoint-damaged", message)
        return read(path)
