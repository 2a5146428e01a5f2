"""Shows drawn cases again: `python replay.py 17 18`, or a range, `python replay.py 0:200`; -q prints no case that is right."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "own"))

from drawn_batches import judge, valid
from drawn_cases import describe

from sley_testing.ranks import Ranks


def main(arguments: list[str]) -> int:
    quiet = "-q" in arguments
    seeds: list[int] = []
    for one in arguments:
        if one != "-q":
            first, _, last = one.partition(":")
            seeds += range(int(first), int(last)) if last else [int(first)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cases = sorted((valid(seed, Path(folder)) for seed in seeds), key=lambda case: case.world)
        verdicts = {}
        for _, same in groupby(cases, key=lambda case: case.world):
            verdicts |= judge(Ranks, list(same), Path(folder))
    for case in cases:
        verdict = verdicts[case.seed]
        if not quiet or verdict.how == "wrong":
            print(describe(case))
            print(f"  => {verdict.how} {verdict.why}\n")
    counts = Counter(f"{one.how} {one.why}".strip() if one.how == "refused" else one.how for one in verdicts.values())
    print(f"{dict(counts)} in {time.monotonic() - start:.0f} s")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
