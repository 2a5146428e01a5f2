"""Writes a save in a thread while training continues."""

from __future__ import annotations

import time
from threading import Thread
from typing import TYPE_CHECKING

from sley_core.checkpoint.index import BUFFERS
from sley_core.checkpoint.live_bytes import KeptMemory, LiveBytes, copied
from sley_core.errors import RunError
from sley_core.files.folders import said

if TYPE_CHECKING:
    from sley_core.checkpoint.tensor_file import TensorPiece
    from sley_core.checkpoint.writing import Writing
    from sley_core.comm.device import Device

PATIENCE_S = 10.0
"""How long the end of a run waits for ranks that may have died."""

_LOOK_S = 0.1


class Background:
    """Writes the files of `writing` in a thread, from its construction on. Weights, masters and optimizer states may change
    after `secure`; tensors that a forward or a handler may change at any time are copied at once.

    memory: for copies. copies_ahead: whether to copy everything before anything is written. failed: after `wait`, the error's
    text; "" if the checkpoint is complete.
    """

    def __init__(self, writing: Writing, device: Device, memory: KeptMemory, *, copies_ahead: bool) -> None:
        self.writing = writing
        self.copies_ahead = copies_ahead
        self.failed = ""
        writing.files = [[_as_it_is(piece) for piece in pieces] for pieces in writing.files]
        self.live = LiveBytes([piece for pieces in writing.files for piece in pieces], device, memory)
        writing.chunks = self.live.chunks
        self._thread = Thread(target=self._run, name="sley-checkpoint", daemon=True)
        self._thread.start()

    def secure(self) -> None:
        """Copies what is not written yet; does nothing the second time."""
        self.live.secure()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

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

    def _run(self) -> None:
        """Runs in the thread: copies ahead if wanted, and writes the files; keeps an error's text in `failed`."""
        try:
            if self.copies_ahead:
                self.live.copy_ahead()
            self.writing.run()
        except RunError as error:
            self.failed = said(error)
        except BaseException as error:  # a fault of ours, which the next save or the end of the run tells of
            self.failed = f"{type(error).__name__}: {error}"


def _as_it_is(piece: TensorPiece) -> TensorPiece:
    """Returns the piece; with a copy of its tensor if that may change before the update of the next step."""
    return copied(piece) if piece.name.startswith((BUFFERS, "ranks/")) else piece
