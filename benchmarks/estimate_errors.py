"""Draws the errors of estimates, plan by plan, from the output of tests and benchmarks.

    python -m pytest -s -m campaign apps/train-cli/tests/test_estimated_bytes.py -k drawn | tee bytes.log
    python benchmarks/estimate_errors.py bytes bytes.log --out docs/estimate-bytes.svg

    python -m pytest -s -m campaign apps/train-cli/tests/test_estimated_seconds.py -k eight | tee seconds.log
    python benchmarks/estimate_seconds.py --rounds 3 --steps 5 | tee -a seconds.log
    python benchmarks/estimate_a100.py TABLE --each | tee -a seconds.log
    python -m pytest -s -m "gpu and alone" apps/train-cli/tests/test_estimates_on_gpu.py | tee -a seconds.log
    python benchmarks/estimate_errors.py seconds seconds.log --out docs/estimate-seconds.svg

The error of a plan's bytes is that of its worst rank. Prints for each group the number of plans, and the mean, median, 95 %
quantile and maximum of their errors in percent.
"""

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
"""Patterns of a line with the error of a step in percent, by group."""

MIN_ERROR = 1e-4
"""The smallest error in a drawing with a logarithmic axis; the campaign of bytes prints smaller ones as 0."""


def read_byte_errors(text: str) -> dict[str, list[float]]:
    """Returns the absolute relative error of each plan's worst rank, by group. A group has one number of ranks."""
    errors: dict[int, list[float]] = defaultdict(list)
    largest = 0.0
    for error, rank, world in RANK.findall(text):
        largest = max(largest, abs(float(error))) if rank != "0" else abs(float(error))
        if int(rank) == int(world) - 1:  # a plan without a line of its last rank is incomplete
            errors[int(world)].append(largest)
    return {f"plans of {world} ranks" if world > 1 else "plans of 1 rank": errors[world] for world in sorted(errors)}


def read_second_errors(text: str) -> dict[str, list[float]]:
    """Returns the absolute relative error of each layout's step, by group."""
    return {name: [abs(float(error)) / 100 for error in line.findall(text)] for name, line in STEPS.items()}


def quantile(errors: Sequence[float], share: float) -> float:
    """Returns the error that `share` of the plans do not exceed."""
    return sorted(errors)[int(share * (len(errors) - 1))]


def draw_errors(groups: Mapping[str, Sequence[float]], xlabel: str, bounds: Sequence[float], xscale: str) -> Figure:
    """Returns a figure with the cumulative distribution of each group's errors. bounds: errors in percent with dotted lines."""
    mpl.rcParams["svg.hashsalt"] = "sley"
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, errors in groups.items():
        percentages = [100 * max(error, MIN_ERROR) for error in sorted(errors)]
        shares = [100 * (number + 1) / len(errors) for number in range(len(errors))]
        axes.step(percentages, shares, where="post", label=f"{len(errors)} {name}")
    for bound in bounds:
        axes.axvline(bound, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale=xscale, xlabel=xlabel, ylabel="plans, in percent", ylim=(0, 102))
    axes.legend(loc="lower right")
    return figure


PICTURES = {
    "bytes": (read_byte_errors, ("the peak is off by at most, in percent", (1, 3), "log")),
    "seconds": (read_second_errors, ("the step is off by at most, in percent", (5, 10), "linear")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantity", choices=PICTURES, nargs="?")
    parser.add_argument("logs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("errors.svg"), help="the picture (default errors.svg)")
    options = parser.parse_args()
    if not options.logs:
        print("there is nothing to draw without a log")
        return
    read_errors, axes = PICTURES[options.quantity]
    groups = read_errors("\n".join(log.read_text("utf-8", errors="replace") for log in options.logs))
    for name in [name for name, errors in groups.items() if not errors]:
        print(f"no line has an error of {name}")
        del groups[name]
    for name, errors in groups.items():
        figures = (statistics.mean(errors), quantile(errors, 0.5), quantile(errors, 0.95), max(errors))
        text = " ".join(f"{100 * value:.2f}" for value in figures)
        print(f"{len(errors)} {name}: mean, median, 95 % and maximum in percent: {text}")
    draw_errors(groups, *axes).savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
