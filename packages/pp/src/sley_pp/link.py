"""The stage link: what goes to a later stage and what goes to an earlier one travel on a communicator each.

Sends never block the next action, and receives are posted ahead, so that a message arrives while something else computes.
What a boundary carries is announced once for every shape of batch that it meets (variable sequence lengths: once each):

    sender    send ── known for this batch shape? ── no ──> announcement, then message
                                    └────── yes ──────────> message
    receiver  post ── known for this batch shape? ── no ──> nothing yet; `take` receives the announcement first
                                    └────── yes ──────────> receive posted

Both ends see the same batch shapes, so both know which messages are announced. Posts behind an unknown one wait for it:
a communicator delivers in order.

Between two stages each communicator has messages in one direction only, whatever the placement. Gloo reads and writes a
connection under one lock, and its thread, woken by a message that comes in while another goes out, asks for that lock again
and again until it has used up its time on the core (docs/adr/0014).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.actions.action import Transfer, Way, way_of
from sley_core.comm.collectives import receive_from, send_to
from sley_core.engine.boundary import Description, gradients_of
from sley_core.errors import RunError
from sley_pp.message import Layout, Message, from_text, layout_of, to_text

if TYPE_CHECKING:
    from sley_core.comm.collectives import Pending
    from sley_core.run import Run

Key = Hashable
"""The shapes of a micro-batch's fields: what a boundary carries depends on nothing else."""


@dataclass
class _Posted:
    """A receive under way; `message` is None where nothing crosses, because no tensor of it has a gradient."""

    message: Message | None
    pending: Pending | None
    description: Description


class Link:
    """Point-to-point over the group `pp` of this rank's replica; at most one message per boundary and micro-batch."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int, int, int], dict[Key, Description]] = {}
        self._waiting: dict[tuple[Way, int], deque[tuple[Transfer, Key]]] = {}
        self._posted: dict[Transfer, _Posted] = {}
        self._taken: dict[Transfer, Message] = {}
        self._sending: deque[tuple[Pending, Message]] = deque()
        self._free: dict[Layout, list[Message]] = {}
        self.num_allocated = 0

    def prepare(self, run: Run) -> None:
        """Called once, when the groups are there."""
        self._group = run.groups["pp"]
        self._device = run.world.device
        self._stage = self._group.coord

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: Key) -> None:
        """Copies `tensors` into a message and starts its send; the caller may let go of them at once.

        Raises RunError `boundary-mismatch` where they are not what this batch shape carried before; so does the
        receiver, which gets a message that says so.
        """
        known = self._descriptions("send", transfer)
        what = self._name(transfer, "sends to")
        if key not in known:
            known[key] = description
            announcement = self._lease(())
            announcement.write_head(to_text(description))
            self._start(announcement, transfer, f"the announcement of what {what}")
        expected = known[key]
        if transfer.lane == "forward":
            self._descriptions("post", transfer, "backward")[key] = gradients_of(expected)
        if not expected.leaves:
            return
        message = self._lease(layout_of(expected.leaves))
        if description != expected:
            fault = f"{what}: expected {expected}, came {description}"
            message.write_head(fault)
            self._start(message, transfer, f"what {what}")
            self._sending[-1][0].wait()
            raise _mismatch(fault)
        message.write_head()
        for place, tensor in zip(message.tensors, tensors, strict=True):
            place.copy_(tensor)
        self._start(message, transfer, f"what {what}")

    def post(self, transfer: Transfer, key: Key) -> None:
        """Starts the receive of `transfer`, unless it or one before it on its way is yet to be announced."""
        waiting = self._queue(transfer)
        known = self._descriptions("post", transfer)
        if waiting or key not in known:
            waiting.append((transfer, key))
        else:
            self._receive(transfer, key, known[key])

    def take(self, transfer: Transfer) -> tuple[Description, list[Tensor]]:
        """What `transfer` brought, as views of a message that is kept until `release`; blocks until it is there."""
        while transfer not in self._posted:
            self._post_waiting(transfer)
        posted = self._posted.pop(transfer)
        if posted.message is None or posted.pending is None:
            return posted.description, []
        posted.pending.wait()
        if not self._device.is_async and (fault := posted.message.read_head()):
            raise _mismatch(f"{self._name(transfer, 'takes from')}: {fault}")
        self._taken[transfer] = posted.message
        return posted.description, list(posted.message.tensors)

    def release(self, transfer: Transfer) -> None:
        """Nobody reads what `transfer` brought any more: its message is used again."""
        message = self._taken.pop(transfer, None)
        if message is not None:
            self._give_back(message)

    def drain(self) -> None:
        """Waits until everything sent is away; nothing posted is left."""
        while self._sending:
            pending, message = self._sending.popleft()
            pending.wait()
            self._give_back(message)
        assert not self._posted, f"posted and never taken: {list(self._posted)}"

    def abort(self, why: str) -> None:
        """Forgets what is under way after a failure; the processes behind it are about to end."""
        for under_way in (self._posted, self._taken, self._sending, self._waiting):
            under_way.clear()

    @property
    def num_held(self) -> int:
        """Messages that are posted or taken and not released: what receiving holds."""
        return len(self._posted) + len(self._taken)

    def _post_waiting(self, wanted: Transfer) -> None:
        """Receives the announcement that the first waiting post waits for, if any, then posts what it can."""
        waiting = self._queue(wanted)
        assert waiting, f"{wanted} was never posted"
        transfer, key = waiting[0]
        known = self._descriptions("post", transfer)
        if key not in known:
            assert transfer.lane == "forward", f"{transfer}: the gradients of an output that was not sent"
            head = self._lease(())
            what = f"the announcement of what {self._name(transfer, 'takes from')}"
            receive_from(head.buffer, self._group, self._way(transfer), transfer.peer, what=what).wait()
            known[key] = from_text(head.read_head())
            self._give_back(head)
        while waiting and waiting[0][1] in self._descriptions("post", waiting[0][0]):
            transfer, key = waiting.popleft()
            self._receive(transfer, key, self._descriptions("post", transfer)[key])

    def _receive(self, transfer: Transfer, key: Key, description: Description) -> None:
        if transfer.lane == "forward":
            self._descriptions("send", transfer, "backward")[key] = gradients_of(description)
        if not description.leaves:
            self._posted[transfer] = _Posted(None, None, description)
            return
        message = self._lease(layout_of(description.leaves))
        what = f"what {self._name(transfer, 'takes from')}"
        pending = receive_from(message.buffer, self._group, self._way(transfer), transfer.peer, what=what)
        self._posted[transfer] = _Posted(message, pending, description)

    def _start(self, message: Message, transfer: Transfer, what: str) -> None:
        pending = send_to(message.buffer, self._group, self._way(transfer), transfer.peer, what=what)
        self._sending.append((pending, message))
        while self._sending and self._sending[0][0].is_done():
            self._give_back(self._sending.popleft()[1])

    def _descriptions(self, op: str, transfer: Transfer, lane: str | None = None) -> dict[Key, Description]:
        """What the boundary of `transfer` carries for each batch shape, on its lane or the other one."""
        boundary = (op, lane or transfer.lane, transfer.peer, transfer.chunk, transfer.peer_chunk)
        return self._known.setdefault(boundary, {})

    def _queue(self, transfer: Transfer) -> deque[tuple[Transfer, Key]]:
        return self._waiting.setdefault((self._way(transfer), transfer.peer), deque())

    def _way(self, transfer: Transfer) -> Way:
        sends = transfer.op == "send"
        return way_of(self._stage, transfer.peer) if sends else way_of(transfer.peer, self._stage)

    def _lease(self, layout: Layout) -> Message:
        free = self._free.setdefault(layout, [])
        if free:
            return free.pop()
        self.num_allocated += 1
        return Message(layout, self._device.torch_device)

    def _give_back(self, message: Message) -> None:
        self._free[message.layout].append(message)

    def _name(self, transfer: Transfer, verb: str) -> str:
        thing = "its output" if transfer.lane == "forward" else "a gradient"
        return (
            f"stage {self._stage} {verb} stage {transfer.peer}, {transfer.lane}, {thing} of micro-batch {transfer.micro} "
            f"(chunk {transfer.chunk})"
        )


def _mismatch(fault: str) -> RunError:
    return RunError(
        "boundary-mismatch",
        fault,
        hint="what a layer returns may depend on the shapes of the batch, not on its values",
    )
