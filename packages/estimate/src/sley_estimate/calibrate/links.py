"""Measures a machine and the exchanges between its ranks, alone and during computation, with the transports of a run."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sley_core.comm.transport import Work
from sley_core.comm.world import Group, Groups, World
from sley_core.plan.plan import Plan
from sley_core.topology import GATHER, REDUCE, Topology
from sley_estimate.calibrate.bench import measure_layers
from sley_estimate.calibrate.device import measure_device, measure_engine, measure_host
from sley_estimate.machine import MACHINE_FORMAT, MachineFile, machine_from_dict
from sley_trainer.assemble import keep_freed_memory

SMALL_BYTES, LARGE_BYTES = 1 << 12, 1 << 23  # bytes of full tensors: small tensors show the latency, large ones the bandwidth

REPETITIONS = 12  # the number of timed calls of each exchange; their median counts

PRODUCT_EDGE, NUM_PRODUCTS = 256, 32
"""Work before or during an exchange consists of products of square matrices. These are the edge of the matrices, and the number
of products that run to measure the time of one product."""

WORK_S = 2e-3  # the duration in seconds of the work before an exchange, about half of a layer's
BeginExchange = Callable[[], list[Work]]  # a function that starts an exchange and returns its handles


def measure_machine(world: World, plan: Plan | None, timeout_s: float) -> MachineFile | None:
    """Returns the measured machine on rank 0 of `world`, and None on other ranks. A collective of all ranks. If there are
    several ranks, their links are measured. Only rank 0 measures the device and, unless `plan` is None, the layers of `plan`;
    on CPUs, all ranks do so at the same time, since they share memory and caches. On CPUs, each process keeps freed memory from
    now on, unless the plan disables this. timeout_s: the maximum time in seconds of a wait between ranks.
    """
    is_cpu = world.device.type == "cpu"
    if is_cpu and (plan is None or plan.run.keep_freed_memory):
        keep_freed_memory()
    tables: dict[str, Any] = {"format": MACHINE_FORMAT}
    if world.size > 1:
        tables["links"] = measure_links(world, timeout_s)
    if world.rank == 0 or is_cpu:
        tables |= {"device": measure_device(world.device), "host": measure_host(world.device)}
        if world.device.is_async:
            tables["engine"] = measure_engine(world.device, plan)
        if plan is not None:
            tables["layers"] = measure_layers(plan, world.device)
    return machine_from_dict(tables) if world.rank == 0 else None


def measure_links(world: World, timeout_s: float) -> dict[str, Any]:
    """Returns the `[links]` table of a machine file, equal on all ranks: the latency, bandwidth and overlap of each kind of
    exchange. The link itself has the figures of the slowest kind. A collective of at least two ranks, all on one host.
    timeout_s: the maximum time in seconds of a wait between ranks.
    """
    size = world.size
    shard_groups = world.make_groups(Topology.from_sizes(size, wp=size), timeout_s, cross_memory=True)
    slice_groups = world.make_groups(Topology.from_sizes(size, sp=size), timeout_s, cross_memory=True)
    stage_groups = world.make_groups(Topology.from_sizes(size, pp=size), timeout_s, cross_memory=True)
    timer, device = LinkTimer(shard_groups, world), world.device.torch_device
    groups = shard_groups["stage"], shard_groups["wp"], slice_groups["sp"], stage_groups["pp"]
    small, large = (prepare_exchanges(*groups, device, num_bytes) for num_bytes in (SMALL_BYTES, LARGE_BYTES))
    exchanges = {}
    for kind in small:
        seconds = timer.time_exchange if kind == "send" else timer.time_after_work
        figures = fit_link(seconds(small[kind]), seconds(large[kind]), kind, size)
        exchanges[kind] = {**figures, "overlap": timer.measure_overlap(large[kind])}
    slowest = max(exchanges.values(), key=lambda exchange: exchange["latency_s"] + LARGE_BYTES / exchange["bandwidth"])
    return {"ranks_per_host": size, "same_host": {**slowest, **exchanges}}


def fit_link(small_s: float, large_s: float, exchange_type: str, size: int) -> dict[str, float]:
    """Returns `latency_s`, in seconds, and `bandwidth`, in bytes per second. With these figures, the cost of an exchange of
    SMALL_BYTES bytes is about `small_s` seconds, and that of LARGE_BYTES bytes about `large_s` seconds. exchange_type: "sum",
    "gather", "reduce", "swap" or "send". size: the number of ranks in the exchange.
    """
    rounds = (2 if exchange_type == "sum" else 1) * (size - 1)
    share = 1.0 if exchange_type == "send" else rounds / size
    slope = max(large_s - small_s, 1e-3 * large_s) / (LARGE_BYTES - SMALL_BYTES)
    latency_s = max(0.0, small_s - slope * SMALL_BYTES) / (1 if exchange_type in ("send", "swap") else rounds)
    return {"latency_s": latency_s, "bandwidth": share / slope}


def prepare_exchanges(
    stage_group: Group, wp_group: Group, sp_group: Group, pp_group: Group, device: torch.device, num_bytes: int
) -> dict[str, BeginExchange]:
    """Returns a function for each kind of exchange: "sum", "gather", "reduce", "swap" and "send". The function starts an
    exchange with full tensors of about `num_bytes` bytes on `device`. Each group contains all ranks. "send" sends a message
    from each of the first two stages to the other one, at the same time.
    """
    full, received = (
        torch.ones(stage_group.size, math.ceil(num_bytes / 4 / stage_group.size), device=device) for _ in range(2)
    )
    shard, message = full[:1].clone(), torch.ones(2, num_bytes // 4, device=device)
    scratch = torch.empty(wp_group.transport(REDUCE).num_scratch_rows(1), *full.shape[1:], device=device)

    def begin_messages() -> list[Work]:
        if pp_group.coord > 1:
            return []
        send_channel, receive_channel = ("up", "down") if pp_group.coord == 0 else ("down", "up")
        receive = pp_group.receive(message[0], receive_channel, 1 - pp_group.coord, label="a message to time")
        return [receive, pp_group.send(message[1], send_channel, 1 - pp_group.coord, label="a message to time")]

    return {
        "sum": lambda: [stage_group.transport().all_reduce(full.zero_(), label="a sum to time")],
        "gather": lambda: [wp_group.transport(GATHER).all_gather([full], [shard], label="a gather to time")],
        "reduce": lambda: [wp_group.transport(REDUCE).reduce_scatter([full.zero_()], [scratch], label="a reduction to time")],
        "swap": lambda: [sp_group.transport().all_to_all(received, full, label="a swap to time")],
        "send": begin_messages,
    }


def end_exchange(works: Sequence[Work]) -> None:
    """Waits until this rank has the results of the exchange with the handles `works`, and the peers have this rank's data."""
    for work in works:
        work.wait_sent()


class LinkTimer:
    """Times exchanges of `groups`. Every public method is a collective, and returns the same number on all ranks."""

    def __init__(self, groups: Groups, world: World) -> None:
        self.groups, self.device = groups, world.device

    def time_work(self, work: Callable[[], object]) -> float:
        """Returns the largest of the ranks' median times for `work`, in seconds."""
        work()
        times = []
        for _ in range(REPETITIONS):
            start = self.device.moment()
            work()
            times.append(self.device.seconds_between(start, self.device.moment()))
        # All ranks reach this collective after the same work.
        return float(max(self.groups["control"].gather_objects(statistics.median(times), label="the times of exchanges")))

    def time_exchange(self, begin: BeginExchange) -> float:
        """Returns the median time in seconds that the exchange started by `begin` takes on the slowest rank."""
        return self.time_work(lambda: end_exchange(begin()))

    def time_after_work(self, begin: BeginExchange) -> float:
        """Returns the time in seconds that an exchange adds to work before it, but at least the time of the exchange alone.
        After work, ranks start the exchange at different times.
        """
        work = self._make_work(WORK_S)

        def work_and_exchange() -> None:
            work()
            end_exchange(begin())

        return max(self.time_exchange(begin), self.time_work(work_and_exchange) - self.time_work(work))

    def measure_overlap(self, begin: BeginExchange) -> float:
        """Returns the share of an exchange's time, from 0 to 1, that overlaps with work of the same length. Measures only on
        CPUs, where the threads of an exchange compete with the work for cores. Returns 1 on other devices.
        """
        if self.device.type != "cpu":
            return 1.0
        exchange_s = self.time_exchange(begin)
        work = self._make_work(exchange_s)

        def work_and_exchange() -> None:
            works = begin()
            work()
            end_exchange(works)

        work_s, both_s = self.time_work(work), self.time_work(work_and_exchange)
        return min(1.0, max(0.0, (exchange_s + work_s - both_s) / min(exchange_s, work_s)))

    def _make_work(self, seconds: float) -> Callable[[], None]:
        """Returns a function that computes matrix products for about `seconds` seconds, the same number on all ranks."""
        square, result = (torch.ones(PRODUCT_EDGE, PRODUCT_EDGE, device=self.device.torch_device) for _ in range(2))

        def products(count: int) -> None:
            for _ in range(count):
                torch.mm(square, square, out=result)

        product_s = self.time_work(lambda: products(NUM_PRODUCTS)) / NUM_PRODUCTS
        return partial(products, max(1, round(seconds / product_s)))
