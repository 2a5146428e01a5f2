"""Data parallelism on two gloo ranks, one thread each: `dp.bucketed` against `core.each`, torch's DDP and FSDP2.

Targets, ours / DDP: time <= 0.94 at 64 tokens and <= 1.00 at 512 (backward), <= 0.90 at 64 (whole step); memory <= 0.80;
with injected latency at least 80 % of the reduction hidden.
"""

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import latency
from contestants import Cleared, Sley, Torch, plan
from peaks import peak_live_mb, peak_resident_mb
from protocol import compare, interleave, noise_of, parser, report
from sley_testing.ranks import Ranks

RANKS = 2
SHAPE = {"layers": 8, "hidden": 384, "heads": 6}
TOKENS = (64, 512)
MICROS = (1, 4)
BUCKET_MB = 25.0
BACKWARD_TARGET = {64: 0.94, 512: 1.00}
STEP_TARGET = {64: 0.90}
MEMORY_TARGET = 0.80
HIDDEN_TARGET = 0.80
EQUAL_BUCKET_MB = 7.2
"""Eight buckets that differ by 6 %."""

PARTS = ("backward", "step", "memory", "latency")
BUCKETED = [{"use": "dp.bucketed", "bucket_mb": BUCKET_MB}]
EACH = [{"use": "core.each"}]
SOCKETS: dict[str, Any] = {"parallel": {"cross_memory_attach": False}}


def backward_contestants(tokens: int, micros: int) -> dict[str, Any]:
    shape = {**SHAPE, "sequence": tokens}
    return {
        "ddp": lambda: Cleared(Torch(plan(shape, micros, EACH), "ddp", micros)),
        "ddp again": lambda: Cleared(Torch(plan(shape, micros, EACH), "ddp", micros)),
        "ddp static_graph": lambda: Cleared(Torch(plan(shape, micros, EACH), "ddp-static", micros)),
        "fsdp2": lambda: Cleared(Torch(plan(shape, micros, EACH), "fsdp2", micros)),
        "no reduction": lambda: Cleared(Torch(plan(shape, micros, EACH), "none", micros)),
        "core.each": lambda: Sley(plan(shape, micros, EACH), backward_only=True),
        "dp.bucketed, sockets": lambda: Sley(plan(shape, micros, BUCKETED, **SOCKETS), backward_only=True),
        "dp.bucketed": lambda: Sley(plan(shape, micros, BUCKETED), backward_only=True),
    }


def step_contestants(tokens: int, micros: int) -> dict[str, Any]:
    shape = {**SHAPE, "sequence": tokens}
    return {
        "ddp": lambda: Torch(plan(shape, micros, EACH), "ddp", micros),
        "ddp again": lambda: Torch(plan(shape, micros, EACH), "ddp", micros),
        "ddp, fused AdamW": lambda: Torch(plan(shape, micros, EACH), "ddp", micros, fused=True),
        "fsdp2": lambda: Torch(plan(shape, micros, EACH), "fsdp2", micros),
        "core.each": lambda: Sley(plan(shape, micros, EACH)),
        "dp.bucketed, sockets": lambda: Sley(plan(shape, micros, BUCKETED, **SOCKETS)),
        "dp.bucketed": lambda: Sley(plan(shape, micros, BUCKETED)),
    }


def times(whole: bool, tokens: int, micros: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step on this rank; a rank's step ends with its own work, so rank 0 stands for both."""
    make = (step_contestants if whole else backward_contestants)(tokens, micros)
    torch.set_num_threads(1)
    made = {name: build() for name, build in make.items()}
    batches = [Sley(plan({**SHAPE, "sequence": tokens}, micros, EACH)).batch() for _ in range(1)]

    def one(contestant: Any) -> Callable[[], object]:
        call = contestant.step if whole else contestant.backward
        return lambda: call(batches[0])

    return interleave({name: one(each) for name, each in made.items()}, rounds, barrier=dist.barrier)


def memory(whole: bool, name: str, micros: int) -> float:
    """Peak of live tensor bytes in three steps of `name` alone, in MiB."""
    return peak_live_mb(lambda: _three_steps(whole, name, micros))


def resident(whole: bool, name: str, micros: int) -> float:
    """High-water RSS of three steps of `name` alone above the state after imports, in MiB."""
    return peak_resident_mb(lambda: _three_steps(whole, name, micros))


def _three_steps(whole: bool, name: str, micros: int) -> None:
    batch = {key: torch.zeros(micros, 64, dtype=torch.int64) for key in ("tokens", "labels")}
    contestant = (step_contestants if whole else backward_contestants)(64, micros)[name]()
    for _ in range(3):
        (contestant.step if whole else contestant.backward)(batch)


def late(rounds: int) -> dict[str, object]:
    """Measures how much of an injected latency `dp.bucketed` hides over gloo, whose reductions need no help to advance."""
    torch.set_num_threads(1)
    handlers = [{"use": "dp.bucketed", "bucket_mb": EQUAL_BUCKET_MB}]
    contestant = Sley(plan({**SHAPE, "sequence": 512}, 1, handlers, **SOCKETS), backward_only=True)
    batch = contestant.batch()
    transport: Any = contestant.run.groups["stage"].transport()
    plain, wire = transport.all_reduce, latency.Wire()

    def step(form: str) -> None:
        transport.all_reduce = wire.form(plain, form)
        contestant.step(batch)

    for form in latency.FORMS[:3]:
        step(form)
    seconds = latency.time_forms(step, rounds, dist.barrier)
    return latency.hidden(seconds, len(contestant.run.store.buffers))


def report_times(ranks: Ranks, whole: bool, tokens: int, micros: int, options: argparse.Namespace) -> None:
    targets = STEP_TARGET if whole else BACKWARD_TARGET
    seconds = ranks(times, whole, tokens, micros, options.rounds)[0]
    rows = compare(seconds, "ddp")
    noise = noise_of(rows, "ddp again")
    facts: dict[str, object] = {"noise": round(noise, 4)}
    if tokens in targets:
        facts[f"dp.bucketed <= {targets[tokens]}"] = rows[-1].meets(targets[tokens], noise)
    label = "whole step" if whole else "forward, backward, reduction"
    report(f"{label}, {tokens} tokens, k = {micros}, {RANKS} ranks", rows, facts, options.json)


def report_memory(ranks: Ranks, whole: bool, micros: int, options: argparse.Namespace) -> None:
    facts: dict[str, object] = {}
    for name in (step_contestants if whole else backward_contestants)(64, micros):
        live, rss = (ranks(measure, whole, name, micros)[0] for measure in (memory, resident))
        facts[f"{name}: live tensors, RSS above imports"] = (round(live), round(rss))
    label = "three whole steps" if whole else "three times forward, backward, reduction"
    title = f"peak MiB of {label}, 64 tokens, k = {micros} (target {MEMORY_TARGET} of ddp)"
    report(title, [], facts, options.json)


def main() -> None:
    known = parser(__doc__ or "", rounds=40)
    known.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="which parts to measure (all)")
    known.add_argument("--tokens", nargs="+", type=int, choices=TOKENS, default=TOKENS, help="per microbatch")
    known.add_argument("--micros", nargs="+", type=int, choices=MICROS, default=MICROS, help="microbatches per step")
    options = known.parse_args()
    ranks = Ranks(RANKS, timeout_s=3000)
    for part, whole in (("backward", False), ("step", True)):
        for tokens, micros in product(options.tokens, options.micros) if part in options.part else ():
            report_times(ranks, whole, tokens, micros, options)
    for whole, micros in product((False, True), options.micros) if "memory" in options.part else ():
        report_memory(ranks, whole, micros, options)
    if "latency" in options.part:
        facts = {**ranks(late, options.rounds)[0], "target": HIDDEN_TARGET}
        report(f"injected latency of {1e3 * latency.LATENCY_S:g} ms per bucket, 512 tokens", [], facts, options.json)


if __name__ == "__main__":
    main()
