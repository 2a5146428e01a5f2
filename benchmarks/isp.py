"""Sharded weights on two and four gloo ranks, one thread each: `isp.communicator` against torch's FSDP2 and DDP.

Forward, backward and reduction of one microbatch. Targets, ours / FSDP2: time <= 0.65 at 128 tokens per rank, <= 0.82 at
512, <= 0.95 at 2048, and compiled <= 0.90 of compiled FSDP2; at all sizes at least 60 % of FSDP2's time above the line without
communication removed; live bytes <= FSDP2's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from contestants import Cleared, Sley, Torch, plan
from peaks import peak_live_mb
from protocol import Ratio, compare, interleave, noise_of, parser, report, slowest
from sley_testing.ranks import Ranks

SHAPE = {"layers": 6, "hidden": 384, "heads": 6}
TOKENS = (128, 512, 2048)
WORLDS = (2, 4)
TIME_TARGET = {128: 0.65, 512: 0.82, 2048: 0.95}
REMOVED_TARGET = 0.60
BUCKETED = [{"use": "dp.bucketed"}]
EACH = [{"use": "core.each"}]
VARIANTS: dict[str, dict[str, Any]] = {
    "isp": {},
    "isp, sockets": {"cross_memory_attach": False},
    "isp, no overlap": {"overlap": False},
    "isp, everything ahead": {"ahead": 8},
    "isp, compiled": {"compile": True},
}
ONCE: dict[str, dict[str, Any]] = {
    "isp, reduced per step": {"reduce": "step"},
    "isp, per step, sockets": {"reduce": "step", "cross_memory_attach": False},
}
"""With several microbatches only."""


def tables(tokens: int, options: dict[str, Any], micros: int = 1) -> dict[str, Any]:
    """The plan whose weights are sharded over all ranks."""
    weights = {"use": "isp.communicator", **options}
    parallel = {"wp": dist.get_world_size(), "cross_memory_attach": weights.pop("cross_memory_attach", True)}
    is_compiled = weights.pop("compile", False)
    made = plan({**SHAPE, "sequence": tokens}, micros, BUCKETED, parallel=parallel, weights=weights)
    return {**made, "model": {**made["model"], "compile": is_compiled}}


def contestants(tokens: int, micros: int = 1) -> dict[str, Callable[[], Any]]:
    whole = plan({**SHAPE, "sequence": tokens}, micros, EACH)
    torchs = {
        "fsdp2": "fsdp2",
        "fsdp2 again": "fsdp2",
        "fsdp2, compiled": "fsdp2-compiled",
        "ddp": "ddp",
        "no communication": "none",
        "no communication, compiled": "none-compiled",
    }

    def build_torch(kind: str) -> Cleared:
        return Cleared(Torch(whole, kind, micros))

    def build_sley(options: dict[str, Any]) -> Sley:
        return Sley(tables(tokens, options, micros=micros), backward_only=True)

    found: dict[str, Callable[[], Any]] = {name: partial(build_torch, kind) for name, kind in torchs.items()}
    variants = VARIANTS | (ONCE if micros > 1 else {})
    return found | {name: partial(build_sley, options) for name, options in variants.items()}


def times(tokens: int, micros: int, rounds: int, names: Sequence[str]) -> dict[str, list[float]]:
    """Seconds per step on this rank, of the contestants in `names`, or of all."""
    torch.set_num_threads(1)
    made = {name: build() for name, build in contestants(tokens, micros).items() if name in names or not names}
    batch = made["isp"].batch()

    def one(contestant: Any) -> Callable[[], object]:
        return lambda: contestant.backward(batch)

    return interleave({name: one(each) for name, each in made.items()}, rounds, barrier=dist.barrier)


def memory(name: str, tokens: int) -> float:
    """Peak of live tensor bytes in three steps of `name` alone, in MiB, construction included."""
    return peak_live_mb(lambda: three_steps(name, tokens))


def three_steps(name: str, tokens: int) -> None:
    contestant = contestants(tokens)[name]()
    batch = {key: torch.zeros(1, tokens, dtype=torch.int64) for key in ("tokens", "labels")}
    for _ in range(3):
        contestant.backward(batch)


def counts(tokens: int) -> dict[str, Any]:
    """What the communicator counted in the last of three steps, and its peaks."""
    torch.set_num_threads(1)
    contestant = Sley(tables(tokens, {}), backward_only=True)
    batch = contestant.batch()
    communicator: Any = contestant.run.stepper.executor.communicator
    for _ in range(3):
        contestant.step(batch)
    counted: dict[str, Any] = communicator.counts()
    return counted


def removed(rows: list[Ratio]) -> float:
    """The part of FSDP2's time above the line without communication that ours does not need."""
    of = {row.name: row.milliseconds for row in rows}
    return (of["fsdp2"] - of["isp"]) / (of["fsdp2"] - of["no communication"])


def main() -> None:
    options = parser(__doc__ or "", rounds=40)
    options.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    options.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    options.add_argument("--micros", type=int, default=1, help="microbatches per step and rank")
    options.add_argument("--names", nargs="*", default=[], help="only these contestants; those of the targets are needed")
    options.add_argument("--only", choices=("times", "memory"), default=None)
    chosen = options.parse_args()
    for world in chosen.worlds:
        ranks = Ranks(world, timeout_s=3000)
        for tokens in chosen.tokens if chosen.only in (None, "times") else ():
            seconds = slowest(ranks(times, tokens, chosen.micros, chosen.rounds, chosen.names))
            rows = compare(seconds, "fsdp2")
            noise = noise_of(rows, "fsdp2 again")
            ours = next(row for row in rows if row.name == "isp")
            facts: dict[str, object] = {"noise": round(noise, 4)}
            if tokens in TIME_TARGET and chosen.micros == 1:
                facts[f"isp <= {TIME_TARGET[tokens]}"] = ours.meets(TIME_TARGET[tokens], noise)
            facts[f"of FSDP2's communication removed (target {REMOVED_TARGET})"] = round(removed(rows), 3)
            facts |= ranks(counts, tokens)[0]
            title = f"forward, backward, reduction, {chosen.micros} x {tokens} tokens, {world} ranks"
            report(title, rows, facts, chosen.json)
        if chosen.only in (None, "memory"):
            facts = {name: round(ranks(memory, name, 512)[0]) for name in ranks(names)[0]}
            report(f"peak MiB of live tensors, 512 tokens, {world} ranks", [], facts, chosen.json)


def names() -> list[str]:
    return list(contestants(128))


if __name__ == "__main__":
    main()
