"""Waits for exchanges that torch's process groups carry, and does what is left to do with what came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from sley_core.comm.guard import Turn, guarded, turn_of
from sley_core.comm.members import Members
from sley_core.comm.transport.protocol import Work
from sley_core.errors import RunError


class Announced(Protocol):
    """Tells what the peers say that an exchange is. works: of the process group, by which that comes."""

    works: list[Any]

    def compare(self) -> None:
        """Raises RunError `ranks-differ` where a peer exchanges something else; called when `works` are done."""


class Works(Work):
    """An exchange carried by works of a process group.

    received, sent: their works. turn: what it is, for errors. finish: called once, when all was received. headers: what the
    peers say that it is.
    """

    def __init__(
        self,
        received: Sequence[Any],
        sent: Sequence[Any],
        turn: Turn,
        finish: Callable[[], None] | None = None,
        headers: Announced | None = None,
    ) -> None:
        self._received = received
        self._sent = sent
        self._turn = turn
        self._finish = finish
        self._headers = headers

    def test(self) -> bool:
        announced = [] if self._headers is None else self._headers.works
        return all(work.is_completed() for work in (*announced, *self._received))

    def wait(self) -> None:
        """Waits until everything was received and is in its place. Compares the peers' headers before it waits for their data,
        so that a different exchange is an error and not wrong numbers.
        """
        if self._headers is not None:
            self._await(self._headers.works)
            self._compare(self._headers)
            self._headers = None
        received, self._received = self._received, ()
        self._await(received)
        if self._finish is not None:
            self._finish()
            self._finish = None

    def release(self) -> None:
        self.wait()

    def wait_sent(self) -> None:
        self.wait()
        sent, self._sent = self._sent, ()
        self._await(sent)

    def _compare(self, headers: Announced) -> None:
        """Raises RunError `ranks-differ` where a peer exchanges something else, and notes in which exchange."""
        progress = self._turn.members.progress
        progress.waits(self._turn)
        try:
            headers.compare()
        except RunError:
            progress.failed("differs")
            raise
        progress.waited()

    def _await(self, works: Sequence[Any]) -> None:
        """Waits for works of the process group, under the name of this exchange."""
        for work in works:
            guarded(work.wait, self._turn)


def all_reduced(tensor: Tensor, members: Members, name: str, lane: dist.ProcessGroup, what: str) -> Work:
    """Starts the backend's own all-reduce of `tensor`, in place, on `lane`, which is lane `name` of the group; returns its
    handle. Nothing checks that the ranks sum the same.
    """
    turn = turn_of("all-reduce", members, what, name, tensor.nbytes)
    return Works([guarded(lambda: dist.all_reduce(tensor, group=lane, async_op=True), turn)], [], turn)
