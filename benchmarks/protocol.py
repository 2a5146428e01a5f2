"""How everything here is measured: interleaved, shuffled, compared by medians, with the noise beside.

Contestants take one step each per round, in an order that is shuffled for every round (alike on all ranks), so that a
machine that slows down slows all of them. A contestant that stands in the list twice gives the noise: the half width of
its interval against itself.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESAMPLES = 2000
"""Bootstrap resamples of a ratio of medians."""

Step = Callable[[], object]


def interleave(
    contestants: Mapping[str, Step], rounds: int, *, warmup: int = 3, seed: int = 0, barrier: Step = lambda: None
) -> dict[str, list[float]]:
    """Seconds of every step, per contestant: `rounds` of them after `warmup`; `barrier` runs before each, untimed."""
    chance = random.Random(seed)
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        chance.shuffle(names)
        for name in names:
            barrier()
            began = time.perf_counter()
            contestants[name]()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def slowest(seconds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Of every rank's `seconds`, each step's of the rank that took longest: a step is over when all ranks are done.

    Contestants that wait for one another within a step take that long on every rank; one that does not is not spared it.
    """
    return {name: [max(step) for step in zip(*(rank[name] for rank in seconds), strict=True)] for name in seconds[0]}


@dataclass(frozen=True)
class Ratio:
    """Median of `name` over median of `base`, with its 95 % bootstrap interval; milliseconds are medians."""

    name: str
    base: str
    ratio: float
    low: float
    high: float
    milliseconds: float

    def meets(self, target: float, noise: float) -> bool:
        """Whether the interval's upper end is at most `target`, give or take the noise."""
        return self.high <= target + noise

    def __str__(self) -> str:
        return (
            f"{self.name:<28} {self.milliseconds:9.2f} ms   {self.ratio:6.3f} x {self.base}   [{self.low:.3f}, {self.high:.3f}]"
        )


def compare(seconds: Mapping[str, Sequence[float]], base: str, *, seed: int = 0) -> list[Ratio]:
    """Every contestant against `base`; rounds are resampled together, since they were run together."""
    chance = random.Random(seed)
    num_rounds = len(seconds[base])
    picks = [[chance.randrange(num_rounds) for _ in range(num_rounds)] for _ in range(RESAMPLES)]
    base_medians = [statistics.median(seconds[base][i] for i in pick) for pick in picks]
    rows = []
    for name, values in seconds.items():
        ratios = sorted(
            statistics.median(values[i] for i in pick) / median for pick, median in zip(picks, base_medians, strict=True)
        )
        low, high = ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES) - 1]
        middle = statistics.median(values)
        rows.append(Ratio(name, base, middle / statistics.median(seconds[base]), low, high, 1e3 * middle))
    return rows


def noise_of(rows: Sequence[Ratio], again: str) -> float:
    """Half the width of the interval of a contestant that is its own base under another name."""
    row = next(row for row in rows if row.name == again)
    return (row.high - row.low) / 2


def report(title: str, rows: Sequence[Ratio], facts: Mapping[str, object], path: Path | None) -> None:
    """Prints the table; with `path`, also writes it as JSON with the machine's facts."""
    print(f"\n{title}")
    for row in rows:
        print("  ", row)
    for name, value in facts.items():
        print(f"   {name}: {value}")
    if path is not None:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "cpus": torch.get_num_threads()}
        entry = {"title": title, "rows": [asdict(row) for row in rows], "facts": dict(facts), "machine": machine}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--rounds", type=int, default=rounds, help=f"steps per contestant (default {rounds})")
    found.add_argument("--json", type=Path, default=None, help="append the tables to this file, one object per line")
    return found


def arguments(description: str, rounds: int) -> argparse.Namespace:
    """Those options, read."""
    return parser(description, rounds).parse_args()
