"""Prices what many groups of ranks do at once, by the slowest of them: ranks of a stage meet in every step, and wait for it.

Groups of one axis are alike where sizes divide the ranks of a host. Where they do not, some groups lie on one host, and some
cross to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sley_core.topology import AXES, TIE
from sley_estimate.seconds.links import Cost, collective, message

if TYPE_CHECKING:
    from sley_core.protocols import Collective
    from sley_core.topology import Topology
    from sley_estimate.machine.tables import LinksTable

Ranks = Sequence[int]


def groups_at_once(topology: Topology, axis: str, ranks: Ranks, links: LinksTable) -> list[Ranks]:
    """Returns `ranks`, a group of `axis` of global ranks, and one group for each other way in which groups that do the same on
    the stages of `ranks` lie on hosts.

    Groups of a plugin's own axis are not known, so that `ranks` come alone.
    """
    if _all_alike(topology, links):
        return [ranks]
    size = topology.ranks_per_stage
    stage, within = divmod(min(ranks), size)
    if axis in AXES:
        return spread_apart([ranks, *topology.partition(axis, stage)], links)
    if axis.startswith(TIE):
        return spread_apart([ranks, *([rank + more - within for rank in ranks] for more in range(size))], links)
    return [ranks]


def all_groups(topology: Topology, axis: str, links: LinksTable) -> list[Ranks]:
    """Returns one group of core's `axis` for each way in which its groups lie on hosts, of all stages. Cheap where sizes divide
    the ranks of a host.
    """
    return [topology.ranks_of(axis, 0)] if _all_alike(topology, links) else spread_apart(topology.partition(axis), links)


def _all_alike(topology: Topology, links: LinksTable) -> bool:
    """Returns whether all groups of an axis lie on hosts in the same way, since all sizes divide the ranks of a host, or are
    divided by them.
    """
    sizes, per_host = (topology.ranks_per_stage, topology.sp, topology.wp), links.ranks_per_host
    return all(size % per_host == 0 or per_host % size == 0 for size in sizes)


def spread_apart(groups: Iterable[Ranks], links: LinksTable) -> list[Ranks]:
    """Returns one of `groups`, the first, for each way in which they lie on hosts: on how many, and how many ranks on each."""
    found: dict[tuple[int, ...], Ranks] = {}
    for ranks in groups:
        hosts = Counter(rank // links.ranks_per_host for rank in ranks)
        found.setdefault(tuple(sorted(hosts.values())), ranks)
    return list(found.values())


def slowest(kind: Collective, num_bytes: int, groups: Iterable[Ranks], links: LinksTable) -> Cost:
    """Returns the cost of a collective of `num_bytes` in the slowest of `groups`. Raises as `collective`."""
    return max((collective(kind, num_bytes, ranks, links) for ranks in groups), key=sum)


def slowest_message(num_bytes: int, stages: tuple[int, int], topology: Topology, links: LinksTable) -> Cost:
    """Returns the cost of the slowest message of those that each rank of a stage sends to the same rank of another. Raises as
    `message`.
    """
    size, per_host = topology.ranks_per_stage, links.ranks_per_host
    firsts = [stage * size for stage in stages]
    crossing = {
        (sender // per_host == receiver // per_host): (sender, receiver)
        for sender, receiver in zip(*(range(first, first + min(size, per_host)) for first in firsts), strict=True)
    }
    return max((message(num_bytes, *pair, links) for pair in crossing.values()), key=sum)
