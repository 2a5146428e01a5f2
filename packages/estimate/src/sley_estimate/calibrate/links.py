"""Measures what ranks of this host exchange, by the transports of a run: sums, gathers, reduce-scatters, swaps, messages; and
what of these runs beside computing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.comm.collectives import gather_objects, receive_from, send_to
from sley_core.topology import GATHER, REDUCE, Topology

if TYPE_CHECKING:
    from sley_core.comm.groups import Group, Groups
    from sley_core.comm.transport import Work
    from sley_core.comm.world import World

FEW, MANY = 1 << 12, 1 << 23
"""Bytes of the whole tensors that are exchanged: one shows the latency, the other the bandwidth."""

REPETITIONS = 12
ROUNDS = {"sum": 2}
"""Passes around the ring, where it is not one; `estimate.seconds.links` computes with the same."""

AT_ONCE = ("send", "swap")
"""Exchanges that go from rank to rank directly."""

EDGE, MANY_PRODUCTS = 256, 32
"""Of the products that are computed before or beside an exchange, and how many are timed first."""

WORK_S = 2e-3
"""Of work before an exchange: about what a layer's half takes."""


def measure_links(world: World, timeout_s: float) -> dict[str, Any]:
    """Times exchanges of all kinds and returns the table `[links]`: latency, bandwidth and overlap by kind, those of the
    slowest for the link itself. A collective of the world, which has two ranks or more, all on one host.

    timeout_s: of every wait. All ranks measure in one order and take the slowest of them, so that all return the same.
    """
    size = world.size
    found: dict[str, dict[str, float]] = {}
    together = world.groups(Topology.of(size, wp=size), timeout_s, attaches=True)
    sliced = world.groups(Topology.of(size, sp=size), timeout_s, attaches=True)
    apart = world.groups(Topology.of(size, pp=size), timeout_s, attaches=True)
    # Over all ranks; each comes to the same kinds, sizes and repetitions in the same order.
    for kind, exchange in collectives(together["stage"], together["wp"], sliced["sp"], world).items():
        few_s, many_s = (_after_work(together, exchange(num_bytes), world) for num_bytes in (FEW, MANY))
        found[kind] = {**way(few_s, many_s, kind, size), "overlap": overlap(together, exchange(MANY), world)}
    few_s, many_s = (_slowest(apart, _message(apart["pp"], world, num_bytes), world) / 2 for num_bytes in (FEW, MANY))
    both_ways = overlap(apart, _messages(apart["pp"], world, MANY), world)
    found["send"] = {**way(few_s, many_s, "send", size), "overlap": both_ways}
    slowest = max(found.values(), key=lambda one: one["latency_s"] + MANY / one["bandwidth"])
    return {"ranks_per_host": size, "same_host": {**slowest, **found}}


def way(few_s: float, many_s: float, kind: str, size: int) -> dict[str, float]:
    """Returns `latency_s` and `bandwidth` of a kind of exchange among `size` ranks, from its seconds for FEW and for MANY
    bytes. They are such that `estimate.seconds.links` computes those seconds from them.
    """
    rounds = ROUNDS.get(kind, 1) * (size - 1)
    share = 1.0 if kind == "send" else rounds / size
    slope = max(many_s - few_s, 1e-3 * many_s) / (MANY - FEW)
    latency_s = max(0.0, few_s - slope * FEW) / (1 if kind in AT_ONCE else rounds)
    return {"latency_s": latency_s, "bandwidth": share / slope}


Begin = Callable[[], Callable[[], object]]
"""Begins an exchange, and returns what ends it."""


def ended(begin: Begin) -> Callable[[], object]:
    """Returns a function that begins an exchange and waits until it has ended."""
    return lambda: begin()()


def end_of(work: Work) -> Callable[[], None]:
    """Returns a function that ends the exchange `work`: waits for its result, which a gather would else never read, and until
    peers have what this rank gave.
    """

    def end() -> None:
        work.wait()
        work.wait_sent()

    return end


def collectives(stage: Group, shards: Group, slices: Group, world: World) -> dict[str, Callable[[int], Begin]]:
    """Returns, for each of sum, gather, reduce and swap, a function that makes tensors of so many bytes in all and returns what
    begins an exchange of them. stage, shards, slices: groups of all ranks with the lanes of each kind.
    """
    size, device = world.size, world.device.torch_device

    def tensor(num_bytes: int) -> Tensor:
        return torch.ones(size, math.ceil(num_bytes / 4 / size), device=device)

    def summed(num_bytes: int) -> Begin:
        whole = tensor(num_bytes)
        return lambda: end_of(stage.transport().all_reduce(whole.zero_(), what="a sum to time"))

    def gathered(num_bytes: int) -> Begin:
        whole = tensor(num_bytes)
        own = whole[:1].clone()
        return lambda: end_of(shards.transport(GATHER).all_gather([whole], [own], what="a gather to time"))

    def reduced(num_bytes: int) -> Begin:
        """Makes a tensor of `num_bytes` and scratch memory; returns what begins a reduce-scatter of it."""
        whole = tensor(num_bytes)
        transport = shards.transport(REDUCE)
        scratch = torch.empty(transport.num_scratch_rows(1), *whole.shape[1:], device=device)
        return lambda: end_of(transport.reduce_scatter([whole.zero_()], [scratch], what="a reduction to time"))

    def swapped(num_bytes: int) -> Begin:
        sent = tensor(num_bytes)
        received = torch.empty_like(sent)
        return lambda: end_of(slices.transport().all_to_all(received, sent, what="a swap to time"))

    return {"sum": summed, "gather": gathered, "reduce": reduced, "swap": swapped}


def _message(group: Group, world: World, num_bytes: int) -> Callable[[], None]:
    """Returns a function that sends `num_bytes` from the first stage to the second and back, and waits; it does nothing on
    other stages.
    """
    value = torch.ones(num_bytes // 4, device=world.device.torch_device)
    coord = group.coord

    def there_and_back() -> None:
        """Sends the message and receives it again, or the reverse on the second stage; returns when it is there."""
        if coord == 0:
            send_to(value, group, "up", 1, what="a message to time").wait()
            receive_from(value, group, "down", 1, what="a message to time").wait()
        elif coord == 1:
            receive_from(value, group, "up", 0, what="a message to time").wait()
            send_to(value, group, "down", 0, what="a message to time").wait()

    return there_and_back


def _messages(group: Group, world: World, num_bytes: int) -> Begin:
    """Returns what begins messages of `num_bytes` between the first two stages, in both directions at once; it does nothing on
    others.
    """
    sent = torch.ones(num_bytes // 4, device=world.device.torch_device)
    received = torch.empty_like(sent)
    own, other = ("up", "down") if group.coord == 0 else ("down", "up")

    def begin() -> Callable[[], None]:
        """Begins both messages of this rank; returns what waits for them."""
        if group.coord > 1:
            return lambda: None
        peer = 1 - group.coord
        coming = receive_from(received, group, other, peer, what="a message to time")
        going = send_to(sent, group, own, peer, what="a message to time")

        def end() -> None:
            coming.wait()
            going.wait()

        return end

    return begin


def _after_work(groups: Groups, begin: Begin, world: World) -> float:
    """Returns the seconds that an exchange adds to 2 ms of work that every rank does before it, at least those of the exchange
    alone: after work, ranks do not come at the same moment. Equal on all ranks.
    """
    work = _work(WORK_S, groups, world)

    def both() -> None:
        work()
        begin()()

    alone_s = _slowest(groups, ended(begin), world)
    return max(alone_s, _slowest(groups, both, world) - _slowest(groups, work, world))


def overlap(groups: Groups, begin: Begin, world: World) -> float:
    """Returns the share of an exchange, from 0 to 1, that runs beside work which takes as long and which every rank does. Equal
    on all ranks.

    It is measured on CPUs, where threads that exchange need the cores that compute; elsewhere it is 1.
    """
    if world.device.type != "cpu":
        return 1.0
    exchange_s = _slowest(groups, ended(begin), world)
    work = _work(exchange_s, groups, world)

    def both() -> None:
        end = begin()
        work()
        end()

    work_s, both_s = _slowest(groups, work, world), _slowest(groups, both, world)
    return min(1.0, max(0.0, (exchange_s + work_s - both_s) / min(exchange_s, work_s)))


def _work(seconds: float, groups: Groups, world: World) -> Callable[[], None]:
    """Times products and returns a function that computes as many of them as take about `seconds`; as many on all ranks."""
    one, result = (torch.ones(EDGE, EDGE, device=world.device.torch_device) for _ in range(2))
    each_s = _slowest(groups, lambda: products(MANY_PRODUCTS, one, result), world) / MANY_PRODUCTS
    count = max(1, round(seconds / each_s))
    return lambda: products(count, one, result)


def products(count: int, one: Tensor, result: Tensor) -> None:
    """Multiplies `one`, a square matrix, with itself `count` times, each time into `result`."""
    for _ in range(count):
        torch.mm(one, one, out=result)


def _slowest(groups: Groups, work: Callable[[], object], world: World) -> float:
    """Calls `work` once, then `REPETITIONS` times; returns the median seconds on the slowest rank, equal on
    all. A collective.
    """
    work()
    taken = []
    for _ in range(REPETITIONS):
        began = world.device.moment()
        work()
        taken.append(world.device.seconds_between(began, world.device.moment()))
    # All ranks, after the same work.
    return float(max(gather_objects(statistics.median(taken), groups["control"], what="the times of exchanges")))
