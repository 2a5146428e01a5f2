"""Exchanges in a group of one rank: every exchange is the identity, and over when it begins."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sley_core.comm.transport.protocol import Transport, Work, put


class Done(Work):
    """An exchange that is over."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        """The result is there."""

    def release(self) -> None:
        """Nothing is held."""

    def wait_sent(self) -> None:
        """Nothing is read."""


class Alone(Transport):
    """Copies where a result has memory of its own."""

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        for whole, shard in zip(wholes, shards, strict=True):
            put(shard, whole)
        return Done()

    def reduce_scatter(
        self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0
    ) -> Work:
        return Done()

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        received.copy_(sent)
        return Done()

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        return Done()
