"""Draws how far estimates were from what was measured, plan by plan, from what tests and benchmarks printed.

    python -m pytest -s -m campaign apps/train-cli/tests/test_estimated_bytes.py -k drawn | tee bytes.log
    python benchmarks/estimate_errors.py bytes bytes.log --out docs/estimate-bytes.svg

    python -m pytest -s -m campaign apps/train-cli/tests/test_estimated_seconds.py -k eight | tee seconds.log
    python benchmarks/estimate_seconds.py --rounds 3 --steps 5 | tee -a seconds.log
    python benchmarks/estimate_a100.py TABLE --each | tee -a seconds.log
    python -m pytest -s -m "gpu and alone" apps/train-cli/tests/test_estimates_on_gpu.py | tee -a seconds.log
    python benchmarks/estimate_errors.py seconds seconds.log --out docs/estimate-seconds.svg

Of bytes a plan counts with the rank that is farthest off. Prints of each group: plans, mean, median, 95 % and most, in percent.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

RANK = re.compile(r"([+-][\d.]+) of \d+ on rank (\d+) of (\d+), at ")
"""A line of the campaign of drawn plans."""

STEPS = {
    "layouts of 8 ranks that sleep": re.compile(r"estimated [\d.]+ s, took [\d.]+ s, ([+-][\d.]+)%"),
    "layouts of 2 ranks that compute": re.compile(r": +([+-][\d.]+)%, noise "),
    "layouts of up to 8 A100, of a public table": re.compile(r"predicted [\d.]+ s, ([+-][\d.]+)%"),
    "plans of one H200": re.compile(r"a step of [\d.]+ s \(([+-][\d.]+)%\)"),
}
"""What tells of a step, by where it was measured."""

LEAST = 1e-4
"""What is printed as 0: the campaign of bytes rounds to as much."""


def errors_of_bytes(text: str) -> dict[str, list[float]]:
    """Returns, for each number of ranks, how far each plan's worst rank was off, relative."""
    found: dict[int, list[float]] = defaultdict(list)
    far = 0.0
    for error, rank, world in RANK.findall(text):
        far = max(far, abs(float(error))) if rank != "0" else abs(float(error))
        if int(rank) == int(world) - 1:  # a plan of which a rank is missing was not compared
            found[int(world)].append(far)
    return {f"plans of {world} ranks" if world > 1 else "plans of 1 rank": found[world] for world in sorted(found)}


def errors_of_seconds(text: str) -> dict[str, list[float]]:
    """Returns, for each group of layouts, how far each one's step was off, relative."""
    return {name: [abs(float(error)) / 100 for error in line.findall(text)] for name, line in STEPS.items()}


def at(errors: Sequence[float], share: float) -> float:
    """Returns the error that `share` of the plans do not exceed."""
    return sorted(errors)[int(share * (len(errors) - 1))]


def drawn(groups: Mapping[str, Sequence[float]], xlabel: str, bounds: Sequence[float], xscale: str) -> Figure:
    """Returns the picture: of each group, the share of plans that are at most so far off. bounds: in percent, dotted lines."""
    mpl.rcParams["svg.hashsalt"] = "sley"
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, errors in groups.items():
        far = [100 * max(error, LEAST) for error in sorted(errors)]
        shares = [100 * (number + 1) / len(far) for number in range(len(far))]
        axes.step(far, shares, where="post", label=f"{len(far)} {name}")
    for bound in bounds:
        axes.axvline(bound, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale=xscale, xlabel=xlabel, ylabel="plans, in percent", ylim=(0, 102))
    axes.legend(loc="lower right")
    return figure


PICTURES = {
    "bytes": (errors_of_bytes, ("the peak is off by at most, in percent", (1, 3), "log")),
    "seconds": (errors_of_seconds, ("the step is off by at most, in percent", (5, 10), "linear")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PICTURES, nargs="?")
    parser.add_argument("logs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("errors.svg"), help="the picture (default errors.svg)")
    given = parser.parse_args()
    if not given.logs:
        print("no log is given, so there is nothing to draw")
        return
    errors_of, how = PICTURES[given.what]
    groups = errors_of("\n".join(log.read_text("utf-8", errors="replace") for log in given.logs))
    for name in [name for name, errors in groups.items() if not errors]:
        print(f"no line tells of {name}")
        del groups[name]
    for name, errors in groups.items():
        figures = (statistics.mean(errors), at(errors, 0.5), at(errors, 0.95), max(errors))
        told = " ".join(f"{100 * value:.2f}" for value in figures)
        print(f"{len(errors)} {name}: mean, median, 95 % and most in percent: {told}")
    drawn(groups, *how).savefig(given.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
