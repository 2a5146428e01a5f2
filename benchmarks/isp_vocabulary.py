"""A large vocabulary on two gloo ranks, one thread each: table and head gathered, or shared by the ranks of `wp`.

Forward, backward and reduction of one microbatch of a small decoder, whose table and head are most of it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from contestants import Sley, plan
from peaks import peak_live_mb
from protocol import compare, interleave, noise_of, parser, report, slowest
from sley_testing.ranks import Ranks

SHAPE = {"layers": 2, "hidden": 384, "heads": 6, "sequence": 512}
VOCABULARY = 32768
WORLD = 2
BASE = "both gathered"
AGAIN = "both gathered again"
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    AGAIN: {},
    "table by columns": {"embedding": "hidden"},
    "head by classes": {"head": "vocabulary"},
    "both shared": {"embedding": "hidden", "head": "vocabulary"},
}


def tables(options: dict[str, Any], attaches: bool) -> dict[str, Any]:
    data = {"factory": "noise:Noise", "options": {"sequence": SHAPE["sequence"], "vocabulary": VOCABULARY}}
    return plan(
        SHAPE,
        1,
        [{"use": "core.each"}],
        data=data,
        parallel={"wp": dist.get_world_size(), "cross_memory_attach": attaches},
        weights={"use": "isp.communicator", **options},
    )


def times(rounds: int, attaches: bool) -> dict[str, list[float]]:
    """Seconds per step on this rank, of each variant."""
    torch.set_num_threads(1)
    made = {name: Sley(tables(options, attaches), backward_only=True) for name, options in VARIANTS.items()}
    batch = made[BASE].batch()

    def one(contestant: Sley) -> Callable[[], object]:
        return lambda: contestant.backward(batch)

    return interleave({name: one(each) for name, each in made.items()}, rounds, barrier=dist.barrier)


def memory(name: str) -> float:
    """Peak of live tensor bytes in three steps of `name` alone, in MiB, construction included."""
    return peak_live_mb(lambda: three_steps(name))


def three_steps(name: str) -> None:
    contestant = Sley(tables(VARIANTS[name], True), backward_only=True)
    batch = {key: torch.zeros(1, SHAPE["sequence"], dtype=torch.int64) for key in ("tokens", "labels")}
    for _ in range(3):
        contestant.backward(batch)


def counts(name: str) -> dict[str, Any]:
    """What the communicator counted in the last of three steps, and its peaks."""
    torch.set_num_threads(1)
    contestant = Sley(tables(VARIANTS[name], True), backward_only=True)
    batch = contestant.batch()
    for _ in range(3):
        contestant.step(batch)
    communicator: Any = contestant.run.stepper.executor.communicator
    counted: dict[str, Any] = communicator.counts()
    return counted


def main() -> None:
    options = parser(__doc__ or "", rounds=40)
    options.add_argument("--only", choices=("times", "memory", "counts"), default=None)
    options.add_argument("--sockets", action="store_true", help="ranks do not read each other's memory")
    chosen = options.parse_args()
    ranks = Ranks(WORLD, timeout_s=3000)
    where = f"{VOCABULARY} ids, {SHAPE['sequence']} tokens, {WORLD} ranks{', sockets' if chosen.sockets else ''}"
    if chosen.only in (None, "times"):
        rows = compare(slowest(ranks(times, chosen.rounds, not chosen.sockets)), BASE)
        facts: dict[str, object] = {"noise": round(noise_of(rows, AGAIN), 4)}
        report(f"forward, backward, reduction, {where}", rows, facts, chosen.json)
    if chosen.only in (None, "memory"):
        found = {name: round(max(ranks(memory, name))) for name in VARIANTS if name != AGAIN}
        report(f"peak MiB of live tensors, {where}", [], found, chosen.json)
    if chosen.only in (None, "counts"):
        for name in VARIANTS:
            report(f"{name}, {where}", [], ranks(counts, name)[0], chosen.json)


if __name__ == "__main__":
    main()
