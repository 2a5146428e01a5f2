"""The stage link: point-to-point messages, on one communicator to later stages and on another to earlier stages.

A send does not wait for its receiver, unless MAX_SENDS gloo sends are in flight. Receives are posted ahead, so that messages
arrive while the stage computes. The sender announces which tensors cross a boundary once per batch shape, for example once per
sequence length:

    sender    send ── known batch shape? ── no ──> announcement, then message
                              └──────────── yes ─> message
    receiver  post ── can its receive start? ── no ──> waits in the queue of its direction
                              └──────────────── yes ─> receive posted

A receive can start once the peer has confirmed that it runs the same microbatches (`WalkCheck`), and the tensors of the message
are known. The tensors of an output are known once the peer has announced them, and the tensors of a gradient once this stage
has sent the output. Other receives wait in a queue, because a communicator delivers messages in order.

Between two stages each communicator carries messages in only one direction, whatever the placement (docs/adr/0014).

A walk is one pass through a list of actions. On a device, the first walk of each phase, such as training, sends its tensors
through the host (`messages` explains why).
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sley_core.api.actions import Transfer, direction_of
from sley_core.api.comm import Work
from sley_core.api.parts import Description, Parts
from sley_pp import messages
from sley_pp.plugin import LinkConfig

BatchKey = tuple[Hashable, ...]
"""The phase and the shapes of a microbatch's fields. At one boundary, all messages with equal keys have the same layout."""

MAX_SENDS = 8
"""The maximum number of gloo sends in flight. Beyond it, a stage waits for the oldest send."""


@dataclass
class _PendingReceive:
    """A started receive. message: None if `description` has no tensors, because the peer then sends nothing."""

    message: messages.Message | None
    pending: list[Work]
    description: Description


class Link:
    """Exchanges messages with other stages over the `pp` group of this rank: at most one per boundary and microbatch."""

    def __init__(self, config: LinkConfig) -> None:
        self._descriptions: dict[tuple[str, int, int, int], dict[BatchKey, Description]] = {}
        self._queues: dict[str, deque[tuple[Transfer, BatchKey]]] = {"up": deque(), "down": deque()}
        self._sends: deque[tuple[list[Work], messages.Message]] = deque()  # oldest first
        self._announcements: deque[Work] = deque()
        self._receives: dict[Transfer, _PendingReceive] = {}
        self._gradients_to_receive: dict[tuple[int, int], Description] = {}
        self._gradients_to_send: dict[tuple[int, int], Description] = {}
        self._has_backwards = False
        self._phases: frozenset[Hashable] = frozenset()
        self._finished_phases: set[Hashable] = set()
        self._peers: Sequence[int] = ()

    def prepare(self, parts: Parts) -> None:
        """Creates the channels and the message pool. Called once, after the process groups exist."""
        self._device = parts.world.device
        self._channels = messages.Channels(parts.groups, separate_header=messages.has_separate_header(self._device))
        self._pool = parts.pool
        self._message_pool = messages.MessagePool(self._pool, self._device, separate_header=self._channels.separate_header)
        self._stage = self._channels.stage
        self._walk_check = messages.WalkCheck(self._channels)
        self._fake_description = parts.describe_output

    def begin(self, keys: Sequence[BatchKey], peers: Sequence[int]) -> None:
        """Starts a walk and sends a digest of `keys`, the keys of its microbatches, to `peers`, without blocking. Drops the
        messages of a failed walk. If a peer has other keys, `receive` or `drain` raises RunError `stages-differ` on both ends.
        """
        self.abort()
        self._has_backwards = False
        self._phases, self._peers = frozenset(key[0] for key in keys), peers
        self._channels.uses_host = self._channels.separate_header and not self._phases <= self._finished_phases
        self._channels.sent.begin_step()
        self._walk_check.begin(keys, peers)

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: BatchKey) -> None:
        """Copies `tensors` into a message and starts to send it. Raises RunError `boundary-mismatch`, on both ends, if
        `description` does not fit the earlier description for this batch shape.
        """
        boundary = transfer.chunk, transfer.micro
        if transfer.flow == "backward":
            self._has_backwards = True
            self._send(transfer, self._gradients_to_send.pop(boundary), description, tensors)
            return
        descriptions = self._boundary_descriptions(transfer)
        if key not in descriptions:
            descriptions[key] = description
            label = f"the announcement of what {self._label(transfer)}"
            self._announcements += messages.send_description(self._channels, description, transfer.peer, label)
        self._send(transfer, descriptions[key], description.with_overlaps(tensors), tensors)
        self._gradients_to_receive[boundary] = description.gradients
        self._start_receives(direction_of(transfer.peer, self._stage))

    def post_receive(self, transfer: Transfer, key: BatchKey) -> None:
        """Starts the receive of `transfer`, or queues it until this receive and all earlier receives in its direction can
        start. Never blocks. In each direction, one end must post receives in the order in which the other end sends.
        """
        direction = direction_of(transfer.peer, self._stage)
        self._has_backwards |= transfer.flow == "backward"
        self._queues[direction].append((transfer, key))
        self._start_receives(direction)

    def receive(self, transfer: Transfer) -> tuple[Description, list[Tensor]]:
        """Blocks until the posted `transfer` has arrived, and returns its description and tensors, whose memory is reused once
        no tensor and no alias of a tensor is alive. Raises RunError `boundary-mismatch` if the sender reports a mismatch, and
        `stages-differ` if the sender runs another step.
        """
        direction = direction_of(transfer.peer, self._stage)
        while transfer not in self._receives:
            self._unblock_queue(direction, transfer)
        receive = self._receives.pop(transfer)
        description, tensors = receive.description, []
        if receive.message is not None:
            for pending in receive.pending:
                pending.wait()
            flags = self._read_flags(transfer, receive.message)
            description, tensors = description.with_flags(flags), receive.message.aliases()
            self._message_pool.release_when_unused(receive.message)
        if transfer.flow == "forward":
            self._gradients_to_send[transfer.chunk, transfer.micro] = description.gradients
        return description, tensors

    def drain(self) -> None:
        """Blocks until all sends are complete and the digests of all peers are compared. Ends the walk, in which `receive` must
        have returned every posted transfer. Raises RunError `stages-differ` if a peer runs another step.
        """
        self._walk_check.finish()
        while self._sends:
            self._finish_oldest_send()
        while self._announcements:
            self._announcements.popleft().wait()
        self._message_pool.release_unused()
        unread = [*self._receives, *self._queues["up"], *self._queues["down"]]
        assert not unread, f"posted but never taken: {unread}"
        if self._channels.uses_host:
            self._channels.connect(self._peers, self._device)
            self.trim()  # fewer messages are in flight in later walks, which do not use the host
        self._finished_phases |= self._phases
        if self._has_backwards:  # this walk was a step, not an evaluation
            self._channels.sent.end_step()

    def counts(self) -> dict[str, float]:
        """Returns the number of bytes in the messages that this rank sent in the last step, including headers, as
        `sent_bytes_per_step`.
        """
        return self._channels.sent.counts()

    def trim(self) -> int:
        """Frees the pool's buffers that no message needs, and returns their total size in bytes. Called between steps."""
        self._message_pool.release_unused()
        return self._pool.trim()

    def abort(self, reason: str = "") -> None:
        """Drops everything in flight after a failure, without waiting for peers."""
        collections: list[Any] = [*self._queues.values(), self._sends, self._announcements, self._receives]
        for collection in (*collections, self._gradients_to_receive, self._gradients_to_send):
            collection.clear()
        self._walk_check.discard()

    def _send(self, transfer: Transfer, expected: Description, actual: Description, tensors: list[Tensor]) -> None:
        """Sends `tensors`, which `actual` describes, in a message with the layout of `expected`, or nothing if `expected` has
        no tensors. If `actual` does not fit, sends a message with the mismatch, and raises RunError `boundary-mismatch`.
        """
        label = self._label(transfer)
        fault = "" if actual.fits(expected) else f"{label}: expected {expected}, but got {actual}"
        if expected.leaves:
            message = self._message_pool.lease(messages.message_layout(expected.leaves))
            message.write_header(self._walk_check.num_walks, transfer.micro, expected.flags if fault else actual.flags, fault)
            if not fault:
                for target, tensor in zip(message.tensors, tensors, strict=True):
                    target.copy_(tensor)
            handles = self._channels.start_message("send", message.pieces, transfer.peer, f"what {label}")
            self._sends.append((handles, message))
            for handle in handles if fault else ():
                handle.wait()
        if fault:
            raise messages.boundary_mismatch_error(fault)
        self._release_messages()

    def _release_messages(self) -> None:
        """Releases the messages whose sends are complete. With gloo, only a wait shows that, so waits for the oldest sends if
        more than MAX_SENDS remain. The peer's receive does not depend on later actions of this stage (`sley_core.actions`).
        """
        if self._channels.reports_completion:
            while self._sends and self._sends[0][0][-1].is_completed():
                self._finish_oldest_send()
        while not self._channels.reports_completion and len(self._sends) > MAX_SENDS:
            self._finish_oldest_send()

    def _finish_oldest_send(self) -> None:
        """Waits for the oldest send and releases its message. NCCL keeps the tensors of a complete send until this wait."""
        handles, message = self._sends.popleft()
        for handle in handles:
            handle.wait()
        self._message_pool.release(message)

    def _unblock_queue(self, direction: str, expected: Transfer) -> None:
        """Blocks until the first queued receive of `direction` can start, then starts all queued receives that can start.
        expected: the transfer for which the caller waits, for errors.
        """
        assert self._queues[direction], f"{expected} was never posted"
        transfer, key = self._queues[direction][0]
        self._walk_check.confirm_peer(transfer.peer, f"what {self._label(transfer)}")
        if transfer.flow == "backward":
            boundary = transfer.chunk, transfer.micro
            assert boundary in self._gradients_to_receive, f"{transfer}: the gradients of an output that was not sent"
        elif key not in (descriptions := self._boundary_descriptions(transfer)):
            descriptions[key] = self._receive_description(transfer)
        self._start_receives(direction)

    def _start_receives(self, direction: str) -> None:
        """Starts the queued receives of `direction`, in order, until one cannot start yet. Never blocks."""
        queue = self._queues[direction]
        while queue:
            transfer, key = queue[0]
            if transfer.flow == "forward":
                description = self._boundary_descriptions(transfer).get(key)
            else:
                description = self._gradients_to_receive.get((transfer.chunk, transfer.micro))
            label = f"what {self._label(transfer)}"
            self._walk_check.start_receive(transfer.peer, label)
            if description is None or transfer.peer not in self._walk_check.confirmed_peers:
                return  # later posts wait too, since both ends use a communicator in the same order
            queue.popleft()
            message, pending = None, []
            if description.leaves:
                message = self._message_pool.lease(messages.message_layout(description.leaves))
                pending = self._channels.start_message("receive", message.pieces, transfer.peer, label)
                if self._fake_description is not None:  # in a fake world no message arrives, so write the expected header
                    message.write_header(self._walk_check.num_walks, transfer.micro, description.flags)
            self._receives[transfer] = _PendingReceive(message, pending, description)

    def _receive_description(self, transfer: Transfer) -> Description:
        if self._fake_description is not None:
            return self._fake_description(transfer.peer, transfer.peer_chunk)
        return messages.receive_description(self._channels, transfer.peer, f"the announcement of what {self._label(transfer)}")

    def _read_flags(self, transfer: Transfer, message: messages.Message) -> bytes:
        """Returns the flags of a received `message`. Raises RunError if it is an unexpected message or reports a mismatch."""
        walk, microbatch, flags, fault = message.read_header()
        label = self._label(transfer)
        if (walk, microbatch) != (self._walk_check.num_walks, transfer.micro):
            raise messages.stages_differ_error(
                f"{label}: got microbatch {microbatch} of walk {walk} in walk {self._walk_check.num_walks}"
            )
        if fault:
            raise messages.boundary_mismatch_error(f"{label}: {fault}")
        return flags

    def _boundary_descriptions(self, transfer: Transfer) -> dict[BatchKey, Description]:
        """Returns the descriptions of the outputs at the boundary of `transfer`, by batch shape. Callers add to the dict."""
        return self._descriptions.setdefault((transfer.op, transfer.peer, transfer.chunk, transfer.peer_chunk), {})

    def _label(self, transfer: Transfer) -> str:
        """Returns the description of `transfer` for errors: "stage 0 sends to stage 1, the output for microbatch 2 ..."."""
        verb = "sends to" if transfer.op == "send" else "receives from"
        contents = "output" if transfer.flow == "forward" else "gradient"
        return (
            f"stage {self._stage} {verb} stage {transfer.peer}, the {contents} for microbatch {transfer.micro} "
            f"({transfer.flow}, chunk {transfer.chunk})"
        )
