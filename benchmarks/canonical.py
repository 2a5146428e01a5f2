"""What one hash for all layouts costs: `reduction = "canonical"` against "fast", on two gloo ranks of one thread each.

Whole steps at k = 1, 4 and 8 microbatches per rank, with `dp.bucketed` and `dp.sharded`; and, of one rank alone, what it
holds besides its gradients at most. There is no target: it is an option, and this is its price.
"""

from typing import Any

import torch
import torch.distributed as dist

from contestants import Sley, plan
from peaks import peak_live_mb
from protocol import compare, interleave, noise_of, parser, report, slowest
from sley_testing.ranks import Ranks

RANKS = 2
SHAPE = {"layers": 8, "hidden": 384, "heads": 6, "sequence": 64}
MICROS = (1, 4, 8)
REDUCERS = ("dp.bucketed", "dp.sharded")


def tables(reducer: str, micros: int, reduction: str) -> dict[str, Any]:
    return plan(SHAPE, micros, [{"use": reducer}], parallel={"reduction": reduction})


def times(reducer: str, micros: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step on this rank."""
    torch.set_num_threads(1)
    made = {name: Sley(tables(reducer, micros, name.partition(" ")[0])) for name in ("fast", "fast again", "canonical")}
    batch = made["fast"].batch()
    steps = {name: (lambda one=one: one.step(batch)) for name, one in made.items()}
    return interleave(steps, rounds, barrier=dist.barrier)


def memory(reducer: str, micros: int, reduction: str) -> float:
    """Peak of live tensor bytes in three steps alone, in MiB."""

    def steps() -> None:
        contestant = Sley(tables(reducer, micros, reduction))
        batch = contestant.batch()
        for _ in range(3):
            contestant.step(batch)

    return peak_live_mb(steps)


def main() -> None:
    known = parser(__doc__ or "", rounds=30)
    known.add_argument("--micros", nargs="+", type=int, choices=MICROS, default=MICROS, help="microbatches per rank")
    known.add_argument("--reducers", nargs="+", choices=REDUCERS, default=REDUCERS)
    options = known.parse_args()
    ranks = Ranks(RANKS, timeout_s=3000)
    for reducer in options.reducers:
        for micros in options.micros:
            rows = compare(slowest(ranks(times, reducer, micros, options.rounds)), "fast")
            facts: dict[str, object] = {"noise": round(noise_of(rows, "fast again"), 4)}
            for reduction in ("fast", "canonical"):
                facts[f"{reduction}: peak MiB of live tensors"] = round(ranks(memory, reducer, micros, reduction)[0])
            report(f"whole step, {reducer}, k = {micros}, {RANKS} ranks", rows, facts, options.json)


if __name__ == "__main__":
    main()
