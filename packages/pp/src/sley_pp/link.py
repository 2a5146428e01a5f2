"""The stage link: point-to-point messages, on one communicator to later stages and on another to earlier ones.

Sends never block the next action, and receives are posted ahead, so that a message arrives while the stage computes. The sender
announces the contents of a boundary once per batch shape (with variable sequence lengths: once per length):

    sender    send ── known for this batch shape? ── no ──> announcement, then message
                                    └────── yes ──────────> message
    receiver  post ── may it be received now? ── no ──> waits in the queue of its direction
                                    └── yes ──────────> receive posted

A receive may be posted once the peer has confirmed that it runs the same micro-batches (`walk`), so that both ends know the
same message sizes. Before that, an output must have been announced; for a gradient, its output must have been sent: only then
are its tensors known. Posts wait behind one another, because a communicator delivers in order.

Between two stages each communicator has messages in one direction only, whatever the placement (docs/adr/0014 says why).

On a device, the first walk of each phase, as of training, sends its tensors by the host (`lines` says why).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sley_core.api.actions import Transfer, direction_of
from sley_core.api.parts import Description
from sley_pp.lines import Lines, Walk, differ, heads_are_apart
from sley_pp.message import Announcements, Message, Outbox, layout_of, mismatch
from sley_pp.pool import Lending

if TYPE_CHECKING:
    from sley_core.api.comm import Pending
    from sley_core.api.parts import Parts
    from sley_pp.config import LinkConfig

Key = Hashable
"""The phase, then the shapes of a micro-batch's fields. They alone tell what crosses a boundary, but for flags of tensors."""


@dataclass
class _Posted:
    """Holds a receive in flight; `message` is None if nothing is sent, because no tensor of it has a gradient."""

    message: Message | None
    pending: list[Pending]
    description: Description


class Link:
    """Sends and receives over the group `pp` of this rank's replica; at most one message per boundary and micro-batch."""

    def __init__(self, config: LinkConfig) -> None:
        self._config = config
        self._known: dict[tuple[str, int, int, int], dict[Key, Description]] = {}
        self._waiting: dict[str, deque[tuple[Transfer, Key]]] = {"up": deque(), "down": deque()}
        self._posted: dict[Transfer, _Posted] = {}
        self._returning: dict[tuple[int, int], Description] = {}
        self._owed: dict[tuple[int, int], Description] = {}
        self._has_backwards = False
        self._phases: frozenset[Hashable] = frozenset()
        self._walked: set[Hashable] = set()
        self._peers: Sequence[int] = ()

    def prepare(self, parts: Parts) -> None:
        """Creates the lines, and takes the pool of messages. Called once, after the process groups exist."""
        self._device = parts.world.device
        self._lines = Lines(parts.groups, apart=heads_are_apart(self._device))
        self._pool = parts.pool(self._config.pool)
        self._memory = Lending(self._pool, self._device, apart=self._lines.apart)
        self._stage = self._lines.stage
        self._outbox = Outbox(self._lines, self._memory)
        self._announcements = Announcements(self._lines)
        self._walk = Walk(self._lines)
        self._foretold = parts.foretold

    def begin(self, keys: Sequence[Key], peers: Sequence[int]) -> None:
        """Starts a walk and, without blocking, sends `peers` its micro-batches' `keys`.

        Messages in flight of an earlier, failed walk are dropped. What the peers send is compared before any other message of
        theirs is taken; a difference raises RunError `stages-differ` in `take` or `drain`, on both ends.
        """
        self._forget()
        self._has_backwards = False
        self._phases, self._peers = frozenset(map(_phase, keys)), peers
        self._lines.by_host = self._lines.apart and not self._phases <= self._walked
        self._lines.sent.begin_step()
        self._walk.begin(keys, peers)

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: Key) -> None:
        """Copies `tensors` into a message and starts its send; the caller may free or overwrite them at once.

        Raises RunError `boundary-mismatch` if they differ from what this batch shape carried before. So does the
        receiver, which gets a message that says so.
        """
        place = transfer.chunk, transfer.micro
        if transfer.flow == "backward":
            self._has_backwards = True
            self._send(transfer, self._owed.pop(place), description, tensors)
            return
        known = self._descriptions("send", transfer)
        if key not in known:
            known[key] = description
            self._announcements.send(description, transfer.peer, self._announcement(transfer, "sends to"))
        self._send(transfer, known[key], description.with_overlaps(tensors), tensors)
        self._returning[place] = description.gradients
        self._post_waiting(direction_of(transfer.peer, self._stage))

    def post(self, transfer: Transfer, key: Key) -> None:
        """Starts the receive of `transfer`, or queues it while it or an earlier one in its direction cannot be received yet.

        Never blocks. Both ends must post and send in the same order in each direction.
        """
        direction = direction_of(transfer.peer, self._stage)
        self._has_backwards |= transfer.flow == "backward"
        self._waiting[direction].append((transfer, key))
        self._post_waiting(direction)

    def take(self, transfer: Transfer) -> tuple[Description, list[Tensor]]:
        """Blocks until `transfer` has arrived; returns its description and tensors. It must have been posted.

        The memory is reused once none of the tensors, nor an alias of one, is alive. Raises RunError `boundary-mismatch` if the
        sender reports one, and `stages-differ` if the sender is in another step.
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
            self._memory.lend(posted.message)
        if transfer.flow == "forward":
            self._owed[transfer.chunk, transfer.micro] = description.gradients
        return description, tensors

    def drain(self) -> None:
        """Blocks until all sends are complete and all peers have confirmed the walk.

        Every posted transfer must have been taken.
        """
        self._walk.end()
        self._outbox.drain()
        self._announcements.end()
        self._memory.collect()
        left = [*self._posted, *self._waiting["up"], *self._waiting["down"]]
        assert not left, f"posted and never taken: {left}"
        if self._lines.by_host:
            self._lines.connect(self._peers, self._device)
            self.trim()  # by the host more messages are under way than later
        self._walked |= self._phases
        if self._has_backwards:  # a step, and not an evaluation
            self._lines.sent.end_step()

    def counts(self) -> dict[str, float]:
        """Returns the bytes of messages that this rank sent in the last step, heads included."""
        return self._lines.sent.counts()

    def trim(self) -> int:
        """Frees the pool's buffers that no message needs, now that the step is over; returns the number of bytes."""
        self._memory.collect()
        return self._pool.trim()

    def abort(self, why: str) -> None:
        """Drops everything in flight after a failure, without waiting; the processes are about to end."""
        self._forget()

    @property
    def num_allocated(self) -> int:
        """Buffers that the pool allocated since the beginning; 0 for one that does not count them."""
        return int(getattr(self._pool, "num_allocations", 0))

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool's buffers, free ones included."""
        return sum(tensor.nbytes for _, tensor in self._pool.held())

    def _forget(self) -> None:
        """Drops all transfers and announcements in flight, without waiting for them."""
        lists: list[Any] = [self._posted, *self._waiting.values(), self._returning, self._owed]
        for under_way in lists:
            under_way.clear()
        self._outbox.forget()
        self._announcements.forget()
        self._walk.forget()

    def _send(self, transfer: Transfer, expected: Description, came: Description, tensors: list[Tensor]) -> None:
        """Sends `tensors`, described by `came`, in a message of layout `expected`. Raises RunError `boundary-mismatch`."""
        head = self._walk.number, transfer.micro
        self._outbox.send(transfer.peer, self._name(transfer, "sends to"), head, expected, came, tensors)

    def _make_ready(self, direction: str, wanted: Transfer) -> None:
        """Blocks until the first queued post of `direction` can start, then starts it and those behind it that can."""
        assert self._waiting[direction], f"{wanted} was never posted"
        transfer, key = self._waiting[direction][0]
        self._walk.agree(transfer.peer, f"what {self._name(transfer, 'takes from')}")
        if transfer.flow == "backward":
            place = transfer.chunk, transfer.micro
            assert place in self._returning, f"{transfer}: the gradients of an output that was not sent"
        elif key not in (known := self._descriptions("post", transfer)):
            known[key] = self._heard(transfer)
        self._post_waiting(direction)

    def _post_waiting(self, direction: str) -> None:
        """Starts the queued receives of `direction`, up to the first that cannot start yet; never blocks."""
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
                return  # later posts wait too: both ends use a communicator in one order
            waiting.popleft()
            message, pending = None, []
            if description.leaves:
                message = self._memory.lease(layout_of(description.leaves))
                message.open()
                pending = self._lines.receive(message.pieces, transfer.peer, what)
                if self._foretold is not None:  # a fake world receives nothing, so the expected head is written here
                    message.write_head(self._walk.number, transfer.micro, description.flags)
                    message.seal()
            self._posted[transfer] = _Posted(message, pending, description)

    def _heard(self, transfer: Transfer) -> Description:
        """Blocks until the peer has announced what it sends; returns that. In a fake world it is known without waiting."""
        if self._foretold is not None:
            return self._foretold(transfer.peer, transfer.peer_chunk)
        return self._announcements.hear(transfer.peer, self._announcement(transfer, "takes from"))

    def _checked(self, transfer: Transfer, message: Message) -> bytes:
        """Returns the flags of `message`.

        Raises RunError if it belongs to another step or micro-batch, is too short, or reports a mismatch.
        """
        walk, micro, flags, fault = message.read_head()
        what = self._name(transfer, "takes from")
        if (walk, micro) != (self._walk.number, transfer.micro):
            raise differ(f"{what}: came micro-batch {micro} of walk {walk}, this is walk {self._walk.number}")
        if fault:
            raise mismatch(f"{what}: {fault}")
        if not message.is_whole:
            announced = sum(piece.nbytes for piece in message.pieces)
            raise mismatch(f"{what}: the message is shorter than the {announced} bytes that were announced")
        return flags

    def _descriptions(self, op: str, transfer: Transfer) -> dict[Key, Description]:
        """Returns the descriptions known for the forward boundary of `transfer`, by batch shape; the caller adds to them."""
        return self._known.setdefault((op, transfer.peer, transfer.chunk, transfer.peer_chunk), {})

    def _announcement(self, transfer: Transfer, verb: str) -> str:
        return f"the announcement of what {self._name(transfer, verb)}"

    def _name(self, transfer: Transfer, verb: str) -> str:
        """Returns words for `transfer` in errors and traces; `verb` is "sends to" or "takes from"."""
        thing = "its output" if transfer.flow == "forward" else "a gradient"
        return (
            f"stage {self._stage} {verb} stage {transfer.peer}, {transfer.flow}, {thing} of micro-batch {transfer.micro} "
            f"(chunk {transfer.chunk})"
        )


def _phase(key: Key) -> Hashable:
    """Returns the phase of a micro-batch with this key; the key itself where it is not a tuple."""
    return key[0] if isinstance(key, tuple) and key else key
