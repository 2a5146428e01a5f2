"""Defines a group of ranks with its collectives and messages, whose errors name group and content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.backends import SingleRankTransport
from sley_core.comm.progress import Members, begin_turn, run_guarded
from sley_core.comm.transport import ExchangeLog, GroupWork, Transport, Work, gather_values
from sley_core.topology import DEFAULT_CHANNEL

Op = Literal["sum", "max", "min"]

Exchange = Op | Literal["broadcast", "all_gather", "all_to_all", "send", "receive"]
"""The type of an exchange; an all-reduce is named by its operation."""

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""Renamed in torch 2.13."""


class Imitate(Protocol):
    """Simulates the exchanges of a group whose other members do not exist."""

    def __call__(self, kind: Exchange, result: Tensor, tensor: Tensor, channel: str, label: str, /) -> Callable[[], None]:
        """Simulates an exchange of `tensor` on `channel`, which fills `result`, maybe the same tensor. Returns a function to
        call when the rank waits for it. label: the description of the exchange in errors.
        """


@dataclass(frozen=True)
class Group(Members):
    """Holds the ranks of one axis with which this rank communicates, with one communicator and one transport per channel.

    A group of one rank has no communicator, and every collective on it is the identity. log: records the exchanges without
    marks. imitate: simulates exchanges if the other ranks do not exist.

    In the collectives below tensors are contiguous, all members make the same calls on one channel in one order, and `label`
    describes the content, for errors.
    """

    channels: dict[str, dist.ProcessGroup]
    transports: dict[str, Transport] = field(default_factory=dict)
    log: ExchangeLog = field(default_factory=ExchangeLog)
    imitate: Imitate | None = field(default=None, compare=False, repr=False)

    @property
    def has_peers(self) -> bool:
        """Returns whether this group has other ranks to exchange values with."""
        return self.size > 1 and self.imitate is None

    def channel(self, name: str = DEFAULT_CHANNEL) -> dist.ProcessGroup:
        """Returns the communicator of the channel `name`. A group of one rank has no communicators."""
        return self.channels[name]

    def transport(self, channel: str = DEFAULT_CHANNEL) -> Transport:
        """Returns the transport of `channel`. Must be called at each use, since closed groups have no transports."""
        return SingleRankTransport() if self.size == 1 else self.transports[channel]

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, label: str) -> Work:
        """Starts an all-reduce of `tensor` in place, and returns its handle."""
        return self._start(op, partial(dist.all_reduce, tensor, OPS[op]), tensor, tensor, label)

    def broadcast(self, tensor: Tensor, *, label: str) -> Work:
        """Starts a broadcast of `tensor` in place from the first rank of the group, and returns its handle."""
        return self._start("broadcast", partial(dist.broadcast, tensor, self.ranks[0]), tensor, tensor, label)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        *,
        label: str,
        channel: str = DEFAULT_CHANNEL,
        splits: tuple[list[int], list[int]] = ([], []),
    ) -> Work:
        """Starts an all-to-all, and returns its handle. Slice i of `tensor` goes to the i-th rank, and slice i of `output`
        comes from it. splits: the sizes of the slices of `output` and `tensor` along dim 0; by default, equal slices.
        """
        call = partial(dist.all_to_all_single, output, tensor, *splits)
        return self._start("all_to_all", call, output, tensor, label, channel)

    def all_gather(self, output: Tensor, tensor: Tensor, *, label: str, channel: str = DEFAULT_CHANNEL) -> Work:
        """Starts an all-gather of the ranks' `tensor` along dim 0 of `output`, in the group's order. Returns its handle."""
        return self._start("all_gather", partial(all_gather_single, output, tensor), output, tensor, label, channel)

    def send(self, tensor: Tensor, channel: str, peer: int, *, label: str) -> Work:
        """Starts to send `tensor` to the member at coordinate `peer` on `channel`, and returns the handle. Calls the
        communicator directly, which numbers members as the group does, since the overhead of `dist.isend` is a fifth of the
        call.
        """
        if self.imitate is not None:
            return GroupWork([], _finish=self.imitate("send", tensor, tensor, channel, label))
        turn = begin_turn("send", self, label, channel, tensor.nbytes, (self.coord, peer))
        message = tensor.to("cpu", copy=True) if self.needs_host_copy(tensor, channel) else tensor
        return GroupWork([run_guarded(lambda: self.channel(channel).send([message], peer, 0), turn)], (), turn)

    def receive(self, tensor: Tensor, channel: str, peer: int, *, label: str) -> Work:
        """Starts to receive into `tensor` from the member at coordinate `peer`, and returns the handle."""
        if self.imitate is not None:
            return GroupWork([], _finish=self.imitate("receive", tensor, tensor, channel, label))
        turn = begin_turn("receive", self, label, channel, tensor.nbytes, (peer, self.coord))
        if self.needs_host_copy(tensor, channel):
            host_tensor = torch.empty_like(tensor, device="cpu")
            work = run_guarded(lambda: self.channel(channel).recv([host_tensor], peer, 0), turn)
            return GroupWork([work], (), turn, lambda: tensor.copy_(host_tensor))
        return GroupWork([run_guarded(lambda: self.channel(channel).recv([tensor], peer, 0), turn)], (), turn)

    def gather_objects(self, value: Any, *, label: str) -> list[Any]:
        """Returns the `value` of each rank of the group `control`, in the order of ranks. Blocks.

        value: small and serialisable as JSON. If the other members do not exist, the result repeats this rank's value.
        """
        if not self.has_peers:
            return [value] * self.size
        values: list[Any] = run_guarded(
            lambda: gather_values(value, self.channel()), begin_turn("all-gather of objects", self, label)
        )
        return values

    def _start(
        self,
        kind: Exchange,
        call: Callable[..., Any],
        result: Tensor,
        tensor: Tensor,
        label: str,
        channel: str = DEFAULT_CHANNEL,
    ) -> Work:
        """Starts the collective `call` of torch, which sends `tensor` and fills `result`. Returns its handle."""
        if self.size == 1:
            if result is not tensor:
                result.copy_(tensor)
            return Work()
        if self.imitate is not None:
            return GroupWork([], _finish=self.imitate(kind, result, tensor, channel, label))
        operation = "all-reduce" if kind in OPS else kind.replace("_", "-")
        turn = begin_turn(operation, self, label, channel, tensor.nbytes)
        return GroupWork([run_guarded(lambda: call(group=self.channel(channel), async_op=True), turn)], (), turn)

    def needs_host_copy(self, tensor: Tensor, channel: str) -> bool:
        """Returns whether a message needs a copy in host memory, since gloo reads host addresses only."""
        return tensor.device.type != "cpu" and dist.get_backend(self.channel(channel)) == "gloo"
