"""The agreement of all ranks before a save: that they save the same run in the same place, and which rank writes which tensors:
each once, as evenly as possible, the same result on every rank.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sley_checkpoint.folders import GONE, STAGING, Folder, open_folder
from sley_checkpoint.format import INDEX, CheckpointIndex, TensorFacts, chunks_of, file_name
from sley_checkpoint.reader import index_or_none, is_ours, read_header, ready, step_name
from sley_checkpoint.writing import Writing
from sley_core.api.state import BY_NAME, DTYPES, Attempt, Lineage, Rectangle, TensorPiece, TrainingState
from sley_core.errors import RunError, SleyError, cause


class Destination(NamedTuple):
    """Says where a checkpoint is written. path: its own folder, or a folder of several checkpoints."""

    path: str
    is_of_several: bool


class Preparation:
    """Prepares the saves of one rank of the run with `state`.

    Remembers who writes what for as long as no rank holds other tensors than at the last save, and of the checkpoints that it
    has seen who wrote them, and whether they were the best.
    """

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self._run = state.plan.run.name
        self._control = state.parts.groups["control"]
        self._shares: tuple[list[str], Shares] | None = None
        self._seen: dict[str, tuple[Lineage, bool]] = {}

    def prepare(self, where: Destination, step: int, keep: int | None) -> Writing:
        """Agrees with all ranks on a save, and returns this rank's part of it. keep: how many checkpoints of the run to
        keep in a folder of several; None for all.

        All ranks call it: one blocking exchange over `control`, and a second if some rank holds other tensors than before.
        Raises RunError on all ranks alike.
        """
        world, control, attempt = self.state.parts.world, self._control, self.state.attempt.current
        about = self.state.describe(step)
        pieces, own, why = self._own()
        lines = listed(pieces)
        # Rank 0 alone knows the attempt.
        chosen = ["", "", ""] if attempt is None or why else self._target(where, step, attempt)
        report = [why, where.path, sha256(json.dumps(about.state).encode()).hexdigest(), _digest(lines), chosen]
        # All ranks come here, with an error too: nobody waits for one that has none.
        everyone = control.gather_objects(report, what="what ranks are about to save")
        _, token, problem = everyone[0][4]
        _raise_first([one[0] for one in everyone] + [problem], control.ranks)
        _same([one[1] for one in everyone], "folder", control.ranks)
        _same([one[2] for one in everyone], "data, position in them, or loss scale", control.ranks)
        target = open_folder(everyone[0][4][0])
        shares = self._shared([one[3] for one in everyone], lines)
        files = [[pieces[number] for number in numbers] for numbers in shares.of_rank[world.rank]]
        facts = {"run": self._run, "step": step, "token": token}
        return Writing(
            world.rank,
            world.size,
            target.staging(token),
            target,
            files,
            facts,
            own,
            CheckpointIndex(**vars(about), token=token, files={}, tensors=shares.tensors),
            # Half, so that rank 0 says who is missing before the others stop waiting for it.
            self.state.plan.limits.collective_timeout_s / 2,
            lambda piece: chunks_of(piece.tensor),
            partial(self._prune, open_folder(where.path), keep, attempt)
            if keep and where.is_of_several and attempt is not None
            else _nothing,
        )

    def problem(self, path: str) -> str:
        """Returns why the run cannot save in the folder of several checkpoints at `path`; "" if nothing is known."""
        return self._of_another_run(open_folder(path), self.state.attempt.current)

    def _of_another_run(self, folder: Folder, attempt: Attempt | None) -> str:
        """Returns a text if the newest readable checkpoint of a folder is of a run of another name; else ""."""
        own = self._run
        for name in ready(folder):
            index = index_or_none(folder.child(name))
            if index is not None and index.run != own and (attempt is None or not attempt.wrote(index.lineage)):
                return f"the folder {folder.text} has checkpoints of the run {index.run!r}, and this one is {own!r}"
            if index is not None:
                return ""
        return ""

    def _prune(self, folder: Folder, keep: int, attempt: Attempt) -> None:
        """Deletes all but the newest `keep` checkpoints of this run in `folder`, and the newest that was the best when it was
        saved; the newest of all has just been verified.
        """
        with suppress(Exception):  # one too many is no reason to lose the one that was written
            names = ready(folder)
            self._seen = {name: one for name, one in self._seen.items() if name in names}
            own = [name for name in names if self._is_own(folder, name, attempt)]
            best = next((name for name in own if self._seen[name][1]), "")
            for name in own[keep:]:
                if name != best:
                    folder.child(name).remove()

    def _is_own(self, folder: Folder, name: str, attempt: Attempt) -> bool:
        """Returns whether an attempt of this run wrote the checkpoint `name`."""
        if name not in self._seen:
            if (index := index_or_none(folder.child(name))) is None:
                return False
            self._seen[name] = index.lineage, index.is_best
        return attempt.wrote(self._seen[name][0])

    def _own(self) -> tuple[list[TensorPiece], dict[str, Any], str]:
        """Returns this rank's tensors, the rest of its state, and the text of an error if it cannot save, else ""."""
        try:
            own = self.state.rank_values()
            return self.state.pieces(), own, ""
        except SleyError as error:
            first = error.diagnostics[0]
            return [], {}, f"{first.message} ({first.hint})" if first.hint else first.message
        except Exception as error:  # of a part of the run that keeps something: the other ranks wait for an answer
            return [], {}, cause(error)

    def _target(self, where: Destination, step: int, attempt: Attempt) -> list[str]:
        """Returns the folder, a token for this save, and the text of an error, if any; removes unfinished
        saves.
        """
        try:
            folder = open_folder(where.path)
            names = folder.names()
            token = f"{attempt.id}.{secrets.token_hex(8)}"
            if not where.is_of_several:
                problem = f"there is something in {folder.text} already" if names else ""
                return [folder.text, token, problem]
            remove_unfinished(folder, attempt)
            if names and (problem := self._of_another_run(folder, attempt)):
                return ["", "", problem]
            return [folder.child(step_name(step, names)).text, token, ""]
        except Exception as error:  # whatever a file system raises
            return ["", "", f"the folder {where.path} cannot be read: {cause(error)}"]

    def _shared(self, digests: list[str], lines: list[Listed]) -> Shares:
        """Returns which rank writes which tensors; all ranks skip the exchange of their lists if none has changed."""
        if self._shares is None or self._shares[0] != digests:
            # All ranks: they have compared the same digests with those of the same last save.
            everyone = self._control.gather_objects(lines, what="what ranks have")
            self._shares = digests, share_out([from_lists(one) for one in everyone])
        return self._shares[1]


def remove_unfinished(folder: Folder, attempt: Attempt) -> None:
    """Deletes the unfinished saves of this run in a folder of checkpoints."""
    for name in folder.names():
        if is_ours(name) and folder.is_unfinished(name, INDEX) and _writer(folder, name) in {*attempt.ids, GONE}:
            folder.child(name).remove()


def _writer(folder: Folder, name: str) -> str:
    """Returns the attempt that began to write the unfinished checkpoint `name`; "gone" for one that is being deleted."""
    if name.startswith(STAGING):
        return name.rpartition("-")[2].partition(".")[0]
    with suppress(Exception):  # at a URL it has its final name; whatever a file system raises
        for file in folder.child(name).names():
            if file.endswith(".safetensors"):
                return str(read_header(folder.child(name), file)[1]["token"]).partition(".")[0]
    return ""


def _nothing() -> None: ...


def absolute(path: str | Path) -> str:
    """Returns a path or URL that does not depend on the current directory."""
    return open_folder(path).text


def _digest(lines: list[Listed]) -> str:
    return sha256(json.dumps(lines).encode()).hexdigest()


def _raise_first(problems: list[str], ranks: tuple[int, ...]) -> None:
    for rank, problem in zip([*ranks, 0], problems, strict=True):
        if problem:
            raise RunError("checkpoint-failed", f"rank {rank} cannot save: {problem}")


def _same(values: list[str], what: str, ranks: tuple[int, ...]) -> None:
    """Raises RunError "ranks-differ" if the ranks' `values` are not all equal. what: names them in the error."""
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            message = f"ranks {ranks[0]} and {rank} are about to save with another {what}"
            raise RunError("ranks-differ", message, hint="all ranks save the same at the same time")


class Listed(NamedTuple):
    """Describes a piece for other ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rectangle: Rectangle

    @property
    def num_bytes(self) -> int:
        return self.rectangle.numel * BY_NAME[self.dtype].itemsize


def listed(pieces: Sequence[TensorPiece]) -> list[Listed]:
    """Returns the descriptions of a rank's pieces, for the other ranks."""
    return [Listed(one.name, DTYPES[one.tensor.dtype], one.shape, one.rectangle) for one in pieces]


def from_lists(lists: Sequence[Sequence[Any]]) -> list[Listed]:
    """Rebuilds the descriptions from lists, which JSON made of them."""
    return [
        Listed(name, dtype, tuple(shape), Rectangle(tuple(offsets), tuple(sizes)))
        for name, dtype, shape, (offsets, sizes) in lists
    ]


class Shares(NamedTuple):
    """Says which rank writes which tensors. of_rank: by rank, the numbers of the pieces that it writes, file by file. tensors:
    the index of all.
    """

    of_rank: list[list[list[int]]]
    tensors: dict[str, TensorFacts]


def share_out(everyone: Sequence[Sequence[Listed]]) -> Shares:
    """Returns which rank writes which tensors, from the lists of all ranks: in order of size, each piece goes to the rank with
    the fewest bytes so far, among the ranks that have the piece.

    A file has each name once, so of several rectangles of one tensor the second goes into the rank's second file, and so on.
    Raises RunError `checkpoint-ranks` if ranks have tensors of one name that do not fit together.
    """
    holders: dict[Listed, list[tuple[int, int]]] = {}
    for rank, pieces in enumerate(everyone):
        for number, piece in enumerate(pieces):
            holders.setdefault(piece, []).append((rank, number))
    _check(holders)
    loads = [0] * len(everyone)
    chosen: list[list[int]] = [[] for _ in everyone]
    for piece in sorted(holders, key=lambda one: (-one.num_bytes, one)):
        rank, number = min(holders[piece], key=lambda one: (loads[one[0]], one))
        loads[rank] += piece.num_bytes
        chosen[rank].append(number)
    of_rank = [_files(pieces, sorted(numbers)) for pieces, numbers in zip(everyone, chosen, strict=True)]
    tensors: dict[str, TensorFacts] = {}
    for rank, files in enumerate(of_rank):
        for at, numbers in enumerate(files):
            for number in numbers:
                one = everyone[rank][number]
                facts = tensors.setdefault(one.name, TensorFacts(one.dtype, one.shape, []))
                facts.pieces.append((file_name(rank, at), one.rectangle))
    return Shares(of_rank, tensors)


def _files(pieces: Sequence[Listed], numbers: Sequence[int]) -> list[list[int]]:
    """Distributes the numbers over files, wide formats first, so that all are aligned; at least one file."""
    files: list[list[int]] = [[]]
    seen: dict[str, int] = {}
    for number in numbers:
        at = seen[pieces[number].name] = seen.get(pieces[number].name, -1) + 1
        if at == len(files):
            files.append([])
        files[at].append(number)
    for file in files:
        file.sort(key=lambda number: -BY_NAME[pieces[number].dtype].itemsize)
    return files


def _check(pieces: dict[Listed, list[tuple[int, int]]]) -> None:
    """Raises RunError unless the pieces of each name have one format and one shape, and cover all of it without overlap."""
    known: dict[str, Listed] = {}
    numel: dict[str, int] = {}
    for piece, holders in pieces.items():
        first = known.setdefault(piece.name, piece)
        if (first.dtype, first.shape) != (piece.dtype, piece.shape):
            rank = holders[0][0]
            message = f"{piece.name!r} is {piece.dtype} {list(piece.shape)} on rank {rank}"
            raise RunError("checkpoint-ranks", f"{message}, and {first.dtype} {list(first.shape)} on another")
        assert piece.rectangle.common(Rectangle.all_of(piece.shape)) in (piece.rectangle, None), piece
        numel[piece.name] = numel.get(piece.name, 0) + piece.rectangle.numel
    for name, num_elements in numel.items():
        assert num_elements == prod(known[name].shape), f"{num_elements} elements of {known[name]} are on ranks"
