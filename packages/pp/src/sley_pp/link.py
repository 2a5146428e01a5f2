"""The stage link: what goes to a later stage and what goes to an earlier one travel on a communicator each.

Sends never block the next action, and receives are posted ahead, so that a message arrives while something else computes.
What a boundary carries is announced once for every shape of batch that it meets (variable sequence lengths: once each):

    sender    send ── known for this batch shape? ── no ──> announcement, then message
                                    └────── yes ──────────> message
    receiver  post ── may it be received now? ── no ──> waits in the queue of its direction
                                    └── yes ──────────> receive posted

A receive may be posted when the peer has said that it walks through the same micro-batches (`walk`), so that the sizes of
messages are known to be equal; an output, when it is announced; a gradient, when the output was sent, since which tensors
have one is known then, and no earlier may it come. Posts wait behind one another: a communicator delivers in order.

Between two stages each communicator has messages in one direction only, whatever the placement. Gloo reads and writes a
connection under one lock, and its thread, woken by a message that comes in while another goes out, asks for that lock again
and again until it has used up its time on the core (docs/adr/0014).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.api.actions import Direction, Transfer, direction_of
from sley_core.api.boundary import Description, gradients_of, with_overlaps
from sley_core.errors import RunError
from sley_pp.lines import Lines, heads_are_apart
from sley_pp.message import Message, from_bytes, layout_of, to_bytes
from sley_pp.pool import Pool
from sley_pp.walk import Walk, differ

if TYPE_CHECKING:
    from sley_core.api.comm import Pending
    from sley_core.api.parts import Parts
    from sley_pp.config import LinkConfig

Key = Hashable
"""The shapes of a micro-batch's fields: what a boundary carries depends on nothing else, but for the flags of its tensors."""

SENDS_UNDER_WAY = 8
"""On the host, messages of a stage that may be on their way before it looks whether the oldest has come."""


@dataclass
class _Posted:
    """A receive under way; `message` is None where nothing crosses, because no tensor of it has a gradient."""

    message: Message | None
    pending: list[Pending]
    description: Description


class Link:
    """Point-to-point over the group `pp` of this rank's replica; at most one message per boundary and micro-batch."""

    def __init__(self, config: LinkConfig) -> None:
        del config  # has no keys
        self._known: dict[tuple[str, int, int, int], dict[Key, Description]] = {}
        self._waiting: dict[Direction, deque[tuple[Transfer, Key]]] = {"up": deque(), "down": deque()}
        self._posted: dict[Transfer, _Posted] = {}
        self._sending: deque[tuple[list[Pending], Message]] = deque()
        self._announcing: list[Pending] = []
        self._returning: dict[tuple[int, int], Description] = {}
        self._owed: dict[tuple[int, int], Description] = {}

    def prepare(self, parts: Parts) -> None:
        """Called once, when the groups are there."""
        device = parts.world.device
        self._lines = Lines(parts.groups, apart=heads_are_apart(device))
        self._pool = Pool(device.torch_device, apart=self._lines.apart)
        self._stage = self._lines.stage
        self._walk = Walk(self._lines)

    def begin(self, keys: Sequence[Key], peers: Sequence[int]) -> None:
        """Tells `peers` which micro-batches this stage walks through; what they tell is compared before anything else comes."""
        self._forget()
        self._walk.begin(keys, peers)

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: Key) -> None:
        """Copies `tensors` into a message and starts its send; the caller may let go of them at once.

        Raises RunError `boundary-mismatch` where they are not what this batch shape carried before; so does the
        receiver, which gets a message that says so.
        """
        place = transfer.chunk, transfer.micro
        if transfer.flow == "backward":
            self._send(transfer, self._owed.pop(place), description, tensors)
            return
        known = self._descriptions("send", transfer)
        if key not in known:
            known[key] = description
            self._announce(transfer, description)
        self._send(transfer, known[key], with_overlaps(description, tensors), tensors)
        self._returning[place] = gradients_of(description)
        self._post_waiting(direction_of(transfer.peer, self._stage))

    def post(self, transfer: Transfer, key: Key) -> None:
        """Starts the receive of `transfer`, unless it or one before it in its direction cannot be received yet."""
        direction = direction_of(transfer.peer, self._stage)
        self._waiting[direction].append((transfer, key))
        self._post_waiting(direction)

    def take(self, transfer: Transfer) -> tuple[Description, list[Tensor]]:
        """What `transfer` brought, in memory that is used again when none of the tensors, nor an alias, is alive; blocks.

        Raises RunError `boundary-mismatch` where the sender says so, and `stages-differ` where its step is another one.
        """
        direction = direction_of(transfer.peer, self._stage)
        while transfer not in self._posted:
            self._make_ready(direction, transfer)
        posted = self._posted.pop(transfer)
        description, tensors = posted.description, []
        if posted.message is not None:
            for pending in posted.pending:
                pending.wait()
            flags = self._checked(transfer, posted.message)
            description, tensors = description.flagged(flags), posted.message.lent()
            self._pool.lend(posted.message)
        if transfer.flow == "forward":
            self._owed[transfer.chunk, transfer.micro] = gradients_of(description)
        return description, tensors

    def drain(self) -> None:
        """Waits until everything sent is away; nothing posted is left."""
        self._walk.end()
        while self._sending:
            self._end_send()
        while self._announcing:
            self._announcing.pop().wait()
        left = [*self._posted, *self._waiting["up"], *self._waiting["down"]]
        assert not left, f"posted and never taken: {left}"

    def abort(self, why: str) -> None:
        """Forgets what is under way after a failure; the processes behind it are about to end."""
        self._forget()

    @property
    def num_allocated(self) -> int:
        """Messages that were ever made."""
        return self._pool.num_allocated

    @property
    def num_bytes(self) -> int:
        """What the messages take that there are."""
        return self._pool.num_bytes

    def _forget(self) -> None:
        lists: list[Any] = [self._posted, self._sending, *self._waiting.values(), self._returning, self._owed]
        for under_way in (*lists, self._announcing):
            under_way.clear()
        self._walk.forget()

    def _send(self, transfer: Transfer, expected: Description, came: Description, tensors: list[Tensor]) -> None:
        if not expected.leaves:
            if came != expected:  # no message comes, in which the receiver could be told
                raise _mismatch(f"{self._name(transfer, 'sends to')}: expected {expected}, came {came}")
            return
        what = self._name(transfer, "sends to")
        message = self._pool.lease(layout_of(expected.leaves))
        fault = "" if came.fits(expected) else f"{what}: expected {expected}, came {came}"
        message.write_head(self._walk.number, transfer.micro, expected.flags if fault else came.flags, fault)
        if not fault:
            for place, tensor in zip(message.tensors, tensors, strict=True):
                place.copy_(tensor)
        self._sending.append((self._lines.send(message.pieces, transfer.peer, f"what {what}"), message))
        if fault:
            for pending in self._sending[-1][0]:
                pending.wait()
            raise _mismatch(fault)
        self._end_sends()

    def _end_sends(self) -> None:
        """Takes back what is surely away. Gloo tells only a wait that a send is over, so there the oldest is waited for.

        That holds nobody up who would not be held up anyway: the peer comes to its receive without anything that this stage
        issues later (`sley_core.actions.posts`), and long before, unless it is the slower of the two.
        """
        if self._lines.apart:
            while self._sending and self._sending[0][0][-1].is_done():
                self._end_send()
        while not self._lines.apart and len(self._sending) > SENDS_UNDER_WAY:
            self._end_send()

    def _end_send(self) -> None:
        """Waits for the oldest send. That is what makes NCCL let go of its tensors, also where it is done."""
        under_way, message = self._sending.popleft()
        for pending in under_way:
            pending.wait()
        self._pool.give_back(message)

    def _announce(self, transfer: Transfer, description: Description) -> None:
        """Sends the size of the description's text, then the text: a boundary may carry any number of tensors."""
        what = f"the announcement of what {self._name(transfer, 'sends to')}"
        text = to_bytes(description)
        parts = torch.tensor([text.numel()]), text
        self._announcing += [self._lines.tell(part, transfer.peer, what) for part in parts]

    def _hear_announcement(self, transfer: Transfer) -> Description:
        what = f"the announcement of what {self._name(transfer, 'takes from')}"
        size = torch.zeros(1, dtype=torch.int64)
        self._lines.hear(size, transfer.peer, what).wait()
        text = torch.empty(int(size), dtype=torch.uint8)
        self._lines.hear(text, transfer.peer, what).wait()
        return from_bytes(text)

    def _make_ready(self, direction: Direction, wanted: Transfer) -> None:
        """Waits for what the first waiting post waits for, then posts what it can."""
        assert self._waiting[direction], f"{wanted} was never posted"
        transfer, key = self._waiting[direction][0]
        self._walk.agree(transfer.peer, f"what {self._name(transfer, 'takes from')}")
        if transfer.flow == "backward":
            place = transfer.chunk, transfer.micro
            assert place in self._returning, f"{transfer}: the gradients of an output that was not sent"
        elif key not in (known := self._descriptions("post", transfer)):
            known[key] = self._hear_announcement(transfer)
        self._post_waiting(direction)

    def _post_waiting(self, direction: Direction) -> None:
        waiting = self._waiting[direction]
        while waiting:
            transfer, key = waiting[0]
            if transfer.flow == "forward":
                description = self._descriptions("post", transfer).get(key)
            else:
                description = self._returning.get((transfer.chunk, transfer.micro))
            what = f"what {self._name(transfer, 'takes from')}"
            self._walk.hear(transfer.peer, what)
            if description is None or not self._walk.is_agreed(transfer.peer):
                return
            waiting.popleft()
            message, pending = None, []
            if description.leaves:
                message = self._pool.lease(layout_of(description.leaves))
                pending = self._lines.receive(message.pieces, transfer.peer, what)
            self._posted[transfer] = _Posted(message, pending, description)

    def _checked(self, transfer: Transfer, message: Message) -> bytes:
        """The flags of a message that is what `transfer` expects."""
        walk, micro, flags, fault = message.read_head()
        what = self._name(transfer, "takes from")
        if (walk, micro) != (self._walk.number, transfer.micro):
            raise differ(f"{what}: came micro-batch {micro} of walk {walk}, this is walk {self._walk.number}")
        if fault:
            raise _mismatch(f"{what}: {fault}")
        return flags

    def _descriptions(self, op: str, transfer: Transfer) -> dict[Key, Description]:
        """What the boundary of `transfer` carries forward, for each batch shape."""
        return self._known.setdefault((op, transfer.peer, transfer.chunk, transfer.peer_chunk), {})

    def _name(self, transfer: Transfer, verb: str) -> str:
        thing = "its output" if transfer.flow == "forward" else "a gradient"
        return (
            f"stage {self._stage} {verb} stage {transfer.peer}, {transfer.flow}, {thing} of micro-batch {transfer.micro} "
            f"(chunk {transfer.chunk})"
        )


def _mismatch(fault: str) -> RunError:
    return RunError(
        "boundary-mismatch",
        fault,
        hint="what a layer returns may depend on the shapes of the batch, not on its values",
    )
