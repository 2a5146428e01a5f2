"""Prepares a save: all ranks agree that they save the same run to the same folder, and on the tensors that each rank writes.

Each tensor is written once, the bytes are spread evenly over the ranks, and all ranks compute the same assignment.
"""

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

from sley_checkpoint import reader
from sley_checkpoint.folders import DELETED, STAGING_PREFIX, Folder, open_folder
from sley_checkpoint.writing import RankWriter
from sley_core.api.state import BY_NAME, DTYPES, Attempt, Lineage, Rectangle, TensorPiece, TrainingState
from sley_core.errors import RunError, SleyError, format_cause


class SavePreparation:
    """Prepares the saves of one rank of the run with `state`.

    Caches the assignment of tensors to ranks until the tensors of a rank change. Also caches, for each checkpoint in the
    folder, its lineage and whether it was the best when it was saved.
    """

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self._run = state.plan.run.name
        self._control = state.parts.groups["control"]
        self._assignment: tuple[list[str], WriteAssignment] | None = None
        self._lineages: dict[str, tuple[Lineage, bool]] = {}

    def prepare(self, folder: Folder, step: int, keep: int | None, *, is_run_folder: bool) -> RankWriter:
        """Agrees on a save with all ranks, and returns the writer of this rank's part.

        folder: the run's folder of checkpoints if `is_run_folder`, else the folder of the checkpoint itself. keep: the number
        of checkpoints to keep in the run's folder; None for all.

        All ranks call it. It blocks in one exchange over `control`, and in a second one if the tensors of a rank have changed.
        Raises the same RunError on all ranks.
        """
        world, control, attempt = self.state.parts.world, self._control, self.state.attempt.current
        description = self.state.describe(step)
        pieces, rank_values, problem = self._rank_values()
        infos = [PieceInfo(piece.name, DTYPES[piece.tensor.dtype], piece.shape, piece.rectangle) for piece in pieces]
        # Only rank 0 has an attempt, so only rank 0 chooses the target.
        target = (
            ["", "", ""]
            if attempt is None or problem
            else self._choose_target(folder, step, attempt, is_run_folder=is_run_folder)
        )
        state_digest = _compute_digest(description.state)
        # All ranks join the exchange, even after an error, so that no rank waits in vain.
        reports = control.gather_objects(
            [problem, folder.text, state_digest, _compute_digest(infos), target], label="the contents of a save"
        )
        problems, paths, state_digests, digests, targets = (list(column) for column in zip(*reports, strict=True))
        path, token, target_problem = targets[0]
        _raise_first_problem([*problems, target_problem], control.ranks)
        _check_equal(paths, "folder", control.ranks)
        _check_equal(state_digests, "data, position in the data, or loss scale", control.ranks)
        target_folder = open_folder(path)
        assignment = self._agree_on_assignment(digests, infos)
        files = [[pieces[index] for index in indices] for indices in assignment.file_indices[world.rank]]
        return RankWriter(
            world.rank,
            world.size,
            target_folder.staging(token),
            target_folder,
            files,
            {"run": self._run, "step": step, "token": token},
            rank_values,
            reader.CheckpointIndex(**vars(description), token=token, files={}, tensors=assignment.tensors),
            # Half the limit, so that rank 0 names the missing rank before the others stop waiting for rank 0.
            self.state.plan.limits.collective_timeout_s / 2,
            lambda piece: reader.split_into_chunks(piece.tensor),
            partial(self._prune, folder, keep, attempt) if keep and is_run_folder and attempt else lambda: None,
        )

    def find_problem(self, folder: Folder) -> str:
        """Returns a message if a run of another name wrote the newest readable checkpoint in `folder`; else ""."""
        attempt = self.state.attempt.current
        indices = (reader.try_read_index(folder.child(name)) for name in reader.list_checkpoints(folder))
        newest = next(filter(None, indices), None)
        if newest is None or newest.run == self._run or (attempt is not None and attempt.is_writer_of(newest.lineage)):
            return ""
        return f"the folder {folder.text} has checkpoints of the run {newest.run!r}, but this run is {self._run!r}"

    def _prune(self, folder: Folder, keep: int, attempt: Attempt) -> None:
        """Deletes this run's checkpoints in `folder`, except the newest `keep` and the newest that was the best when it was
        saved.

        The files of the newest checkpoint have just been verified.
        """
        with suppress(Exception):  # a failed deletion must not fail the save
            names = reader.list_checkpoints(folder)
            self._lineages = {name: lineage for name, lineage in self._lineages.items() if name in names}
            own_names = [name for name in names if self._is_written_by_run(folder, name, attempt)]
            best = next((name for name in own_names if self._lineages[name][1]), "")
            for name in own_names[keep:]:
                if name != best:
                    folder.child(name).remove()

    def _is_written_by_run(self, folder: Folder, name: str, attempt: Attempt) -> bool:
        """Returns whether an attempt of this run wrote the checkpoint `name`."""
        if name not in self._lineages:
            if (index := reader.try_read_index(folder.child(name))) is None:
                return False
            self._lineages[name] = index.lineage, index.is_best
        return attempt.is_writer_of(self._lineages[name][0])

    def _rank_values(self) -> tuple[list[TensorPiece], dict[str, Any], str]:
        """Returns this rank's tensors, its other state, and an error message if the rank cannot save, else ""."""
        try:
            values = self.state.rank_values()
            return self.state.pieces(), values, ""
        except SleyError as error:
            diagnostic = error.diagnostics[0]
            hint = f" ({diagnostic.hint})" if diagnostic.hint else ""
            return [], {}, f"{diagnostic.message}{hint}"
        except Exception as error:  # a stateful part may raise any error, and the other ranks wait for the report
            return [], {}, format_cause(error)

    def _choose_target(self, folder: Folder, step: int, attempt: Attempt, *, is_run_folder: bool) -> list[str]:
        """Deletes unfinished saves. Returns the folder for the checkpoint, a token for the save, and an error message or ""."""
        try:
            names = folder.names()
            token = f"{attempt.id}.{secrets.token_hex(8)}"
            if not is_run_folder:
                problem = f"the folder {folder.text} is not empty" if names else ""
                return [folder.text, token, problem]
            remove_unfinished(folder, attempt)
            if names and (problem := self.find_problem(folder)):
                return ["", "", problem]
            return [folder.child(reader.choose_checkpoint_name(step, names)).text, token, ""]
        except Exception as error:  # a file system may raise any error
            return ["", "", f"the folder {folder.text} cannot be read: {format_cause(error)}"]

    def _agree_on_assignment(self, digests: list[str], infos: "list[PieceInfo]") -> "WriteAssignment":
        """Returns the pieces that each rank writes. The ranks exchange their lists of pieces only if a list has changed.

        digests: the digest of each rank's list. infos: this rank's list.
        """
        if self._assignment is None or self._assignment[0] != digests:
            # All ranks join this exchange or none: they compare the same digests with those of the last save.
            lists = self._control.gather_objects(infos, label="the tensors of all ranks")
            self._assignment = digests, assign_pieces([parse_pieces(fields) for fields in lists])
        return self._assignment[1]


def remove_unfinished(folder: Folder, attempt: Attempt) -> None:
    """Deletes this run's unfinished saves, and half-deleted checkpoints, in a folder of checkpoints."""
    for name in folder.names():
        is_unfinished = reader.is_checkpoint_name(name) and folder.is_unfinished(name, reader.INDEX)
        if is_unfinished and _find_writing_attempt(folder, name) in {*attempt.ids, DELETED}:
            folder.child(name).remove()


def _find_writing_attempt(folder: Folder, name: str) -> str:
    """Returns the id of the attempt that wrote the unfinished checkpoint `name`; `DELETED` if it is being deleted."""
    if name.startswith(STAGING_PREFIX):
        return name.rpartition("-")[2].partition(".")[0]
    with suppress(Exception):  # an object store has no staging folders; a file system may raise any error
        for file in folder.child(name).names():
            if file.endswith(".safetensors"):
                return str(reader.read_header(folder.child(name), file)[1]["token"]).partition(".")[0]
    return ""


def _compute_digest(data: Any) -> str:
    return sha256(json.dumps(data).encode()).hexdigest()


def _raise_first_problem(problems: list[str], ranks: tuple[int, ...]) -> None:
    for rank, problem in zip([*ranks, 0], problems, strict=True):
        if problem:
            raise RunError("checkpoint-failed", f"rank {rank} cannot save: {problem}")


def _check_equal(values: list[str], description: str, ranks: tuple[int, ...]) -> None:
    """Raises RunError `ranks-differ` if the ranks' `values` differ. description: a noun for the values in the error."""
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            message = f"ranks {ranks[0]} and {rank} cannot save together: their {description} differs"
            raise RunError("ranks-differ", message, hint="save the same run on all ranks at the same time")


class PieceInfo(NamedTuple):
    """Describes a tensor piece to the other ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rectangle: Rectangle

    @property
    def num_bytes(self) -> int:
        return self.rectangle.numel * BY_NAME[self.dtype].itemsize


def parse_pieces(lists: Sequence[Sequence[Any]]) -> list[PieceInfo]:
    """Returns the descriptions from their JSON form, in which tuples are lists."""
    return [
        PieceInfo(name, dtype, tuple(shape), Rectangle(tuple(offsets), tuple(sizes)))
        for name, dtype, shape, (offsets, sizes) in lists
    ]


class WriteAssignment(NamedTuple):
    """Assigns tensor pieces to ranks. file_indices: for each rank and each of its files, the indices in the rank's list of the
    pieces in the file. tensors: the description of each tensor of the checkpoint, by name.
    """

    file_indices: list[list[list[int]]]
    tensors: dict[str, reader.TensorInfo]


def assign_pieces(rank_pieces: Sequence[Sequence[PieceInfo]]) -> WriteAssignment:
    """Assigns each piece, from large to small, to the rank with the fewest bytes among the ranks that have the piece.

    A file can have a tensor name only once, so a second piece of a tensor goes to the rank's second file, and so on.
    Raises RunError `checkpoint-ranks` if the dtypes or shapes of a tensor differ between ranks.
    """
    holders: dict[PieceInfo, list[tuple[int, int]]] = {}
    for rank, pieces in enumerate(rank_pieces):
        for index, piece in enumerate(pieces):
            holders.setdefault(piece, []).append((rank, index))
    _check_pieces(holders)
    loads = [0] * len(rank_pieces)
    assigned: list[list[int]] = [[] for _ in rank_pieces]
    for piece in sorted(holders, key=lambda piece: (-piece.num_bytes, piece)):
        rank, index = min(holders[piece], key=lambda holder: (loads[holder[0]], holder))
        loads[rank] += piece.num_bytes
        assigned[rank].append(index)
    file_indices = [_split_into_files(pieces, sorted(indices)) for pieces, indices in zip(rank_pieces, assigned, strict=True)]
    tensors: dict[str, reader.TensorInfo] = {}
    for rank, files in enumerate(file_indices):
        for file_index, indices in enumerate(files):
            for index in indices:
                piece = rank_pieces[rank][index]
                info = tensors.setdefault(piece.name, reader.TensorInfo(piece.dtype, piece.shape, []))
                info.pieces.append((reader.file_name(rank, file_index), piece.rectangle))
    return WriteAssignment(file_indices, tensors)


def _split_into_files(pieces: Sequence[PieceInfo], indices: Sequence[int]) -> list[list[int]]:
    """Distributes the piece indices over at least one file. Sorts each file from wide to narrow dtypes to align the tensors."""
    files: list[list[int]] = [[]]
    last_files: dict[str, int] = {}
    for index in indices:
        file_index = last_files[pieces[index].name] = last_files.get(pieces[index].name, -1) + 1
        if file_index == len(files):
            files.append([])
        files[file_index].append(index)
    for file in files:
        file.sort(key=lambda index: -BY_NAME[pieces[index].dtype].itemsize)
    return files


def _check_pieces(holders: dict[PieceInfo, list[tuple[int, int]]]) -> None:
    """Raises RunError if the pieces of a tensor differ in dtype or shape. Asserts that they cover the tensor exactly."""
    first_pieces: dict[str, PieceInfo] = {}
    numel: dict[str, int] = {}
    for piece, piece_holders in holders.items():
        first = first_pieces.setdefault(piece.name, piece)
        if (first.dtype, first.shape) != (piece.dtype, piece.shape):
            rank = piece_holders[0][0]
            message = f"{piece.name!r} is {piece.dtype} {list(piece.shape)} on rank {rank}"
            raise RunError("checkpoint-ranks", f"{message}, but {first.dtype} {list(first.shape)} on another rank")
        assert piece.rectangle.intersection(Rectangle.full(piece.shape)) in (piece.rectangle, None), piece
        numel[piece.name] = numel.get(piece.name, 0) + piece.rectangle.numel
    for name, num_elements in numel.items():
        assert num_elements == prod(first_pieces[name].shape), f"ranks have {num_elements} elements of {first_pieces[name]}"
