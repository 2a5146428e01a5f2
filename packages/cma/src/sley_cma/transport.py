"""Exchanges between ranks of one host that read each other's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from sley_cma.connection import Connection
from sley_cma.offers import Offers
from sley_cma.rows import AllToAll, Gather, ReduceScatter, Shared
from sley_cma.sums import CmaSums, Sum
from sley_core.api.comm import Members, Published, Transport, Work, mark_of

RINGS = 4
"""Rows of offers of one lane: exchanges of rows, what is published, and the two of sums. Each is in one order by itself, so
what is published may stay for a whole step: however many exchanges come in between, none waits for its place to be free."""


class Cma(Transport):
    """Reads and writes by `connection`; lane `name`, at `at` of those that share it, each with RINGS rings.

    Tensors are on the host.
    """

    def __init__(self, connection: Connection, name: str, at: int) -> None:
        self.members = connection.members
        rows, published, wholes, slices = (Offers(connection, name, RINGS * at + ring) for ring in range(RINGS))
        self.rows = rows
        self.published = published
        self.sums = CmaSums(wholes, slices)

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        return Gather(self.rows, wholes, shards, mark_of("gather", what, shards))

    def publish(self, shards: Sequence[Tensor], *, what: str) -> Published:
        """Offers all `shards` at once, so that no gather of them waits for a peer to come to it; returns what gathers them."""
        return Shared(self.published, shards, mark_of("share", what, shards))

    def reduce_scatter(
        self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0
    ) -> Work:
        return ReduceScatter(self.rows, wholes, self.members.size, mark_of("reduce", what, wholes, contents))

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        return AllToAll(self.rows, received, sent, mark_of("swap", what, [sent], contents))

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        return Sum(self.sums, tensor, mark_of("all-reduce", f"{what} over {self.members}", [tensor], contents))


def connect(members: Members, lanes: Mapping[str, dist.ProcessGroup], timeout_s: float) -> dict[str, Transport]:
    """Connects `members` by cross-memory attach; returns a transport by it for each of `lanes`, or {} on all ranks, where one
    cannot read a peer's memory. For tensors on the host. All members call it.

    timeout_s: of every wait.
    """
    # The first lane's members, in the order of the table of groups.
    connection = Connection.open(members, RINGS * len(lanes), next(iter(lanes.values())), timeout_s)
    return {name: Cma(connection, name, at) for at, name in enumerate(lanes)} if connection is not None else {}
