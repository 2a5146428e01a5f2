"""What it costs to hold less: `dp.sharded`, an optimizer on the host, states away between steps, a run that leaves.

Targets: `dp.sharded` / `dp.bucketed` <= 1.00; the host arena <= 1.02 of what is parked; of a plain copy of the same bytes to
and from page-locked memory, offload and onload reach >= 0.95; on CUDA, >= 0.99 of the memory is given back, and a step
with `between_steps` takes <= 1.10 of one without.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from contestants import Sley, Torch, plan
from protocol import Ratio, compare, interleave, noise_of, parser, report
from sley_core.comm.device import HostMemory
from sley_testing.live_bytes import Figure, note_figure
from sley_testing.ranks import Ranks
from sley_trainer.run import Run

SHAPE = {"layers": 8, "hidden": 384, "heads": 6, "sequence": 64}
LARGE = {"layers": 12, "hidden": 2048, "heads": 16, "sequence": 512}
"""For CUDA, where 384 columns would leave the device idle."""

LONG = {"layers": 6, "hidden": 1536, "heads": 12, "sequence": 1024}
TOKENS = {"global_size": 256, "micro_size": 16}
"""For whole steps on CUDA: 262,144 tokens each, as runs there have. What states cost that come and go does not depend on the
tokens, so with few of them a step would be little else.
"""

SHARDED_TARGET = 1.00
ARENA_TARGET = 1.02
COPY_TARGET = 0.95
GIVEN_BACK_TARGET = 0.99
BETWEEN_TARGET = 1.10

PARTS = ("sharded", "host", "park", "between")
BUCKETED = [{"use": "dp.bucketed"}]
WAIT_S = 3000

Contestants = dict[str, Callable[[], Any]]


def sharded_contestants(device: str, shape: dict[str, int]) -> Contestants:
    def tables(handlers: list[dict[str, Any]]) -> dict[str, Any]:
        return plan(shape, 1, handlers, device=device)

    return {
        "dp.bucketed": lambda: Sley(tables(BUCKETED)),
        "dp.bucketed again": lambda: Sley(tables(BUCKETED)),
        "dp.sharded": lambda: Sley(tables([{"use": "dp.sharded"}])),
        "ddp, fused AdamW": lambda: Torch(tables(BUCKETED), "ddp", 1, fused=True),
        "ddp + ZeroRedundancyOptimizer": lambda: Torch(tables(BUCKETED), "ddp-zero", 1, fused=True),
        "fsdp2, fused AdamW": lambda: Torch(tables(BUCKETED), "fsdp2", 1, fused=True),
    }


def host_contestants(device: str, shape: dict[str, int]) -> Contestants:
    """With two ranks weights are cut, as FSDP2 cuts them; alone they are not."""
    cut = {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}} if dist.get_world_size() == 2 else {}

    def tables(*managers: str) -> dict[str, Any]:
        return plan(shape, 1, None, device=device, offload=[{"use": name} for name in managers], **cut)

    def fsdp2(kind: str) -> Torch:
        return Torch(plan(shape, 1, None, device=device), kind, 1, fused=True)

    return {
        "fsdp2 on the host": lambda: fsdp2("fsdp2-host"),
        "fsdp2 on the host again": lambda: fsdp2("fsdp2-host"),
        "fsdp2": lambda: fsdp2("fsdp2"),
        "Sley": lambda: Sley(tables()),
        "memory.host_optimizer": lambda: Sley(tables("memory.host_optimizer")),
    }


def between_contestants(device: str, shape: dict[str, int]) -> Contestants:
    between = [{"use": "memory.optimizer_states", "when": "between_steps"}]
    whole = {"batch": TOKENS, "precision": {"compute": "bf16"}} if device == "cuda" else {}
    shape = LONG if device == "cuda" else shape

    def tables(**more: Any) -> dict[str, Any]:
        return plan(shape, 1, None, device=device, **whole, **more)

    return {
        "states stay": lambda: Sley(tables()),
        "states stay again": lambda: Sley(tables()),
        "states away between steps": lambda: Sley(tables(offload=between)),
    }


CONTESTANTS = {"sharded": sharded_contestants, "host": host_contestants, "between": between_contestants}


def times(part: str, device: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each step on this rank, and the MiB of optimizer states and masters that each run of Sley holds on it."""
    torch.set_num_threads(1)
    shape = LARGE if device == "cuda" else SHAPE
    made = {name: build() for name, build in CONTESTANTS[part](device, shape).items()}
    batch = next(one for one in made.values() if isinstance(one, Sley)).batch()

    def one(contestant: Any) -> Callable[[], object]:
        def step() -> None:
            contestant.step(batch)
            if device == "cuda":
                torch.cuda.synchronize()

        return step

    seconds = interleave({name: one(each) for name, each in made.items()}, rounds, barrier=dist.barrier)
    return seconds, {name: _states_mib(each) for name, each in made.items()}


def _states_mib(contestant: Sley | Torch) -> float:
    if isinstance(contestant, Sley):
        held = contestant.run.memory.bytes
        return (held["optimizer_states"] + held["masters"]) / 2**20
    optimizer = getattr(contestant.optimizer, "optim", contestant.optimizer)
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return float(sum(getattr(value, "_local_tensor", value).nbytes for value in tensors) / 2**20)


def park(device: str, rounds: int) -> dict[str, Any]:
    """Seconds of offload and onload of a whole run, and of plain copies of the same bytes, in turns."""
    torch.set_num_threads(1)
    shape = LARGE if device == "cuda" else {**SHAPE, "hidden": 768, "heads": 12}
    before = _host_kib("Rss")
    made = Sley(plan(shape, 1, None, device=device, offload=[{"use": "memory.everything"}]))
    run, batch = made.run, made.batch()
    run.step(batch)
    parked = sum(run.memory.bytes[part] for part in ("weights", "masters", "optimizer_states"))
    source = torch.zeros(parked, dtype=torch.uint8, device=device)
    host = HostMemory(parked, lock=device == "cuda")  # page-locked as long as it is referred to
    target = host.data
    target.fill_(1)
    seconds: dict[str, list[float]] = {name: [] for name in ("plain out", "plain in", "offload", "onload", "driver")}
    for number in range(rounds + 2):
        run.step(batch)
        moves: dict[str, Callable[[], object]] = {
            "plain out": lambda: target.copy_(source, non_blocking=True),
            "plain in": lambda: source.copy_(target, non_blocking=True),
            "offload": lambda: run.memory.offload("weights", "masters", "optimizer_states").wait(),
            "onload": lambda: run.memory.onload("weights", "masters", "optimizer_states").wait(),
        }
        for name, move in moves.items():
            _settle(device)
            with _without_the_driver() as driver_s:
                began = time.perf_counter()
                move()
                _settle(device)
                taken_s = time.perf_counter() - began
            if number >= 2:
                seconds[name].append(taken_s - driver_s[0])
                if name == "offload":
                    seconds["driver"].append(driver_s[0])
    arena = sum(moved.host_bytes for moved in run.memory.report.values())
    found: dict[str, Any] = {name: statistics.median(values) for name, values in seconds.items()}
    found |= {"parked": parked, "arena": arena, "by smaps": _arena_bytes(), "rss before": before}
    if device == "cuda":
        found["given back"] = _given_back(run)
    return found


@contextmanager
def _without_the_driver() -> Iterator[list[float]]:
    """Yields a list of one number: the seconds in which the driver takes back what torch's allocator keeps. That waits for all
    copies, so it is told apart from them.
    """
    found, give = [0.0], torch.cuda.empty_cache

    def timed() -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        give()
        found[0] += time.perf_counter() - began

    with patch.object(torch.cuda, "empty_cache", timed):
        yield found


def _given_back(run: Run) -> float:
    """Returns which part of the device memory that a run has allocated an offload of everything gives back."""
    torch.cuda.synchronize()
    there = torch.cuda.memory_allocated()
    held = sum(run.memory.bytes.values())
    run.memory.offload().wait()
    torch.cuda.synchronize()
    given = there - torch.cuda.memory_allocated()
    run.memory.onload().wait()
    return given / held


def _arena_bytes() -> int:
    """Resident bytes of this process's anonymous mappings that are shared with nobody's file: those of `mmap(-1, ...)`."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            counts = line.endswith("/dev/zero (deleted)")
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def _host_kib(key: str) -> int:
    lines: Iterator[str] = iter(Path("/proc/self/smaps_rollup").read_text().splitlines())
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def report_times(part: str, size: int, options: argparse.Namespace) -> None:
    seconds, held = Ranks(size, timeout_s=WAIT_S)(times, part, options.device, options.rounds)[0]
    rows = compare(seconds, next(iter(seconds)))
    noise = noise_of(rows, rows[1].name)
    facts: dict[str, object] = {"noise": round(noise, 4)}
    facts |= {f"{name}: MiB of states and masters": round(mib, 2) for name, mib in held.items()}
    facts |= _verdict(part, rows, noise)
    report(f"{part}: whole steps, {size} rank{'s' * (size > 1)}, {options.device}", rows, facts, options.json)


def _verdict(part: str, rows: list[Ratio], noise: float) -> dict[str, object]:
    if part == "sharded":
        return {f"dp.sharded <= {SHARDED_TARGET}": rows[2].meets(SHARDED_TARGET, noise)}
    if part == "between":
        is_met = rows[2].meets(BETWEEN_TARGET, noise)
        found = f"{rows[2].ratio:.3f} [{rows[2].low:.3f}, {rows[2].high:.3f}], noise {noise:.3f}"
        note_figure(Figure("a step with states away between steps, beside one without", found, f"<= {BETWEEN_TARGET}", is_met))
        return {f"states away <= {BETWEEN_TARGET}": is_met}
    return {}


def report_park(options: argparse.Namespace) -> None:
    found = Ranks(1, timeout_s=WAIT_S)(park, options.device, options.rounds)[0]
    parked = found["parked"]
    facts: dict[str, object] = {"MiB parked": round(parked / 2**20, 1)}
    for name in ("plain out", "plain in", "offload", "onload"):
        facts[f"{name}: ms, GB/s"] = (round(1e3 * found[name], 1), round(parked / found[name] / 1e9, 2))
    ratios = {ours: found[plain] / found[ours] for plain, ours in (("plain out", "offload"), ("plain in", "onload"))}
    facts[f"offload, onload / plain (>= {COPY_TARGET})"] = tuple(round(ratio, 3) for ratio in ratios.values())
    for name, ratio in ratios.items():
        rate = f"{ratio:.3f} at {parked / found[name] / 1e9:.1f} GB/s"
        note_figure(
            Figure(f"{name} of a run, its copies, beside a plain copy", rate, f">= {COPY_TARGET}", ratio >= COPY_TARGET)
        )
    if found["driver"]:
        whole = found["plain out"] / (found["offload"] + found["driver"])
        note_figure(Figure("the same offload with what the driver takes", f"{whole:.3f}, {1e3 * found['driver']:.1f} ms of it"))
    facts[f"host arena / parked (<= {ARENA_TARGET}), also by smaps less the plain copy's"] = (
        round(found["arena"] / parked, 4),
        round((found["by smaps"] - parked) / parked, 4),
    )
    facts["given to the driver: ms"] = round(1e3 * found["driver"], 1)
    if "given back" in found:
        given = found["given back"]
        facts[f"device memory given back (>= {GIVEN_BACK_TARGET})"] = round(given, 4)
        note_figure(Figure("device memory given back", f"{given:.4f}", f">= {GIVEN_BACK_TARGET}", given >= GIVEN_BACK_TARGET))
    report(f"park: a run that leaves and comes back, {options.device}", [], facts, options.json)


def main() -> None:
    known = parser(__doc__ or "", rounds=30)
    known.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="which parts to measure (all)")
    known.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (cpu)")
    options = known.parse_args()
    if "sharded" in options.part and options.device == "cpu":
        report_times("sharded", 2, options)
    for size in (1, 2) if "host" in options.part else ():
        if size == 1 or options.device == "cpu":
            report_times("host", size, options)
    if "between" in options.part:
        report_times("between", 1, options)
    if "park" in options.part:
        report_park(options)


if __name__ == "__main__":
    main()
