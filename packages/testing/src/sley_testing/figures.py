"""Collects figures that tests and benchmarks measure, each beside its target: noted where they come up, and
told in one table.

    SLEY_FIGURES=figures.jsonl pytest -m gpu --junitxml tests.xml          # tests and benchmarks call `note`
    python -m sley_testing.figures figures.jsonl --tests tests.xml    # prints the table; exit code 1 if a target is missed

Since core 0.2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

PLACE = "SLEY_FIGURES"
"""The environment variable that names the file into which figures are noted; without it, nothing is."""

WORDS = {True: "met", False: "NOT MET", None: "-"}


class Figure(NamedTuple):
    """One row of the table. what: of which the figure is. found: the figure, with its unit. target: "" where there is none;
    is_met: None then.
    """

    what: str
    found: str
    target: str = ""
    is_met: bool | None = None


def note(figure: Figure) -> None:
    """Adds `figure` to the file that the environment names, if it names one."""
    if place := os.environ.get(PLACE):
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(json.dumps(figure) + "\n")


def noted(path: Path) -> list[Figure]:
    """Returns the figures in a file, in the order in which they came; none where there is no file."""
    if not path.exists():
        return []
    return [Figure(*json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def outcome(report: Path) -> list[Figure]:
    """Returns how the tests of a report of pytest (`--junitxml`) went: all of them in one row, then each that failed."""
    if not report.exists():
        return [Figure("tests", "no report", "a report", is_met=False)]
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    found = f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped"
    rows = [Figure("tests", found, "some, and none fails", is_met=passed > 0 and not failed)]
    return rows + [Figure(f"test {case.get('name')}", "failed", "passes", is_met=False) for case in failed]


def table(figures: Iterable[Figure]) -> str:
    """Returns the figures in columns, one row each: what, found, target, whether it is met."""
    rows = [("figure", "found", "target", "")]
    rows += [(one.what, one.found, one.target, WORDS[one.is_met]) for one in figures]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def main(arguments: Sequence[str]) -> int:
    """Prints the table of a file of figures; returns 1 if a target is missed, or there is no figure."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("figures", type=Path, help="the file into which they were noted")
    parser.add_argument("--tests", type=Path, nargs="*", default=[], help="reports of pytest, by --junitxml")
    parser.add_argument("--expect", nargs="*", default=[], help="words that figures begin with: not met where none does")
    options = parser.parse_args(arguments)
    found = [*(row for report in options.tests for row in outcome(report)), *noted(options.figures)]
    missing = [one for one in options.expect if not any(figure.what.startswith(one) for figure in found)]
    found += [Figure(one, "not measured", "a figure", is_met=False) for one in missing]
    print(table(found))
    return 0 if found and all(one.is_met is not False for one in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
