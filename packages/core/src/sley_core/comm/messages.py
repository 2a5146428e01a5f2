"""Exchanges by works of a process group; on gloo directly from rank to rank, each announced by a header.

    header to every peer ──> headers of the peers, compared ──> what comes from them, which had its place from the start
    parts to every peer  ──────────────────────────────────────>

The tags of the parts say their mark, so that gloo never puts a part of something else into a place: it would end the process
where the lengths differ. Headers have a tag of their own and come in the order in which exchanges begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.collectives import guarded
from sley_core.comm.groups import Group
from sley_core.comm.marks import HEADER_BYTES, Mark, differs, of_header

_HEADER_TAG = 0
"""No part has it: their tags are marks, the odds of a mark of 0 are one in 2^31."""


class Messages:
    """An exchange by works of a process group.

    received, sent: their works. finish: what is left to do with what came. headers: what the peers say that it is.
    """

    __slots__ = ("_finish", "_group", "_headers", "_operation", "_received", "_sent", "_what")

    def __init__(
        self,
        received: list[Any],
        sent: list[Any],
        operation: str,
        group: Group,
        what: str,
        finish: Callable[[], None] | None = None,
        headers: Headers | None = None,
    ) -> None:
        self._received = received
        self._sent = sent
        self._operation = operation
        self._group = group
        self._what = what
        self._finish = finish
        self._headers = headers

    def wait(self) -> None:
        if self._headers is not None:
            self._await(self._headers.works)
            self._headers.compare()
            self._headers = None
        received, self._received = self._received, []
        self._await(received)
        if self._finish is not None:
            self._finish()
            self._finish = None

    def is_here(self) -> bool:
        announced = [] if self._headers is None else self._headers.works
        return all(work.is_completed() for work in (*announced, *self._received))

    def free(self) -> None:
        self.wait()

    def end(self) -> None:
        self.wait()
        sent, self._sent = self._sent, []
        self._await(sent)

    def _await(self, works: list[Any]) -> None:
        for work in works:
            guarded(work.wait, self._operation, self._group, self._what)


class Headers:
    """What the members of `group` say about one exchange on `lane`, on its way since this was made; `sent` must be awaited."""

    def __init__(self, group: Group, lane: dist.ProcessGroup, mark: Mark) -> None:
        self._group = group
        self._mark = mark
        self._peers = others(group)
        self._came = torch.empty(len(self._peers), HEADER_BYTES, dtype=torch.uint8)
        own = mark.header()
        self.works = [lane.recv([row], peer, _HEADER_TAG) for row, peer in zip(self._came, self._peers, strict=True)]
        self.sent = [lane.send([own], peer, _HEADER_TAG) for peer in self._peers]

    def compare(self) -> None:
        """Raises RunError `ranks-differ` where a peer exchanges something else, or of another length."""
        for row, peer in zip(self._came, self._peers, strict=True):
            theirs = of_header(row)
            if theirs[1:] != self._mark[1:]:
                raise differs(self._mark, self._group.rank, theirs.what, self._group.ranks[peer])


def pass_around(
    places: Sequence[Sequence[Tensor]],
    parts: Sequence[Sequence[Tensor]],
    group: Group,
    lane: dist.ProcessGroup,
    mark: Mark,
    operation: str,
    finish: Callable[[], None] | None = None,
) -> Messages:
    """Starts to send to the i-th of the others the i-th of every row of `parts`, and to receive from it in `places`.

    All are contiguous, on the host, and stay the exchange's until `end`. The group's members come here in one order.
    """
    received: list[Any] = []
    sent: list[Any] = []

    def start() -> Headers:
        headers = Headers(group, lane, mark)
        sent.extend(headers.sent)
        for into, out in zip(places, parts, strict=True):
            for place, peer in zip(into, others(group), strict=True):
                received.append(lane.recv([place], peer, mark.number))
            for part, peer in zip(out, others(group), strict=True):
                sent.append(lane.send([part], peer, mark.number))
        return headers

    headers = guarded(start, operation, group, mark.what)
    return Messages(received, sent, operation, group, mark.what, finish, headers)


def others(group: Group) -> list[int]:
    """The coordinates of the other members."""
    return [peer for peer in range(group.size) if peer != group.coord]


def is_direct(lane: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank sends to every other itself: on gloo, and from the host."""
    return device.type == "cpu" and dist.get_backend(lane) == "gloo"
