"""Saves a run. All ranks agree on the folder and on the tensors that each rank writes, and then write their files.

Each tensor is written once, the bytes are spread evenly over the ranks, and all ranks compute the same assignment. Each rank
writes its files and a note. Rank 0 waits for all notes and publishes the checkpoint.

    rank 1   | rank-00001.safetensors | note-00001.json |
    rank 0   | rank-00000.safetensors | note-00000.json | waits for all notes | checks all sizes | checkpoint.json | rename

The writing uses no collective, so it can run in a thread during training (`BackgroundWriter`).
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import prod
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch

from sley_checkpoint import reader
from sley_checkpoint.folders import DELETED_SUFFIX, STAGING_PREFIX, FileDigest, Folder, compute_crc, open_folder
from sley_core.api.comm import CopyEvent, CopyStream, Device, HostMemory
from sley_core.api.memory import version_of
from sley_core.api.parts import ALIGNMENT_BYTES, round_up
from sley_core.api.state import BY_NAME, DTYPES, Attempt, Lineage, Rectangle, SavedRun, TensorPiece, TrainingState
from sley_core.errors import RunError, SleyError, format_cause

_CLOSE_TIMEOUT_S = 10.0
"""The time in seconds that `BackgroundWriter.wait_or_cancel` waits for ranks that may have died."""

_START_TIMEOUT_S = 0.5
"""The time in seconds for which a rank that fails at once waits for rank 0 to begin its first file."""

_MIN_POLL_S, _MAX_POLL_S = 0.005, 0.1  # the shortest and the longest pause between two reads of the notes, in seconds


@dataclass
class RankWriter:
    """Writes one rank's part of a save.

    staging: the folder of the save until the save is complete. target: the final folder of the checkpoint. files: the pieces of
    each file. header_info: JSON data for the headers of all files. rank_values: JSON data of this rank. index: the index
    without file digests and rank data. timeout_s: the time limit of rank 0's wait for the other ranks, in seconds. read_chunks:
    a function that yields the bytes of a piece. on_publish: a function that rank 0 calls once the checkpoint is complete.
    is_cancelled: another thread sets this to True to end the save soon, without a checkpoint. wait_start: the monotonic time at
    which rank 0 began to wait or last saw a rank finish; None before the wait and on other ranks.
    """

    rank: int
    num_ranks: int
    staging: Folder
    target: Folder
    files: Sequence[Sequence[TensorPiece]]
    header_info: dict[str, Any]
    rank_values: dict[str, Any]
    index: reader.CheckpointIndex
    timeout_s: float
    read_chunks: Callable[[TensorPiece], Iterator[memoryview]]
    on_publish: Callable[[], None]
    is_cancelled: bool = False
    wait_start: float | None = None

    def run(self) -> None:
        """Writes this rank's files; rank 0 then waits for the other ranks and publishes the checkpoint. If the save fails,
        raises RunError `checkpoint-failed`, and rank 0 deletes the new files.
        """
        try:
            self._write()
            if self.rank == 0:
                self._publish()
        except Exception as error:  # a file system may raise any error, of which rank 0 must learn
            self._clean_up(error)
            message = f"the checkpoint {self.target.uri} could not be written by rank {self.rank}: {format_cause(error)}"
            raise RunError("checkpoint-failed", message) from error

    def _write(self) -> None:
        """Writes this rank's files, reads them back to compare checksums, and writes a note with their sizes and checksums."""
        digests: dict[str, FileDigest] = {}
        for index, pieces in enumerate(self.files):
            name = reader.format_file_name(self.rank, index)
            digests[name] = self.staging.write(name, self._file_content(index, pieces))
            if (crc := compute_crc(self.staging, name)) != digests[name].crc:
                message = f"the checksum of {name} must be {digests[name].crc:x}, but is {crc:x} after the write"
                raise RunError("checkpoint-failed", message)
        note = json.dumps({"files": digests, "rank_values": self.rank_values}).encode()
        self.staging.write(_note_name(self.rank), [note])

    def _file_content(self, index: int, pieces: Sequence[TensorPiece]) -> Iterator[bytes | memoryview]:
        """Yields the header of a file and the bytes of each piece. Raises RunError if the save is cancelled."""
        yield reader.build_file_header(pieces, {**self.header_info, "rank": self.rank, "file": index})
        for piece in pieces:
            self._check_not_cancelled()
            yield from self.read_chunks(piece)

    def _check_not_cancelled(self) -> None:
        if self.is_cancelled:
            raise RunError("checkpoint-failed", "the run ended during the save")

    def _publish(self) -> None:
        """Waits for all ranks' notes, checks the file sizes, writes the index, renames the folder and calls `on_publish`."""
        notes = self._wait_for_notes()
        files = {name: FileDigest(*digest) for note in notes for name, digest in note["files"].items()}
        for name, digest in files.items():
            if (num_bytes := self.staging.num_bytes(name)) != digest.num_bytes:
                raise RunError("checkpoint-failed", f"the size of {name} must be {digest.num_bytes} bytes, but is {num_bytes}")
        index = replace(self.index, files=files).with_ranks([note["rank_values"] for note in notes])
        for rank in range(self.num_ranks):
            self.staging.delete_file(_note_name(rank))  # the index has all data of the notes
        self.staging.write(reader.INDEX_NAME, [index.to_bytes()])
        self.staging.publish(self.target)
        self.on_publish()

    def _wait_for_notes(self) -> list[dict[str, Any]]:
        """Returns the notes of all ranks. Raises RunError if a rank fails or exceeds the time limit."""
        deadline, pause_s = time.monotonic() + self.timeout_s, _MIN_POLL_S
        missing = set(range(self.num_ranks))
        while True:
            names = set(self.staging.names())
            for rank in range(self.num_ranks):
                if _failure_name(rank) in names:
                    reason = self.staging.read(_failure_name(rank)).decode() or "the disk is full"
                    raise RunError("checkpoint-failed", f"rank {rank}: {reason}")
            remaining = {rank for rank in missing if _note_name(rank) not in names}
            if remaining != missing or self.wait_start is None:
                missing, self.wait_start = remaining, time.monotonic()
            if not missing:
                return [json.loads(self.staging.read(_note_name(rank))) for rank in range(self.num_ranks)]
            if not names:
                raise RunError("checkpoint-failed", f"the folder {self.staging.uri} no longer exists")
            self._check_not_cancelled()
            if time.monotonic() > deadline:
                raise RunError("checkpoint-failed", f"rank {min(missing)} did not finish in {self.timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    def _clean_up(self, error: Exception) -> None:
        """On rank 0, deletes the files of the failed save. On any other rank, reports `error` to rank 0 in a file."""
        with suppress(Exception):
            if self.rank == 0:
                self.staging.remove()
                return
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not (names := self.staging.names()) and time.monotonic() < deadline:
                time.sleep(_MIN_POLL_S)
            if names:  # else rank 0 has failed too
                for chunks in ([format_cause(error).encode()], []):  # a full disk may still have room for an empty file
                    with suppress(Exception):
                        self.staging.write(_failure_name(self.rank), chunks)
                        break


def _note_name(rank: int) -> str:
    return f"note-{rank:05}.json"


def _failure_name(rank: int) -> str:
    return f"failed-{rank:05}.txt"


class HostCopies:
    """Copies tensors to host memory. All saves share this memory, since to fault in and lock new pages takes longer than to
    copy.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._memory: HostMemory | None = None
        self._stream: CopyStream | None = None

    def start(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], CopyEvent]:
        """Starts to copy `tensors`. Returns the contiguous copies and an event that is done once the copies are complete.
        Invalidates earlier copies.
        """
        offsets = [0]
        for tensor in tensors:
            offsets.append(offsets[-1] + round_up(tensor.nbytes, ALIGNMENT_BYTES))
        # All saves share one stream: CUDA has 32 streams, and exchanges need them.
        self._stream = self._stream or self.device.copy_stream()
        if self._memory is None or self._memory.data.numel() < offsets[-1]:
            self.free()
            self._memory = self.device.host_memory(offsets[-1])
        self._stream.wait_for_device()
        copies = []
        for tensor, offset in zip(tensors, offsets, strict=False):
            copies.append(self._memory.data[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            self._stream.copy(copies[-1], tensor)
        return copies, self._stream.record()

    def free(self) -> None:
        """Frees the memory once the copies in progress are complete. Call it after all threads have read the copies."""
        if self._stream is not None:
            self._stream.record().wait()  # copies of a cancelled save may still write to the memory
        self._memory = None


class BackgroundWriter:
    """Starts to copy the tensors of `writer` to the host, and runs `writer` on the copies in a thread. If the copies cannot
    start, the save fails. failure: the error message after `wait` has returned, or "" if the save succeeded.
    """

    def __init__(self, writer: RankWriter, host: HostCopies) -> None:
        self.writer = writer
        self.failure = ""
        pieces = [piece for pieces in writer.files for piece in pieces]
        # On an asynchronous device, a forward may change tensors without an optimizer step, such as buffers, before their copy.
        stable = [piece.is_updated_by_optimizer or not host.device.is_async for piece in pieces]
        self._event, self._copies = CopyEvent(), dict[int, torch.Tensor]()
        self._error: Exception | None = None
        try:
            self._sources = [
                piece.tensor.detach() if is_stable else torch.clone(piece.tensor.detach())
                for piece, is_stable in zip(pieces, stable, strict=True)
            ]
            copies, self._event = host.start(self._sources)
            self._copies = {id(piece): copy for piece, copy in zip(pieces, copies, strict=True)}
        except Exception as error:  # there may be too little memory; `writer` reports the error to the other ranks
            self._error = error
        self._versions = [(piece, version_of(piece.tensor)) for piece in pieces if piece.is_updated_by_optimizer]
        self._lock = Lock()
        self._changed_name: str | None = "" if self._event.is_done() else None
        writer.read_chunks = self._read_chunks
        self._thread = Thread(target=self._run, name="sley-checkpoint", daemon=True)
        self._thread.start()

    def copy_unwritten_state(self) -> None:
        """Makes later work on the device, such as an update of the tensors, wait for the copies."""
        self._event.make_device_wait()
        self._check_versions()

    def wait(self) -> None:
        """Waits until the save is complete or has failed."""
        self._thread.join()

    def wait_or_cancel(self) -> None:
        """Waits for the save. Rank 0 cancels the save if no other rank finishes its part within _CLOSE_TIMEOUT_S seconds."""
        while self._thread.is_alive():
            self._thread.join(_MAX_POLL_S)
            start = self.writer.wait_start
            if start is not None and time.monotonic() - start > _CLOSE_TIMEOUT_S:
                self.writer.is_cancelled = True

    def _check_versions(self) -> None:
        """Records the name of a tensor that the program changed during the copies. Only the first call checks the tensors."""
        with self._lock:
            if self._changed_name is None:
                changed = (piece.name for piece, version in self._versions if version_of(piece.tensor) != version)
                self._changed_name = next(changed, "")

    def _read_chunks(self, piece: TensorPiece) -> Iterator[memoryview]:
        """Yields the bytes of a piece. Raises RunError `checkpoint-failed` if the program changed a tensor before its copy, and
        the error of copies that could not start.
        """
        if self._error is not None:
            raise self._error
        self._event.wait()
        self._check_versions()
        if self._changed_name:
            raise RunError("checkpoint-failed", f"the program wrote to {self._changed_name!r} during its save")
        yield from reader.split_into_chunks(self._copies[id(piece)])

    def _run(self) -> None:
        try:
            self.writer.run()
        except RunError as error:
            self.failure = format_cause(error)
        except BaseException as error:  # a bug in Sley: the next save or the end of the run reports it
            self.failure = f"{type(error).__name__}: {error}"


class SavePreparation:
    """Prepares the saves of the run with `state` on one rank. Caches the assignment of tensors to ranks until the tensors of a
    rank change. Also caches the lineage and step of each checkpoint, and whether it was the best when it was saved.
    """

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self._run = state.plan.run.name
        self._control = state.parts.groups["control"]
        self._assignment: tuple[list[str], WriteAssignment] | None = None
        self._lineages: dict[str, tuple[Lineage, int, bool]] = {}

    def prepare(self, folder: Folder, step: int, keep: int | None, *, is_run_folder: bool) -> RankWriter:
        """Agrees with all ranks on the save after `step` steps, and returns this rank's writer. folder: the run's folder of
        checkpoints if `is_run_folder`, else the folder of the checkpoint itself. keep: the number of checkpoints to keep in the
        run's folder; None to keep all. All ranks call it. It blocks in one exchange over `control`, and in a second exchange if
        the tensors of a rank have changed. Raises the same RunError on all ranks if a rank cannot save or the ranks differ.
        """
        world, control, attempt = self.state.parts.world, self._control, self.state.attempt.current
        description, pieces, rank_values, problem = self._collect_state(step)
        infos = [PieceInfo(piece.name, DTYPES[piece.tensor.dtype], piece.shape, piece.rectangle) for piece in pieces]
        target = ["", "", ""]
        if attempt is not None and not problem:  # only rank 0 has an attempt
            target = self._choose_target(folder, step, attempt, is_run_folder=is_run_folder)
        state_digest = "" if description is None else _compute_digest(description.state)
        # All ranks join the exchange, even after an error, so that no rank waits in vain.
        reports = control.gather_objects(
            [problem, folder.uri, state_digest, _compute_digest(infos), target], label="the contents of a save"
        )
        problems, paths, state_digests, digests, targets = (list(column) for column in zip(*reports, strict=True))
        path, token, target_problem = targets[0]
        for rank, rank_problem in zip([*control.ranks, 0], [*problems, target_problem], strict=True):
            if rank_problem:
                raise RunError("checkpoint-failed", f"rank {rank} cannot save: {rank_problem}")
        assert description is not None, "this rank has a problem"
        _check_equal(paths, "folder", control.ranks)
        _check_equal(state_digests, "data, position in the data, or loss scale", control.ranks)
        target_folder = open_folder(path)
        assignment = self._agree_on_assignment(digests, infos)
        files = [[pieces[index] for index in indices] for indices in assignment.file_indices[world.rank]]
        return RankWriter(
            world.rank,
            world.size,
            target_folder.staging_folder(token),
            target_folder,
            files,
            {"run": self._run, "step": step, "token": token},
            rank_values,
            reader.CheckpointIndex(**vars(description), token=token, files={}, tensors=assignment.tensors),
            # The limit is halved, so that rank 0 names the missing rank before the others stop waiting for rank 0.
            self.state.plan.limits.collective_timeout_s / 2,
            lambda piece: reader.split_into_chunks(piece.tensor),
            partial(self._delete_old, folder, keep, attempt) if keep and is_run_folder and attempt else lambda: None,
        )

    def find_problem(self, folder: Folder) -> str:
        """Returns a message if a run of another name wrote the newest readable checkpoint in `folder`, else ""."""
        attempt = self.state.attempt.current
        indices = (reader.try_read_index(folder.child(name)) for name in reader.list_checkpoints(folder))
        newest = next(filter(None, indices), None)
        if newest is None or newest.run == self._run or (attempt is not None and attempt.is_writer_of(newest.lineage)):
            return ""
        return f"the folder {folder.uri} has checkpoints of the run {newest.run!r}, but this run is {self._run!r}"

    def _delete_old(self, folder: Folder, keep: int, attempt: Attempt) -> None:
        """Deletes this run's checkpoints in `folder`, except the newest `keep` checkpoints and the newest checkpoint that was
        the best when it was saved. If the run has gone back to an earlier step, the checkpoints of the steps that it discarded
        do not count, and stay until the run has `keep` newer ones. Must be called once the newest checkpoint is verified.
        """
        with suppress(Exception):  # a failed deletion must not fail the save
            names = reader.list_checkpoints(folder)
            self._lineages = {name: lineage for name, lineage in self._lineages.items() if name in names}
            for name in names:
                if name not in self._lineages and (index := reader.try_read_index(folder.child(name))):
                    self._lineages[name] = index.lineage, index.step, index.is_best
            own_names = [name for name in names if name in self._lineages and attempt.is_writer_of(self._lineages[name][0])]
            usable = [name for name in own_names if attempt.shares_steps(*self._lineages[name][:2])]
            best = next((name for name in usable if self._lineages[name][2]), "")
            for name in own_names[own_names.index(usable[keep - 1]) + 1 :] if len(usable) >= keep else ():
                if name != best:
                    folder.child(name).remove()

    def _collect_state(self, step: int) -> tuple[SavedRun | None, list[TensorPiece], dict[str, Any], str]:
        """Returns the description of the run, this rank's tensors and other state, and an error message if this rank cannot
        save, else "".
        """
        try:
            values = self.state.rank_values()
            return self.state.describe(step), self.state.pieces(), values, ""
        except SleyError as error:
            diagnostic = error.diagnostics[0]
            hint = f" ({diagnostic.hint})" if diagnostic.hint else ""
            return None, [], {}, f"{diagnostic.message}{hint}"
        except Exception as error:  # a stateful part may raise any error, and the other ranks wait for the report
            return None, [], {}, format_cause(error)

    def _choose_target(self, folder: Folder, step: int, attempt: Attempt, *, is_run_folder: bool) -> list[str]:
        """Deletes unfinished saves. Returns a folder for the checkpoint, a unique token, and an error message or ""."""
        try:
            names = folder.names()
            token = f"{attempt.id}.{secrets.token_hex(8)}"
            if not is_run_folder:
                problem = f"the folder {folder.uri} is not empty" if names else ""
                return [folder.uri, token, problem]
            for name in names:  # this run's unfinished saves, and checkpoints that are partly deleted
                is_unfinished = reader.is_checkpoint_name(name) and folder.is_unfinished(name, reader.INDEX_NAME)
                if is_unfinished and _find_writing_attempt(folder, name) in {*attempt.all_attempt_ids, DELETED_SUFFIX}:
                    folder.child(name).remove()
            if names and (problem := self.find_problem(folder)):
                return ["", "", problem]
            return [folder.child(reader.choose_checkpoint_name(step, names)).uri, token, ""]
        except Exception as error:  # a file system may raise any error
            return ["", "", f"the folder {folder.uri} cannot be read: {format_cause(error)}"]

    def _agree_on_assignment(self, digests: list[str], infos: "list[PieceInfo]") -> "WriteAssignment":
        """Returns the assignment of pieces to ranks. digests: the digest of each rank's pieces. infos: this rank's pieces."""
        if self._assignment is None or self._assignment[0] != digests:
            # All ranks join this exchange or none: they compare the same digests with those of the last save.
            lists = self._control.gather_objects(infos, label="the tensors of all ranks")
            self._assignment = digests, assign_pieces([[PieceInfo.from_json(*fields) for fields in infos] for infos in lists])
        return self._assignment[1]


def _find_writing_attempt(folder: Folder, name: str) -> str:
    """Returns the id of the attempt that wrote `name`: DELETED_SUFFIX if `name` is partly deleted, "" if it is unknown."""
    if name.startswith(STAGING_PREFIX):
        return name.rpartition("-")[2].partition(".")[0]
    with suppress(Exception):  # an object store has no staging folders; a file system may raise any error
        for file in folder.child(name).names():
            if file.endswith(".safetensors"):
                return str(reader.read_header(folder.child(name), file)[1]["token"]).partition(".")[0]
    return ""


def _compute_digest(data: Any) -> str:
    return sha256(json.dumps(data).encode()).hexdigest()


def _check_equal(values: list[str], description: str, ranks: tuple[int, ...]) -> None:
    """Raises RunError `ranks-differ` unless `values`, one per rank, are equal. description: a noun for the values."""
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            message = f"ranks {ranks[0]} and {rank} cannot save together: their {description} differs"
            raise RunError("ranks-differ", message, hint="save the same run on all ranks at the same time")


class PieceInfo(NamedTuple):
    """The description of a `TensorPiece` without its data, which a rank sends to the other ranks. dtype: a safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rectangle: Rectangle

    @property
    def num_bytes(self) -> int:
        return self.rectangle.numel * BY_NAME[self.dtype].itemsize

    @classmethod
    def from_json(cls, name: str, dtype: str, shape: list[int], rectangle: list[list[int]]) -> "PieceInfo":
        return cls(name, dtype, tuple(shape), Rectangle(*map(tuple, rectangle)))


class WriteAssignment(NamedTuple):
    """Assigns tensor pieces to ranks. file_indices: for each rank and each of its files, the indices of the file's pieces in
    the rank's list of pieces. tensors: the description of each tensor of the checkpoint, by name.
    """

    file_indices: list[list[list[int]]]
    tensors: dict[str, reader.SavedTensor]


def assign_pieces(rank_pieces: Sequence[Sequence[PieceInfo]]) -> WriteAssignment:
    """Assigns each piece, from large to small, to the rank with the fewest bytes among the ranks that have the piece. A file
    can have a tensor name only once, so a second piece of a tensor goes to the rank's second file, and so on. Raises RunError
    `checkpoint-ranks` if the dtypes or shapes of a tensor differ between ranks.
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
    tensors: dict[str, reader.SavedTensor] = {}
    for rank, files in enumerate(file_indices):
        for file_index, indices in enumerate(files):
            for index in indices:
                piece = rank_pieces[rank][index]
                info = tensors.setdefault(piece.name, reader.SavedTensor(piece.dtype, piece.shape, []))
                info.pieces.append((reader.format_file_name(rank, file_index), piece.rectangle))
    return WriteAssignment(file_indices, tensors)


def _split_into_files(pieces: Sequence[PieceInfo], indices: Sequence[int]) -> list[list[int]]:
    """Distributes `indices` over files that have one piece of each tensor. Sorts each file from wide to narrow dtypes."""
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
    """Raises RunError if the pieces of a tensor differ in dtype or shape. Asserts that they have all of its elements."""
    first_pieces: dict[str, PieceInfo] = {}
    numel: dict[str, int] = {}
    for piece, piece_holders in holders.items():
        first = first_pieces.setdefault(piece.name, piece)
        if (first.dtype, first.shape) != (piece.dtype, piece.shape):
            rank = piece_holders[0][0]
            message = f"{piece.name!r} is {piece.dtype} {list(piece.shape)} on rank {rank}"
            raise RunError("checkpoint-ranks", f"{message}, but {first.dtype} {list(first.shape)} on another rank")
        assert piece.rectangle.intersection(Rectangle.from_shape(piece.shape)) in (piece.rectangle, None), piece
        numel[piece.name] = numel.get(piece.name, 0) + piece.rectangle.numel
    for name, num_elements in numel.items():
        assert num_elements == prod(first_pieces[name].shape), f"ranks have {num_elements} elements of {first_pieces[name]}"
