"""What canonical sums cost on a rank, as a note printed before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.engine.canonical.tree import leaf, parent, sibling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sley_core.engine.canonical.tree import Node
    from sley_core.engine.parts import Parts


def cost_note(parts: Parts, num_micros: int) -> str:
    """Returns one line of text: how many sums are kept besides the gradients, their bytes, and what ranks exchange.

    num_micros: of this rank, in one step.
    """
    topology = parts.topology
    num_leaves = topology.dp * num_micros
    copies = 0
    num_bytes = 0
    for entry in parts.book.trainable:
        ranks = topology.wp if entry.shard is not None else 1
        most = entry.num_sums * most_sums(_arrivals(ranks, num_micros), num_leaves) - 1
        num_bytes += most * entry.numel * parts.store.dtype.itemsize
        copies = max(copies, most)
    nodes = max(
        len(_joined([leaf(at) for at in range(rank * num_micros, (rank + 1) * num_micros)], num_leaves)[0])
        for rank in range(topology.dp)
    )
    travels = (
        "as much as a reduce-scatter and a gather" if nodes == 1 else f"{nodes} sums of each gradient in place of one"
    )
    return (
        f"canonical sums of {num_leaves} micro-batches: up to {copies} sums of a gradient besides it during a step, "
        f"{num_bytes / 2**20:.2f} MiB; between ranks travels {travels}"
    )


def most_sums(arrivals: Iterable[int], num_leaves: int) -> int:
    """Returns the largest number of partial sums that a gradient has at a time, if micro-batches come in the order
    `arrivals`.
    """
    return _joined([leaf(at) for at in arrivals], num_leaves)[1]


def _joined(nodes: Iterable[Node], num_leaves: int) -> tuple[set[Node], int]:
    """Adds up `nodes` in the order given, each with its sibling once both are there; returns what is left, and the most held at
    a time.
    """
    held: set[Node] = set()
    most = 0
    for node in nodes:
        while (other := sibling(node, num_leaves)) is not None and other in held:
            held.remove(other)
            node = parent(node, other)
        held.add(node)
        most = max(most, len(held))
    return held, most


def _arrivals(num_ranks: int, num_micros: int) -> list[int]:
    """Returns the order in which gradients come to a shard: of all ranks that share the weight, micro-batch by micro-batch."""
    return [rank * num_micros + at for at in range(num_micros) for rank in range(num_ranks)]
