"""Computes the costs of exchanges over links and of copies to the host, from the latency and the bytes over the slowest link.

Rank r is on host r // ranks_per_host. Collectives except all-to-alls are rings: each of n ranks sends n - 1 of n parts of the
tensor, and sends them twice in an all-reduce. On each host, a ring between hosts uses the network cards of all its ranks there,
or shares one card with the rings of the other groups. In an all-to-all, ranks send directly to each peer. All groups of an axis
exchange at the same time, and the slowest one determines the cost.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from sley_core.errors import PlanError
from sley_core.protocols import Collective
from sley_core.topology import AXES, TIE, Topology
from sley_estimate.layers.operators import Operator
from sley_estimate.layers.prices import operators_s
from sley_estimate.machine import LinksTable, LinkTable, MachineFile
from sley_estimate.step.record import CopyDirection

Ranks = Sequence[int]


class Cost(NamedTuple):
    """The seconds of an exchange: its latency, the transfer of its bytes over idle links, and the work of each waiting rank.
    Their sum is the time of the exchange if no computation overlaps with it.
    """

    latency_s: float
    work_s: float
    member_work_s: float = 0.0

    def split_overlap(self, share: float) -> "Cost":
        """Returns the cost if only `share` of it overlaps with computing; `member_work_s` contains the rest."""
        return Cost(
            self.latency_s * share, self.work_s * share, self.member_work_s + (1 - share) * (self.latency_s + self.work_s)
        )


NO_COST = Cost(0.0, 0.0)


@lru_cache(maxsize=64)  # groups may have thousands of ranks
def count_hosts(ranks: range | tuple[int, ...], ranks_per_host: int) -> tuple[int, int]:
    """Returns the number of hosts that `ranks` are on, and the largest number of `ranks` on one host."""
    hosts = Counter(rank // ranks_per_host for rank in ranks)
    return len(hosts), max(hosts.values())


def collective_cost(collective: Collective, num_bytes: int, ranks: Ranks, links: LinksTable) -> Cost:
    """Returns the cost of a collective of the global ranks `ranks`, while the other ranks of their hosts run the same
    collective in their own groups. num_bytes: the size of the full tensors. Raises PlanError "machine-links" if the machine
    file lacks a link that it uses.
    """
    size = len(ranks)
    if size == 1:
        return NO_COST
    num_hosts, per_host = count_hosts(ranks if isinstance(ranks, range) else tuple(ranks), links.ranks_per_host)
    is_swap, rounds = collective == "swap", (2 if collective == "sum" else 1) * (size - 1)
    link_costs: list[tuple[Cost, float]] = []  # cost and overlap of each link
    if per_host > 1:
        link = _require_link(links, "same_host")
        table = getattr(link, collective) or link
        share = (per_host - 1 if is_swap else rounds) / size * (links.ranks_per_host if link.shared else 1)
        link_costs.append((Cost(table.latency_s, num_bytes * share / table.bandwidth), table.overlap))
    if num_hosts > 1:
        link = _require_link(links, "other_host")
        table = getattr(link, collective) or link
        if is_swap:
            share = (size - per_host) / size * (links.ranks_per_host if link.shared else 1)
        else:
            share = rounds / size * (max(1, links.ranks_per_host // per_host) if link.shared else 1 / per_host)
        link_costs.append((Cost(table.latency_s, num_bytes * share / table.bandwidth), table.overlap))
    slowest_link, overlap = max(link_costs, key=lambda link_cost: link_cost[0].work_s)
    latency_s = max(cost.latency_s for cost, _ in link_costs) * (1 if is_swap else rounds)
    return Cost(latency_s, slowest_link.work_s).split_overlap(overlap)


def message_cost(num_bytes: int, sender: int, receiver: int, links: LinksTable) -> Cost:
    """Returns the cost of a message while all ranks of the host send. Raises PlanError "machine-links" for a missing link."""
    is_local = sender // links.ranks_per_host == receiver // links.ranks_per_host
    link = _require_link(links, "same_host" if is_local else "other_host")
    table = link.send or link
    cost = Cost(table.latency_s, num_bytes * (links.ranks_per_host if link.shared else 1) / table.bandwidth)
    return cost.split_overlap(table.overlap)


def _require_link(links: LinksTable, name: Literal["same_host", "other_host"]) -> LinkTable:
    """Returns the link `name`. Raises PlanError "machine-links" if the machine file does not have it."""
    link: LinkTable | None = getattr(links, name)
    if link is not None:
        return link
    if name == "same_host":
        reason, hint = "ranks of one host exchange tensors", "use `train-cli calibrate --ranks 2` to measure it"
    else:
        reason = f"ranks are {links.ranks_per_host} to a host, and exchange tensors between hosts"
        hint = "set its latency and bandwidth, or a larger `ranks_per_host`"
    raise PlanError("machine-links", f"the machine file has no `[links.{name}]`, but {reason}", hint=hint)


@lru_cache(maxsize=1024)
def concurrent_groups(topology: Topology, axis: str, ranks_per_host: int, ranks: tuple[int, ...] | None = None) -> list[Ranks]:
    """Returns groups of `axis` that exchange at the same time: one for each way in which their ranks are distributed over
    hosts.

    ranks: a group, which limits the result to groups of its stage; None means those of all stages. If `axis` is a plugin's own,
    its other groups are unknown, and the result is only `ranks`.
    """
    groups: Iterable[Ranks] = [ranks] if ranks else topology.partition(axis)
    if ranks:
        stage, offset = divmod(min(ranks), topology.ranks_per_stage)
        if axis in AXES:
            groups = [ranks, *topology.partition(axis, stage)]
        elif axis.startswith(TIE):
            groups = [ranks, *([rank + index - offset for rank in ranks] for index in range(topology.ranks_per_stage))]
    by_hosts: dict[tuple[int, ...], Ranks] = {}
    for group in groups:
        by_hosts.setdefault(tuple(sorted(Counter(rank // ranks_per_host for rank in group).values())), group)
    return list(by_hosts.values())


def slowest_cost(
    collective: Collective,
    num_bytes: int,
    topology: Topology,
    axis: str,
    links: LinksTable,
    ranks: tuple[int, ...] | None = None,
) -> Cost:
    """Returns the cost of a collective in the slowest of `concurrent_groups`. Raises as `collective_cost` does."""
    groups = concurrent_groups(topology, axis, links.ranks_per_host, ranks)
    return max((collective_cost(collective, num_bytes, group, links) for group in groups), key=sum)


def slowest_message_cost(num_bytes: int, stages: tuple[int, int], topology: Topology, links: LinksTable) -> Cost:
    """Returns the cost of the slowest message between two `stages`. Raises as `message_cost` does."""
    size, per_host = topology.ranks_per_stage, links.ranks_per_host
    firsts = [stage * size for stage in stages]
    pairs = {
        (sender // per_host == receiver // per_host): (sender, receiver)
        for sender, receiver in zip(*(range(first, first + min(size, per_host)) for first in firsts), strict=True)
    }
    return max((message_cost(num_bytes, *pair, links) for pair in pairs.values()), key=sum)


def copy_cost(direction: CopyDirection, num_bytes: int, machine: MachineFile) -> Cost:
    """Returns the cost of a copy to the host or to the device. Without `[host]` in the machine file, a CPU copies at its memory
    bandwidth, and a CUDA device raises PlanError "machine-host".
    """
    host = machine.host
    if host is not None:
        return Cost(host.latency_s, num_bytes / (host.to_host if direction == "to_host" else host.to_device))
    if machine.device.kind == "cuda":
        raise _missing_host_error("[host]", "a step copies between the device and its host")
    return Cost(machine.device.launch_s, 2 * num_bytes / machine.device.memory_bandwidth)


def host_operators_s(operators: Sequence[Operator], machine: MachineFile) -> float:
    """Returns the seconds of operators on the host's cores, from its memory bandwidth. Raises PlanError "machine-host" if the
    machine file of a CUDA device does not have this bandwidth.
    """
    if machine.device.kind == "cpu":
        return operators_s(operators, machine.device)
    if machine.host is None or machine.host.memory_bandwidth is None:
        raise _missing_host_error("[host] memory_bandwidth", "the optimizer runs on the host")
    return sum(operator.num_bytes for operator in operators) / machine.host.memory_bandwidth


def _missing_host_error(key: str, reason: str) -> PlanError:
    hint = "use `train-cli calibrate` on a machine with a CUDA device to measure it"
    return PlanError("machine-host", f"the machine file has no `{key}`, but {reason}", hint=hint)
