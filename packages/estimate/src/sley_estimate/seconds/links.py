"""Prices an exchange over a group of ranks: latency, and bytes over the slowest link on their way.

Ranks r // ranks_per_host share a host. Collectives are rings: of n ranks each sends n - 1 parts of n, in an all-reduce twice. A
ring over hosts crosses from host to host once for each network card that its ranks there have; where the card is shared, once,
and beside the rings of all other groups of the same kind. Swaps (all-to-all) go directly to each peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from sley_core.errors import PlanError
from sley_core.protocols import Collective
from sley_estimate.machine.tables import LinksTable, LinkTable, WayTable


class Cost(NamedTuple):
    """Seconds that do not depend on others, seconds of the bytes where nothing else uses the link, and seconds for which each
    rank that waits for the exchange works for it then. Their sum is what it takes where nothing is computed beside it.
    """

    latency_s: float
    work_s: float
    attended_s: float = 0.0

    def with_overlap(self, share: float) -> Cost:
        """Returns the cost where only `share`, from 0 to 1, of it runs beside computing: the rest is added to `attended_s`."""
        return Cost(self.latency_s * share, self.work_s * share, self.attended_s + (1 - share) * (self.latency_s + self.work_s))


NOTHING = Cost(0.0, 0.0)


def collective(kind: Collective, num_bytes: int, ranks: Sequence[int], links: LinksTable) -> Cost:
    """Returns the cost of a collective of a whole tensor of `num_bytes` over the global ranks `ranks`, while the other ranks of
    their hosts do the same in groups of theirs; nothing for one rank.

    Raises PlanError "machine-links" for a link that the machine file lacks.
    """
    size = len(ranks)
    if size == 1:
        return NOTHING
    passes = 2 if kind == "sum" else 1
    num_hosts, per_host = _on_hosts(ranks if isinstance(ranks, range) else tuple(ranks), links.ranks_per_host)
    if kind == "swap":
        return _swap(num_bytes, size, per_host, num_hosts, links)
    ways: list[WayTable] = []
    bandwidths: list[float] = []
    if per_host > 1:
        same = _same(links)
        ways.append(_way(same, kind))
        bandwidths.append(_between_ranks(same, kind, links))
    if num_hosts > 1:
        other = _other(links)
        way = _way(other, kind)
        ways.append(way)
        groups = max(1, links.ranks_per_host // per_host)
        bandwidths.append(way.bandwidth / groups if other.shared else way.bandwidth * per_host)
    rounds = passes * (size - 1)
    latency_s = rounds * max(way.latency_s for way in ways)
    cost = Cost(latency_s, rounds / size * num_bytes / min(bandwidths))
    slowest = min(zip(bandwidths, ways, strict=True), key=lambda one: one[0])[1]
    return cost.with_overlap(slowest.overlap)


@lru_cache(maxsize=64)  # groups may have thousands of ranks
def _on_hosts(ranks: range | tuple[int, ...], ranks_per_host: int) -> tuple[int, int]:
    """Returns on how many hosts the ranks are, and how many of them at most on one."""
    hosts = Counter(rank // ranks_per_host for rank in ranks)
    return len(hosts), max(hosts.values())


def message(num_bytes: int, sender: int, receiver: int, links: LinksTable) -> Cost:
    """Returns the cost of a message of `num_bytes` between two global ranks, while all ranks of the sender's host send one too.

    Raises PlanError "machine-links" for a link that the machine file lacks.
    """
    if sender // links.ranks_per_host == receiver // links.ranks_per_host:
        same = _same(links)
        way = _way(same, "send")
        return Cost(way.latency_s, num_bytes / _between_ranks(same, "send", links)).with_overlap(way.overlap)
    other = _other(links)
    way = _way(other, "send")
    cost = Cost(way.latency_s, num_bytes * (links.ranks_per_host if other.shared else 1) / way.bandwidth)
    return cost.with_overlap(way.overlap)


def _swap(num_bytes: int, size: int, per_host: int, hosts: int, links: LinksTable) -> Cost:
    """Returns the cost of an all-to-all of tensors of `num_bytes` among `size` ranks on `hosts` hosts, at most `per_host` on
    one: parts for ranks of the same host and of others go at once, and the slower way counts.
    """
    latencies, seconds, overlaps = [0.0], [0.0], [1.0]
    if per_host > 1:
        same = _same(links)
        latencies.append(_way(same, "swap").latency_s)
        overlaps.append(_way(same, "swap").overlap)
        seconds.append(num_bytes * (per_host - 1) / size / _between_ranks(same, "swap", links))
    if hosts > 1:
        other = _other(links)
        way = _way(other, "swap")
        latencies.append(way.latency_s)
        overlaps.append(way.overlap)
        share = links.ranks_per_host if other.shared else 1
        seconds.append(num_bytes * (size - per_host) / size * share / way.bandwidth)
    longest = max(zip(seconds, overlaps, strict=True), key=lambda one: one[0])[1]
    return Cost(max(latencies), max(seconds)).with_overlap(longest)


def _way(link: LinkTable, kind: Collective | Literal["send"]) -> WayTable:
    """Returns the figures of one kind of exchange over a link: its own where the machine file has them, else
    those of the link.
    """
    own: WayTable | None = getattr(link, kind)
    return own or link


def _between_ranks(same: LinkTable, kind: Collective | Literal["send"], links: LinksTable) -> float:
    """Returns the bytes per second of one rank while all of its host send: a share of the bandwidth where it is `shared`."""
    bandwidth = _way(same, kind).bandwidth
    return bandwidth / links.ranks_per_host if same.shared else bandwidth


def _same(links: LinksTable) -> LinkTable:
    """Returns the link within a host. Raises PlanError "machine-links" if the machine file has none."""
    if links.same_host is None:
        raise _missing("same_host", "ranks of one host exchange tensors", "`train-cli calibrate --ranks 2` measures it")
    return links.same_host


def _other(links: LinksTable) -> LinkTable:
    """Returns the link between hosts. Raises PlanError "machine-links" if the machine file has none."""
    if links.other_host is None:
        what = f"ranks are {links.ranks_per_host} to a host, and exchange tensors between hosts"
        raise _missing("other_host", what, "write its latency and bandwidth, or more `ranks_per_host`")
    return links.other_host


def _missing(table: str, what: str, hint: str) -> PlanError:
    return PlanError("machine-links", f"the machine file has no `[links.{table}]`, but {what}", hint=hint)
