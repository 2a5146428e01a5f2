"""Gathers and reductions of rows on the CPU: core's direct messages and its reads of peers' memory against gloo's own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from protocol import arguments, compare, interleave, noise_of, report
from sley_core.comm.world import Group, World
from sley_core.topology import GATHER, REDUCE, Topology
from sley_testing.ranks import Ranks

WORLDS = (2, 4)
MEBIBYTES = (1, 8, 64)


def times(mebibytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds on this rank for a whole tensor of that size, by kind and form."""
    torch.set_num_threads(1)
    world = World.join("cpu")
    size, topology = world.size, Topology.from_sizes(world.size, wp=world.size)
    group = world.make_groups(topology, 60)["wp"]
    near = world.make_groups(topology, 60, cross_memory=True)["wp"]
    rows = (mebibytes << 18) // size // 1024
    whole, shard = torch.zeros(size * rows, 1024), torch.zeros(rows, 1024)
    scratch = torch.zeros(group.transport(REDUCE).num_scratch_rows(rows), 1024)
    own: Any = dist

    def gather(by: Group) -> None:
        exchange = by.transport(GATHER).all_gather([whole], [shard], label="rows")
        exchange.wait()
        exchange.wait_sent()

    def reduce(by: Group) -> None:
        by.transport(REDUCE).reduce_scatter([whole], [scratch], label="rows").wait_sent()

    kinds: dict[str, dict[str, Callable[[], object]]] = {
        "gather": {
            "gloo's": lambda: own.all_gather_single(whole, shard, group=group.channel("gather")),
            "gloo's again": lambda: own.all_gather_single(whole, shard, group=group.channel("gather")),
            "direct": lambda: gather(group),
            "memory": lambda: gather(near),
        },
        "reduce": {
            "gloo's": lambda: own.reduce_scatter_single(shard, whole, group=group.channel("reduce")),
            "gloo's again": lambda: own.reduce_scatter_single(shard, whole, group=group.channel("reduce")),
            "direct": lambda: reduce(group),
            "memory": lambda: reduce(near),
        },
    }
    return {kind: interleave(forms, rounds, barrier=dist.barrier) for kind, forms in kinds.items()}


def main() -> None:
    options = arguments(__doc__ or "", rounds=40)
    for world in WORLDS:
        ranks = Ranks(world, timeout_s=600)
        for mebibytes in MEBIBYTES:
            for kind, seconds in ranks(times, mebibytes, options.rounds)[0].items():
                rows = compare(seconds, "gloo's")
                facts = {"noise": round(noise_of(rows, "gloo's again"), 4)}
                report(f"{kind}, {mebibytes} MiB, {world} ranks", rows, facts, options.json)


if __name__ == "__main__":
    main()
