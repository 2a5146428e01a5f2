"""Costs of exchanges over links, and of copies to the host: latency, and bytes over the slowest link on their way.

Rank r is on host r // ranks_per_host. Collectives are rings: each of n ranks sends n - 1 parts of n, in an all-reduce twice. A
ring over hosts uses the network card of each of its ranks on a host; a shared card once, beside the rings of all other groups
of its kind. All-to-alls go directly to each peer. Groups of one axis exchange at once, and the slowest counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from sley_core.errors import PlanError
from sley_core.protocols import Collective
from sley_core.topology import AXES, TIE, Topology
from sley_estimate.bytes.fake_world import CopyKind
from sley_estimate.layers.operators import Operator
from sley_estimate.layers.prices import seconds_of
from sley_estimate.machine import LinksTable, LinkTable, MachineFile, WayTable

Ranks = Sequence[int]


class Cost(NamedTuple):
    """Seconds of an exchange: independent of others; of its bytes on free links; of each rank's own work while it waits. Their
    sum is its time where nothing is computed beside it.
    """

    latency_s: float
    work_s: float
    attended_s: float = 0.0

    def with_overlap(self, share: float) -> Cost:
        """Returns the cost if only `share` of it runs beside computing; the rest is `attended_s`."""
        return Cost(self.latency_s * share, self.work_s * share, self.attended_s + (1 - share) * (self.latency_s + self.work_s))


NOTHING = Cost(0.0, 0.0)


@lru_cache(maxsize=64)  # groups may have thousands of ranks
def hosts_of(ranks: range | tuple[int, ...], ranks_per_host: int) -> tuple[int, int]:
    """Returns the number of hosts of the ranks, and the most ranks on one."""
    hosts = Counter(rank // ranks_per_host for rank in ranks)
    return len(hosts), max(hosts.values())


def collective(kind: Collective, num_bytes: int, ranks: Ranks, links: LinksTable) -> Cost:
    """Returns the cost of a collective of whole tensors of `num_bytes` over global ranks, while the other ranks of their hosts
    do the same in their groups. Raises PlanError "machine-links" for a link that the machine file lacks.
    """
    size = len(ranks)
    if size == 1:
        return NOTHING
    num_hosts, per_host = hosts_of(ranks if isinstance(ranks, range) else tuple(ranks), links.ranks_per_host)
    is_swap, rounds = kind == "swap", (2 if kind == "sum" else 1) * (size - 1)
    parts: list[tuple[Cost, float]] = []  # cost and overlap of each link on the way
    if per_host > 1:
        same = _link(links, "same_host")
        way = getattr(same, kind) or same
        share = (per_host - 1 if is_swap else rounds) / size
        parts.append((_cost(way, rounds, is_swap, num_bytes * share / _between_ranks(same, kind, links)), way.overlap))
    if num_hosts > 1:
        other = _link(links, "other_host")
        way = getattr(other, kind) or other
        if is_swap:
            work_s = num_bytes * (size - per_host) / size * (links.ranks_per_host if other.shared else 1) / way.bandwidth
        else:
            groups = max(1, links.ranks_per_host // per_host)
            work_s = num_bytes * rounds / size / (way.bandwidth / groups if other.shared else way.bandwidth * per_host)
        parts.append((_cost(way, rounds, is_swap, work_s), way.overlap))
    slowest, overlap = max(parts, key=lambda part: part[0].work_s)
    return Cost(max(cost.latency_s for cost, _ in parts), slowest.work_s).with_overlap(overlap)


def _cost(way: WayTable, rounds: int, is_swap: bool, work_s: float) -> Cost:
    return Cost(way.latency_s * (1 if is_swap else rounds), work_s)


def message(num_bytes: int, sender: int, receiver: int, links: LinksTable) -> Cost:
    """Returns the cost of a message between two ranks, while all of the sender's host send. Raises as `collective`."""
    if sender // links.ranks_per_host == receiver // links.ranks_per_host:
        same = _link(links, "same_host")
        way = same.send or same
        return Cost(way.latency_s, num_bytes / _between_ranks(same, "send", links)).with_overlap(way.overlap)
    other = _link(links, "other_host")
    way = other.send or other
    cost = Cost(way.latency_s, num_bytes * (links.ranks_per_host if other.shared else 1) / way.bandwidth)
    return cost.with_overlap(way.overlap)


def _between_ranks(same: LinkTable, kind: Collective | Literal["send"], links: LinksTable) -> float:
    """Returns one rank's bytes per second while all ranks of its host send."""
    bandwidth: float = (getattr(same, kind) or same).bandwidth
    return bandwidth / links.ranks_per_host if same.shared else bandwidth


def _link(links: LinksTable, name: Literal["same_host", "other_host"]) -> LinkTable:
    """Returns a link. Raises PlanError "machine-links" if the machine file lacks it."""
    link: LinkTable | None = getattr(links, name)
    if link is not None:
        return link
    if name == "same_host":
        what, hint = "ranks of one host exchange tensors", "`train-cli calibrate --ranks 2` measures it"
    else:
        what = f"ranks are {links.ranks_per_host} to a host, and exchange tensors between hosts"
        hint = "write its latency and bandwidth, or more `ranks_per_host`"
    raise PlanError("machine-links", f"the machine file has no `[links.{name}]`, but {what}", hint=hint)


def groups_at_once(topology: Topology, axis: str, ranks: Ranks, links: LinksTable) -> list[Ranks]:
    """Returns `ranks`, a group of `axis`, and one group for each other way in which groups that exchange at once lie on hosts.
    Groups of a plugin's own axis are unknown, so `ranks` come alone.
    """
    if _all_alike(topology, links):
        return [ranks]
    size = topology.ranks_per_stage
    stage, within = divmod(min(ranks), size)
    if axis in AXES:
        return spread_differently([ranks, *topology.partition(axis, stage)], links)
    if axis.startswith(TIE):
        return spread_differently([ranks, *([rank + at - within for rank in ranks] for at in range(size))], links)
    return [ranks]


def all_groups(topology: Topology, axis: str, links: LinksTable) -> list[Ranks]:
    """Returns one group of core's `axis`, of all stages, for each way in which its groups lie on hosts."""
    return [topology.ranks_of(axis, 0)] if _all_alike(topology, links) else spread_differently(topology.partition(axis), links)


def _all_alike(topology: Topology, links: LinksTable) -> bool:
    """Returns whether all groups of an axis lie on hosts alike, since sizes divide the ranks of a host or the reverse."""
    sizes, per_host = (topology.ranks_per_stage, topology.sp, topology.wp), links.ranks_per_host
    return all(size % per_host == 0 or per_host % size == 0 for size in sizes)


def spread_differently(groups: Iterable[Ranks], links: LinksTable) -> list[Ranks]:
    """Returns the first of `groups` for each number of ranks on each host."""
    firsts: dict[tuple[int, ...], Ranks] = {}
    for ranks in groups:
        hosts = Counter(rank // links.ranks_per_host for rank in ranks)
        firsts.setdefault(tuple(sorted(hosts.values())), ranks)
    return list(firsts.values())


def slowest(kind: Collective, num_bytes: int, groups: Iterable[Ranks], links: LinksTable) -> Cost:
    """Returns the cost of a collective in the slowest of `groups`. Raises as `collective`."""
    return max((collective(kind, num_bytes, ranks, links) for ranks in groups), key=sum)


def slowest_message(num_bytes: int, stages: tuple[int, int], topology: Topology, links: LinksTable) -> Cost:
    """Returns the cost of the slowest message from a stage's ranks to those of another. Raises as `message`."""
    size, per_host = topology.ranks_per_stage, links.ranks_per_host
    firsts = [stage * size for stage in stages]
    pairs = {
        (sender // per_host == receiver // per_host): (sender, receiver)
        for sender, receiver in zip(*(range(first, first + min(size, per_host)) for first in firsts), strict=True)
    }
    return max((message(num_bytes, *pair, links) for pair in pairs.values()), key=sum)


def copy_cost(kind: CopyKind, num_bytes: int, machine: MachineFile) -> Cost:
    """Returns the cost of a copy to the host or to the device. On CUDA both directions run beside computing; a CPU without
    `[host]` copies at its memory bandwidth. Raises PlanError "machine-host" for a CUDA device without `[host]`.
    """
    host = machine.host
    if host is not None:
        return Cost(host.latency_s, num_bytes / (host.to_host if kind == "to_host" else host.to_device))
    if machine.device.kind == "cuda":
        raise _no_host("[host]", "a step copies between the device and its host")
    return Cost(machine.device.launch_s, 2 * num_bytes / machine.device.memory_bandwidth)


def on_host_s(operators: Sequence[Operator], machine: MachineFile) -> float:
    """Returns the seconds of operators on the host's cores, by its memory bandwidth. Raises PlanError "machine-host"."""
    if machine.device.kind == "cpu":
        return seconds_of(operators, machine.device)
    if machine.host is None or machine.host.memory_bandwidth is None:
        raise _no_host("[host] memory_bandwidth", "the optimizer steps on the host")
    return sum(operator.num_bytes for operator in operators) / machine.host.memory_bandwidth


def _no_host(key: str, what: str) -> PlanError:
    hint = "`train-cli calibrate` measures it on a machine with a CUDA device"
    return PlanError("machine-host", f"the machine file has no `{key}`, but {what}", hint=hint)
