"""One save on one rank: its files, then a note that describes them; rank 0 waits for all notes, and publishes.

    rank 1   | rank-00001.safetensors | note-00001.json |
    rank 0   | rank-00000.safetensors | note-00000.json | waits for all notes | looks at all sizes | checkpoint.json | rename

Uses no collective, so that all of it may run in a thread beside training (`Background`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import torch

from sley_checkpoint.folders import Folder, Written
from sley_checkpoint.format import INDEX, CheckpointIndex, FileFacts, chunks_of, file_header, file_name
from sley_core.api.memory import version_of
from sley_core.api.parts import ALIGNMENT_BYTES, round_up
from sley_core.api.state import TensorPiece
from sley_core.errors import RunError, cause

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.comm import CopyEvent, CopyStream, Device, HostMemory

PATIENCE_S = 10.0
"""How long the end of a run waits for ranks that may have died."""

_LOOK_S = 0.1

_POLL_S = 0.005
_SLOWEST_POLL_S = 0.1


@dataclass
class Writing:
    """Writes one rank's part of a save. staging: the folder to write in; target: the name that it gets. files: the pieces of
    each of its files. facts: for the headers of all files. own: JSON that this rank keeps for itself, and values and paths
    of the optimizer. index: of all ranks, without what their notes say. timeout_s: how long rank 0 waits for the others.
    chunks: yields the bytes of a piece. published: called on rank 0 when the checkpoint is complete.

    is_cancelled: if set, the writing ends soon, without a checkpoint. waits_since: the monotonic time since which rank 0 has
    been waiting without another rank having finished.
    """

    rank: int
    num_ranks: int
    staging: Folder
    target: Folder
    files: Sequence[Sequence[TensorPiece]]
    facts: dict[str, Any]
    own: dict[str, Any]
    index: CheckpointIndex
    timeout_s: float
    chunks: Callable[[TensorPiece], Iterator[memoryview]]
    published: Callable[[], None]
    is_cancelled: bool = False
    waits_since: float | None = None

    def run(self) -> None:
        """Writes this rank's files, and on rank 0 waits for the others and publishes. Raises RunError `checkpoint-failed`; then
        there is no checkpoint, and what was written of it is removed.
        """
        try:
            self._write()
            if self.rank == 0:
                self._publish()
        except Exception as error:  # nobody may be left waiting, whatever a file system raises
            self._fail(error)
            raise _failed(self.target, self.rank, cause(error)) from error

    def _write(self) -> None:
        """Writes this rank's files, reads each back to compare checksums, and leaves a note with their sizes and checksums."""
        written: dict[str, Written] = {}
        for number, pieces in enumerate(self.files):
            name = file_name(self.rank, number)
            written[name] = self.staging.write(name, self._content(number, pieces))
            if (crc := self.staging.crc(name)) != written[name].crc:
                raise RunError("checkpoint-failed", f"{name} reads other than it was written: {crc:x}")
        note = json.dumps({"files": written, "own": self.own}).encode()
        self.staging.write(_note(self.rank), [note])

    def _content(self, number: int, pieces: Sequence[TensorPiece]) -> Iterator[bytes | memoryview]:
        """Yields the bytes of a file: the header, then each piece. Raises if the save is no longer wanted."""
        yield file_header(pieces, {**self.facts, "rank": self.rank, "file": number})
        for piece in pieces:
            self._check_wanted()
            yield from self.chunks(piece)

    def _check_wanted(self) -> None:
        if self.is_cancelled:
            raise RunError("checkpoint-failed", "the run ended while it was written")

    def _publish(self) -> None:
        """Waits for all notes, checks the sizes of the files, writes the index, and renames the folder."""
        notes = self._notes()
        files = {
            name: FileFacts(num_bytes, crc, rank)
            for rank, note in enumerate(notes)
            for name, (num_bytes, crc) in note["files"].items()
        }
        for name, facts in files.items():
            if (num_bytes := self.staging.num_bytes(name)) != facts.num_bytes:
                raise RunError("checkpoint-failed", f"{name} has {num_bytes} bytes, of {facts.num_bytes} that were written")
        index = replace(self.index, files=files).with_ranks([note["own"] for note in notes])
        for rank in range(self.num_ranks):
            self.staging.delete(_note(rank))  # all of it is in the index
        self.staging.write(INDEX, [index.to_bytes()])
        self.staging.publish(self.target)
        self.published()

    def _notes(self) -> list[dict[str, Any]]:
        """Returns the notes of all ranks. Raises RunError if one failed, or does not finish in time."""
        deadline, pause = time.monotonic() + self.timeout_s, _POLL_S
        missing = set(range(self.num_ranks))
        while True:
            names = set(self.staging.names())
            for rank in range(self.num_ranks):
                if _failure(rank) in names:
                    why = bytes(self.staging.read(_failure(rank))).decode() or "the disk is full"
                    raise RunError("checkpoint-failed", f"rank {rank}: {why}")
            left = {rank for rank in missing if _note(rank) not in names}
            if left != missing or self.waits_since is None:
                missing, self.waits_since = left, time.monotonic()
            if not missing:
                return [json.loads(self.staging.read(_note(rank))) for rank in range(self.num_ranks)]
            if not names:
                raise RunError("checkpoint-failed", f"{self.staging.text} is gone")
            self._check_wanted()
            if time.monotonic() > deadline:
                raise RunError("checkpoint-failed", f"rank {min(missing)} did not finish in {self.timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL_S)

    def _fail(self, error: Exception) -> None:
        """Deletes the files that were written; on ranks other than 0, tells rank 0."""
        with suppress(Exception):
            if self.rank == 0:
                self.staging.remove()
            elif self.staging.names():
                for chunks in ([cause(error).encode()], []):  # a full disk may have room for a name at least
                    with suppress(Exception):
                        self.staging.write(_failure(self.rank), chunks)
                        break


def _note(rank: int) -> str:
    return f"note-{rank:05}.json"


def _failure(rank: int) -> str:
    return f"failed-{rank:05}.txt"


def _failed(target: Folder, rank: int, why: str) -> RunError:
    return RunError("checkpoint-failed", f"the checkpoint {target.text} could not be written by rank {rank}: {why}")


class HostCopies:
    """Copies tensors to memory of the host, which is kept from one save to the next: new memory costs a page fault for each
    page, several times as long as the copy, and locking pages takes as long again.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._memory: HostMemory | None = None
        self._stream: CopyStream | None = None

    def take(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], CopyEvent]:
        """Starts to copy `tensors`; returns the copies, contiguous, and an event of their end. Invalidates those before."""
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + round_up(tensor.nbytes, ALIGNMENT_BYTES))
        # One for all saves: a stream for each would take those of exchanges, of which there are 32.
        self._stream = self._stream or self.device.copy_stream()
        if self._memory is None or self._memory.data.numel() < starts[-1]:
            self.free()
            self._memory = self.device.host_memory(starts[-1])
        self._stream.follow()
        copies = []
        for tensor, start in zip(tensors, starts, strict=False):
            copies.append(self._memory.data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            self._stream.copy(copies[-1], tensor)
        return copies, self._stream.record()

    def free(self) -> None:
        """Frees the memory, once nothing reads copies any more."""
        if self._stream is not None:
            self._stream.record().wait()  # copies of a save that was given up may still write there
        self._memory = None


class Background:
    """Writes the files of `writing` in a thread, from copies that are made, or on an asynchronous device started, at once.
    Training may change tensors in its update, after `stage`. failed: after `wait`, the error's text; "" if the checkpoint is
    complete.
    """

    def __init__(self, writing: Writing, host: HostCopies) -> None:
        self.writing = writing
        self.failed = ""
        pieces = [piece for pieces in writing.files for piece in pieces]
        # On an asynchronous device a forward may change what is not stepped before it is copied.
        is_safe = [piece.is_stepped or not host.device.is_async for piece in pieces]
        self._sources = [
            piece.tensor.detach() if safe else torch.clone(piece.tensor.detach())
            for piece, safe in zip(pieces, is_safe, strict=True)
        ]
        copies, self._event = host.take(self._sources)
        self._copies = {id(piece): copy for piece, copy in zip(pieces, copies, strict=True)}
        self._versions = [(piece, version_of(piece.tensor)) for piece in pieces if piece.is_stepped]
        self._lock = Lock()
        self._torn: str | None = "" if self._event.is_done() else None
        writing.chunks = self._chunks
        self._thread = Thread(target=self._run, name="sley-checkpoint", daemon=True)
        self._thread.start()

    def stage(self) -> None:
        """Makes the device's next work wait for the copies."""
        self._event.hold_device()
        self._check_versions()

    def wait(self) -> None:
        """Waits until the checkpoint is written, or has failed."""
        self._thread.join()

    def end(self) -> None:
        """Waits as `wait` does, but gives up on other ranks if none of them has finished for `PATIENCE_S`."""
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            since = self.writing.waits_since
            if since is not None and time.monotonic() - since > PATIENCE_S:
                self.writing.is_cancelled = True

    def _check_versions(self) -> None:
        """Notes the first time, at the end of the copies or before the update, whether a program wrote to a tensor
        meanwhile.
        """
        with self._lock:
            if self._torn is None:
                changed = (piece.name for piece, version in self._versions if version_of(piece.tensor) != version)
                self._torn = next(changed, "")

    def _chunks(self, piece: TensorPiece) -> Iterator[memoryview]:
        """Yields the bytes of a piece. Raises RunError `checkpoint-failed` if a program wrote to a tensor too early."""
        self._event.wait()
        self._check_versions()
        if self._torn:
            raise RunError("checkpoint-failed", f"the program wrote to {self._torn!r} while it was being saved")
        yield from chunks_of(self._copies[id(piece)])

    def _run(self) -> None:
        """Runs in the thread: writes the files; keeps an error's text in `failed`."""
        try:
            self.writing.run()
        except RunError as error:
            self.failed = cause(error)
        except BaseException as error:  # a fault of ours, which the next save or the end of the run reports
            self.failed = f"{type(error).__name__}: {error}"
