"""Measures exchanges between ranks of this host, by the transports of a run, and their share that runs beside computing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sley_core.comm.group import Group
from sley_core.comm.groups import Groups
from sley_core.comm.transport import Work
from sley_core.comm.world import World
from sley_core.topology import GATHER, REDUCE, Topology

FEW, MANY = 1 << 12, 1 << 23  # bytes of the whole tensors: few show the latency, many the bandwidth

REPETITIONS = 12

EDGE, MANY_PRODUCTS = 256, 32
"""Of the products that are computed before or beside an exchange, and how many are timed first."""

WORK_S = 2e-3  # seconds of work before an exchange: about one half of a layer
Begin = Callable[[], Callable[[], object]]  # begins an exchange, and returns a function that ends it


def measure_links(world: World, timeout_s: float) -> dict[str, Any]:
    """Returns the table `[links]`, equal on all ranks: latency, bandwidth and overlap by kind, those of the slowest kind for
    the link itself. A collective of two ranks or more on one host. timeout_s: of every wait.
    """
    size = world.size
    together = world.groups(Topology.of(size, wp=size), timeout_s, attaches=True)
    sliced = world.groups(Topology.of(size, sp=size), timeout_s, attaches=True)
    apart = world.groups(Topology.of(size, pp=size), timeout_s, attaches=True)
    timer, messages = LinkTimer(together, world), LinkTimer(apart, world)
    ways = {}
    for kind, exchange in collectives(together["stage"], together["wp"], sliced["sp"], world).items():
        few_s, many_s = (timer.after_work(exchange(num_bytes)) for num_bytes in (FEW, MANY))
        ways[kind] = {**way(few_s, many_s, kind, size), "overlap": timer.overlap(exchange(MANY))}
    few_s, many_s = (messages.seconds(_ping_pong(apart["pp"], world, num_bytes)) / 2 for num_bytes in (FEW, MANY))
    both_ways = _both_ways(apart["pp"], world, MANY)
    ways["send"] = {**way(few_s, many_s, "send", size), "overlap": messages.overlap(both_ways)}
    slowest = max(ways.values(), key=lambda each: each["latency_s"] + MANY / each["bandwidth"])
    return {"ranks_per_host": size, "same_host": {**slowest, **ways}}


def way(few_s: float, many_s: float, kind: str, size: int) -> dict[str, float]:
    """Returns the latency and bandwidth with which `step.links` computes the seconds of FEW and of MANY bytes."""
    rounds = (2 if kind == "sum" else 1) * (size - 1)
    share = 1.0 if kind == "send" else rounds / size
    slope = max(many_s - few_s, 1e-3 * many_s) / (MANY - FEW)
    latency_s = max(0.0, few_s - slope * FEW) / (1 if kind in ("send", "swap") else rounds)
    return {"latency_s": latency_s, "bandwidth": share / slope}


def end_of(work: Work) -> Callable[[], None]:
    """Returns a function that waits for the result of `work`, and until peers have this rank's part."""

    def end() -> None:
        work.wait()
        work.wait_sent()

    return end


def collectives(stage: Group, shards: Group, slices: Group, world: World) -> dict[str, Callable[[int], Begin]]:
    """Returns, per kind, a function of bytes that makes tensors and returns what begins an exchange. Groups have all ranks."""
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
        whole = tensor(num_bytes)
        transport = shards.transport(REDUCE)
        scratch = torch.empty(transport.num_scratch_rows(1), *whole.shape[1:], device=device)
        return lambda: end_of(transport.reduce_scatter([whole.zero_()], [scratch], what="a reduction to time"))

    def swapped(num_bytes: int) -> Begin:
        sent = tensor(num_bytes)
        received = torch.empty_like(sent)
        return lambda: end_of(slices.transport().all_to_all(received, sent, what="a swap to time"))

    return {"sum": summed, "gather": gathered, "reduce": reduced, "swap": swapped}


def _ping_pong(group: Group, world: World, num_bytes: int) -> Callable[[], None]:
    """Returns a function that sends a message from the first stage to the second and back, and waits."""
    value = torch.ones(num_bytes // 4, device=world.device.torch_device)

    def ping_pong() -> None:
        if group.coord == 0:
            group.send(value, "up", 1, what="a message to time").wait()
            group.receive(value, "down", 1, what="a message to time").wait()
        elif group.coord == 1:
            group.receive(value, "up", 0, what="a message to time").wait()
            group.send(value, "down", 0, what="a message to time").wait()

    return ping_pong


def _both_ways(group: Group, world: World, num_bytes: int) -> Begin:
    """Returns what begins messages between the first two stages in both directions at once."""
    sent = torch.ones(num_bytes // 4, device=world.device.torch_device)
    received = torch.empty_like(sent)
    own, other = ("up", "down") if group.coord == 0 else ("down", "up")

    def begin() -> Callable[[], None]:
        if group.coord > 1:
            return lambda: None
        peer = 1 - group.coord
        coming = group.receive(received, other, peer, what="a message to time")
        going = group.send(sent, own, peer, what="a message to time")

        def end() -> None:
            coming.wait()
            going.wait()

        return end

    return begin


class LinkTimer:
    """Times exchanges of `groups`. Every method is a collective, whose result is equal on all ranks."""

    def __init__(self, groups: Groups, world: World) -> None:
        self.groups, self.device = groups, world.device

    def seconds(self, work: Callable[[], object]) -> float:
        """Returns the median seconds of `work` on the slowest rank."""
        work()
        taken = []
        for _ in range(REPETITIONS):
            began = self.device.moment()
            work()
            taken.append(self.device.seconds_between(began, self.device.moment()))
        # All ranks, after the same work.
        return float(max(self.groups["control"].gather_objects(statistics.median(taken), what="the times of exchanges")))

    def after_work(self, begin: Begin) -> float:
        """Returns the seconds that an exchange adds to work before it, from which ranks come apart; at least its own."""
        work = self._work(WORK_S)

        def both() -> None:
            work()
            begin()()

        alone_s = self.seconds(lambda: begin()())
        return max(alone_s, self.seconds(both) - self.seconds(work))

    def overlap(self, begin: Begin) -> float:
        """Returns the share of an exchange, from 0 to 1, that runs beside work that takes as long.

        It is measured on CPUs, where threads that exchange need the cores that compute; elsewhere it is 1.
        """
        if self.device.type != "cpu":
            return 1.0
        exchange_s = self.seconds(lambda: begin()())
        work = self._work(exchange_s)

        def both() -> None:
            end = begin()
            work()
            end()

        work_s, both_s = self.seconds(work), self.seconds(both)
        return min(1.0, max(0.0, (exchange_s + work_s - both_s) / min(exchange_s, work_s)))

    def _work(self, seconds: float) -> Callable[[], None]:
        """Returns a function that computes products for about `seconds`; as many on all ranks."""
        square, result = (torch.ones(EDGE, EDGE, device=self.device.torch_device) for _ in range(2))

        def products(count: int) -> None:
            for _ in range(count):
                torch.mm(square, square, out=result)

        each_s = self.seconds(lambda: products(MANY_PRODUCTS)) / MANY_PRODUCTS
        return partial(products, max(1, round(seconds / each_s)))
