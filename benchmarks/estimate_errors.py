"""Draws how far estimated peaks were from counted ones, plan by plan, from what the campaign of drawn plans printed.

python -m pytest -s -m campaign apps/train-cli/tests/test_estimated_bytes.py -k drawn | tee campaign.log
python benchmarks/estimate_bytes.py campaign.log --out docs/estimate-bytes.svg

A plan counts with the rank that is farthest off. Prints, for each number of ranks: plans, median, 95 % and most, in percent.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

LINE = re.compile(r"([+-][\d.]+) of \d+ on rank (\d+) of (\d+), at ")
LEAST = 1e-4
"""What is printed as 0: the campaign rounds to as much."""


def worst_by_world(texts: Iterable[str]) -> dict[int, list[float]]:
    """Returns, for each number of ranks, how far each plan's worst rank was off, relative, in ascending order."""
    found: dict[int, list[float]] = defaultdict(list)
    for text in texts:
        far = 0.0
        for error, rank, world in LINE.findall(text):
            far = max(far, abs(float(error))) if rank != "0" else abs(float(error))
            if int(rank) == int(world) - 1:  # a plan of which a rank is missing was not compared
                found[int(world)].append(far)
    return {world: sorted(errors) for world, errors in sorted(found.items())}


def at(errors: Sequence[float], share: float) -> float:
    """Returns the error that `share` of the plans do not exceed."""
    return errors[int(share * (len(errors) - 1))]


def drawn(by_world: Mapping[int, Sequence[float]]) -> Figure:
    """Returns the picture: of each number of ranks, the share of plans that are at most so far off."""
    mpl.rcParams["svg.hashsalt"] = "sley"
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.subplots()
    for world, errors in by_world.items():
        far = [100 * max(error, LEAST) for error in errors]
        shares = [100 * (number + 1) / len(far) for number in range(len(far))]
        axes.step(
            far,
            shares,
            where="post",
            label=f"{world} ranks, {len(far)} plans" if world > 1 else f"1 rank, {len(far)} plans",
        )
    for bound in (1, 3):
        axes.axvline(bound, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="the peak is off by at most, in percent", ylabel="plans, in percent", ylim=(0, 102))
    axes.legend(loc="lower right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    by_world = worst_by_world(log.read_text("utf-8", errors="replace") for log in given.logs)
    for world, errors in by_world.items():
        figures = " ".join(f"{100 * value:.2f}" for value in (at(errors, 0.5), at(errors, 0.95), errors[-1]))
        print(f"{world} ranks: {len(errors)} plans, median, 95 % and most in percent: {figures}")
    drawn(by_world).savefig(given.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
