"""Measures what ranks of this host exchange, by the transports of a run: sums, gathers, reduce-scatters, messages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.comm.collectives import gather_objects, receive_from, send_to
from sley_core.topology import GATHER, REDUCE, Topology

if TYPE_CHECKING:
    from sley_core.comm.groups import Group, Groups
    from sley_core.comm.world import World

FEW, MANY = 1 << 12, 1 << 23
"""Bytes of the whole tensors that are exchanged: one shows the latency, the other the bandwidth."""

REPETITIONS = 12
ROUNDS = {"sum": 2, "gather": 1, "reduce": 1}
"""Passes around the ring; `estimate.seconds.links` computes with the same."""


def measure_links(world: World, timeout_s: float) -> dict[str, Any]:
    """Returns the table `[links]` of ranks that are all on one host; a collective of the world, which has two ranks or more.

    All ranks measure in one order and take the slowest of them, so that all return the same.
    """
    size = world.size
    found: dict[str, dict[str, float]] = {}
    together = world.groups(Topology.of(size, wp=size), timeout_s, attaches=True)
    for kind, exchange in _collectives(together["stage"], together["wp"], world).items():
        # Over all ranks; each comes to the same kinds, sizes and repetitions in the same order.
        few, many = (_slowest(together, exchange, num_bytes, world) for num_bytes in (FEW, MANY))
        found[kind] = way(few, many, ROUNDS.get(kind, 1) * (size - 1), kind, size)
    apart = world.groups(Topology.of(size, pp=size), timeout_s, attaches=True)
    few, many = (
        _slowest(apart, partial(_message, apart["pp"], world), num_bytes, world) / 2 for num_bytes in (FEW, MANY)
    )
    found["send"] = way(few, many, 1, "send", size)
    slowest = max(found.values(), key=lambda one: one["latency_s"] + MANY / one["bandwidth"])
    return {"ranks_per_host": size, "same_host": {**slowest, **found}}


def way(few_s: float, many_s: float, rounds: int, kind: str, size: int) -> dict[str, float]:
    """Returns latency and bandwidth from the times of FEW and MANY bytes, in `rounds` rounds of 1 / size of the tensor each,
    or as a message.
    """
    share = 1.0 if kind == "send" else rounds / size
    slope = max(many_s - few_s, 1e-3 * many_s) / (MANY - FEW)
    return {"latency_s": max(0.0, few_s - slope * FEW) / rounds, "bandwidth": share / slope}


Exchanging = Callable[[int], Callable[[], None]]
"""Makes tensors of so many bytes, and returns what exchanges them once."""


def _collectives(stage: Group, shards: Group, world: World) -> dict[str, Exchanging]:
    size, device = world.size, world.device.torch_device

    def tensor(num_bytes: int) -> Tensor:
        return torch.ones(size, math.ceil(num_bytes / 4 / size), device=device)

    def summed(num_bytes: int) -> Callable[[], None]:
        whole = tensor(num_bytes)
        return lambda: _ended(stage.transport().all_reduce(whole.zero_(), what="a sum to time"))

    def gathered(num_bytes: int) -> Callable[[], None]:
        whole = tensor(num_bytes)
        own = whole[:1].clone()
        return lambda: _ended(shards.transport(GATHER).all_gather([whole], [own], what="a gather to time"))

    def reduced(num_bytes: int) -> Callable[[], None]:
        whole = tensor(num_bytes)
        transport = shards.transport(REDUCE)
        scratch = torch.empty(transport.num_scratch_rows(1), *whole.shape[1:], device=device)
        return lambda: _ended(transport.reduce_scatter([whole.zero_()], [scratch], what="a reduction to time"))

    return {"sum": summed, "gather": gathered, "reduce": reduced}


def _message(group: Group, world: World, num_bytes: int) -> Callable[[], None]:
    """A message from the first stage to the second, and one back."""
    value = torch.ones(num_bytes // 4, device=world.device.torch_device)
    coord = group.coord

    def there_and_back() -> None:
        if coord == 0:
            send_to(value, group, "up", 1, what="a message to time").wait()
            receive_from(value, group, "down", 1, what="a message to time").wait()
        elif coord == 1:
            receive_from(value, group, "up", 0, what="a message to time").wait()
            send_to(value, group, "down", 0, what="a message to time").wait()

    return there_and_back


def _ended(work: Any) -> None:
    work.wait()
    work.wait_sent()


def _slowest(groups: Groups, exchanging: Exchanging, num_bytes: int, world: World) -> float:
    """Returns the median seconds of one exchange on the slowest rank, equal on all."""
    exchange = exchanging(num_bytes)
    exchange()
    taken = []
    for _ in range(REPETITIONS):
        began = world.device.moment()
        exchange()
        taken.append(world.device.seconds_between(began, world.device.moment()))
    # All ranks, after the same exchanges.
    return float(max(gather_objects(statistics.median(taken), groups["control"], what="the times of exchanges")))
