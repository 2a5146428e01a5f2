"""One save on one rank. Each rank writes its files and a note; rank 0 waits for all notes and publishes the checkpoint.

    rank 1   | rank-00001.safetensors | note-00001.json |
    rank 0   | rank-00000.safetensors | note-00000.json | waits for all notes | checks all sizes | checkpoint.json | rename

A save uses no collective, so it can run in a thread during training (`BackgroundWriter`).
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor

from sley_checkpoint.folders import FileDigest, Folder, compute_crc
from sley_checkpoint.reader import INDEX, CheckpointIndex, build_file_header, file_name, split_into_chunks
from sley_core.api.comm import CopyEvent, CopyStream, Device, HostMemory
from sley_core.api.memory import version_of
from sley_core.api.parts import ALIGNMENT_BYTES, round_up
from sley_core.api.state import TensorPiece
from sley_core.errors import RunError, format_cause

PATIENCE_S = 10.0
"""Seconds for which a rank whose run ends waits for ranks that may have died."""

_JOIN_POLL_S = 0.1

_POLL_S = 0.005
_SLOWEST_POLL_S = 0.1


@dataclass
class RankWriter:
    """Writes one rank's part of a save.

    staging: the folder of the save until it is complete. target: its final folder. files: the pieces of each file.
    header_info: JSON data for the headers of all files. rank_values: JSON data of this rank. index: the index without file
    digests and rank data. timeout_s: the time limit, in seconds, of rank 0's wait for the other ranks. chunks: a function that
    yields the bytes of a piece. on_publish: a function that rank 0 calls once the checkpoint is complete.

    is_cancelled: set it to end the save soon, without a checkpoint. wait_start: the monotonic time at which rank 0 began to
    wait, or last saw that a rank had finished; None before the wait and on other ranks.
    """

    rank: int
    num_ranks: int
    staging: Folder
    target: Folder
    files: Sequence[Sequence[TensorPiece]]
    header_info: dict[str, Any]
    rank_values: dict[str, Any]
    index: CheckpointIndex
    timeout_s: float
    chunks: Callable[[TensorPiece], Iterator[memoryview]]
    on_publish: Callable[[], None]
    is_cancelled: bool = False
    wait_start: float | None = None

    def run(self) -> None:
        """Writes this rank's files; rank 0 then waits for the other ranks and publishes the checkpoint.

        If the save fails, raises RunError `checkpoint-failed`, and rank 0 deletes the new files.
        """
        try:
            self._write()
            if self.rank == 0:
                self._publish()
        except Exception as error:  # a file system may raise any error, of which rank 0 must learn
            self._clean_up(error)
            message = f"the checkpoint {self.target.text} could not be written by rank {self.rank}: {format_cause(error)}"
            raise RunError("checkpoint-failed", message) from error

    def _write(self) -> None:
        """Writes this rank's files, reads them back to compare checksums, and writes a note with sizes and checksums."""
        digests: dict[str, FileDigest] = {}
        for index, pieces in enumerate(self.files):
            name = file_name(self.rank, index)
            digests[name] = self.staging.write(name, self._file_content(index, pieces))
            if (crc := compute_crc(self.staging, name)) != digests[name].crc:
                message = f"the checksum of {name} must be {digests[name].crc:x}, but is {crc:x} after the write"
                raise RunError("checkpoint-failed", message)
        note = json.dumps({"files": digests, "rank_values": self.rank_values}).encode()
        self.staging.write(_note_name(self.rank), [note])

    def _file_content(self, index: int, pieces: Sequence[TensorPiece]) -> Iterator[bytes | memoryview]:
        """Yields the header of a file and the bytes of each piece. Raises RunError if the save is cancelled."""
        yield build_file_header(pieces, {**self.header_info, "rank": self.rank, "file": index})
        for piece in pieces:
            self._check_not_cancelled()
            yield from self.chunks(piece)

    def _check_not_cancelled(self) -> None:
        if self.is_cancelled:
            raise RunError("checkpoint-failed", "the run ended during the save")

    def _publish(self) -> None:
        """Waits for all notes, checks the file sizes, writes the index, renames the folder, and calls `on_publish`."""
        notes = self._wait_for_notes()
        files = {name: FileDigest(*digest) for note in notes for name, digest in note["files"].items()}
        for name, digest in files.items():
            if (num_bytes := self.staging.num_bytes(name)) != digest.num_bytes:
                raise RunError("checkpoint-failed", f"the size of {name} must be {digest.num_bytes} bytes, but is {num_bytes}")
        index = replace(self.index, files=files).with_ranks([note["rank_values"] for note in notes])
        for rank in range(self.num_ranks):
            self.staging.delete(_note_name(rank))  # the index has all data of the notes
        self.staging.write(INDEX, [index.to_bytes()])
        self.staging.publish(self.target)
        self.on_publish()

    def _wait_for_notes(self) -> list[dict[str, Any]]:
        """Returns the notes of all ranks. Raises RunError if a rank fails or exceeds the time limit."""
        deadline, pause = time.monotonic() + self.timeout_s, _POLL_S
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
                raise RunError("checkpoint-failed", f"the folder {self.staging.text} no longer exists")
            self._check_not_cancelled()
            if time.monotonic() > deadline:
                raise RunError("checkpoint-failed", f"rank {min(missing)} did not finish in {self.timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL_S)

    def _clean_up(self, error: Exception) -> None:
        """Deletes the files of the failed save on rank 0; the other ranks report their error to rank 0 in a file."""
        with suppress(Exception):
            if self.rank == 0:
                self.staging.remove()
            elif self.staging.names():
                for chunks in ([format_cause(error).encode()], []):  # a full disk may still have room for an empty file
                    with suppress(Exception):
                        self.staging.write(_failure_name(self.rank), chunks)
                        break


def _note_name(rank: int) -> str:
    return f"note-{rank:05}.json"


def _failure_name(rank: int) -> str:
    return f"failed-{rank:05}.txt"


class HostCopies:
    """Copies tensors to host memory. All saves share this memory, because page faults in new memory and the locking of its
    pages each take longer than the copy itself.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._memory: HostMemory | None = None
        self._stream: CopyStream | None = None

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], CopyEvent]:
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
        """Frees the memory. Call it once no thread reads the copies any more."""
        if self._stream is not None:
            self._stream.record().wait()  # copies of a cancelled save may still write to the memory
        self._memory = None


class BackgroundWriter:
    """Runs `writer` in a thread, which writes host copies of the tensors. The constructor starts the copies. An update may
    change the tensors once `copy_unwritten_state` has returned.

    failure: the error message once `wait` has returned; "" if the save succeeded.
    """

    def __init__(self, writer: RankWriter, host: HostCopies) -> None:
        self.writer = writer
        self.failure = ""
        pieces = [piece for pieces in writer.files for piece in pieces]
        # On an asynchronous device, a forward may change tensors without an optimizer step, such as buffers, before their copy.
        stable = [piece.is_updated_by_optimizer or not host.device.is_async for piece in pieces]
        self._sources = [
            piece.tensor.detach() if is_stable else torch.clone(piece.tensor.detach())
            for piece, is_stable in zip(pieces, stable, strict=True)
        ]
        copies, self._event = host.start(self._sources)
        self._copies = {id(piece): copy for piece, copy in zip(pieces, copies, strict=True)}
        self._versions = [(piece, version_of(piece.tensor)) for piece in pieces if piece.is_updated_by_optimizer]
        self._lock = Lock()
        self._changed_name: str | None = "" if self._event.is_done() else None
        writer.chunks = self._chunks
        self._thread = Thread(target=self._run, name="sley-checkpoint", daemon=True)
        self._thread.start()

    def copy_unwritten_state(self) -> None:
        """Makes work that is submitted to the device later wait for the copies."""
        self._event.hold_device()
        self._check_versions()

    def wait(self) -> None:
        """Waits until the save is complete or has failed."""
        self._thread.join()

    def wait_or_cancel(self) -> None:
        """Waits for the save, but cancels it on rank 0 if no other rank finishes its part within `PATIENCE_S` seconds."""
        while self._thread.is_alive():
            self._thread.join(_JOIN_POLL_S)
            start = self.writer.wait_start
            if start is not None and time.monotonic() - start > PATIENCE_S:
                self.writer.is_cancelled = True

    def _check_versions(self) -> None:
        """Records the name of a tensor that the program changed during the copies. Only the first call checks the tensors."""
        with self._lock:
            if self._changed_name is None:
                changed = (piece.name for piece, version in self._versions if version_of(piece.tensor) != version)
                self._changed_name = next(changed, "")

    def _chunks(self, piece: TensorPiece) -> Iterator[memoryview]:
        """Yields the bytes of a piece. Raises RunError `checkpoint-failed` if the program changed a tensor before its copy."""
        self._event.wait()
        self._check_versions()
        if self._changed_name:
            raise RunError("checkpoint-failed", f"the program wrote to {self._changed_name!r} during its save")
        yield from split_into_chunks(self._copies[id(piece)])

    def _run(self) -> None:
        """Runs in the thread: writes the files. If that fails, stores the error message in `failure`."""
        try:
            self.writer.run()
        except RunError as error:
            self.failure = format_cause(error)
        except BaseException as error:  # a bug in Sley: the next save or the end of the run reports it
            self.failure = f"{type(error).__name__}: {error}"
