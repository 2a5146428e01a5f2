"""Who is named in a run so long that its ranks have made fewer windows of their older ones, each in its own moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from written_records import USUAL, replicas, stages

from sley_doctor.reports.work_file import FEWER_LINES, MOST_LINES, fewer
from sley_doctor.reports.work_record import Window, WorkRecord
from sley_doctor.slow.judge import growths, judge

LONG = 900
SLOW = {**USUAL, "B0": 0.1}


def lately() -> list[WorkRecord]:
    """The second rank has become slow over the last third."""
    quick, slow = replicas(USUAL, USUAL, num_windows=LONG), replicas(USUAL, SLOW, num_windows=LONG)
    since = LONG * 2 // 3
    return [
        replace(one, windows=[*one.windows[:since], *other.windows[since:]]) for one, other in zip(quick, slow, strict=True)
    ]


def growing(num_windows: int = LONG) -> list[WorkRecord]:
    """The memory of the second rank grows, by 600 MiB in all."""
    first, second = replicas(USUAL, USUAL, num_windows=num_windows)
    more = [replace(one, private_mb=300.0 + 600.0 * at / num_windows) for at, one in enumerate(second.windows)]
    return [first, replace(second, windows=more)]


def apart() -> list[WorkRecord]:
    """Messages between stages take long, and nobody is late."""
    return stages({"blocks.0": 0.02}, {"blocks.1": 0.02}, way_s=0.05, num_windows=LONG)


def shortened(records: Sequence[WorkRecord]) -> list[WorkRecord]:
    """The first rank shortened its file when it had 600 windows, and has written on; the second again and again."""
    first, second = records
    once = [*fewer(first.windows[:600], 320), *first.windows[600:]]
    often = list(second.windows[:100])
    for at in range(100, LONG, 100):
        often = fewer([*often, *second.windows[at : at + 100]], 150)
    return [replace(first, windows=once), replace(second, windows=often)]


@pytest.mark.parametrize(
    ("records", "kind"),
    [
        (lambda: replicas(USUAL, SLOW, num_windows=LONG), "work"),
        (lambda: replicas(USUAL, USUAL, num_windows=LONG), None),
        (lately, "work"),
        (growing, "memory"),
        (apart, "link"),
    ],
    ids=["slow", "nobody", "lately", "growing", "apart"],
)
def test_fewer_windows_name_whom_all_windows_name(records: Callable[[], list[WorkRecord]], kind: str | None) -> None:
    every = records()
    less = shortened(every)
    assert sum(len(one.windows) for one in less) < len(every) * LONG / 2
    wanted, found = (judge(some).causes for some in (every, less))
    assert [one.kind for one in wanted] == ([] if kind is None else [kind])
    assert [(one.kind, one.ranks, one.place, one.layer) for one in found] == [
        (one.kind, one.ranks, one.place, one.layer) for one in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=0.05)


def test_memory_that_grows_for_weeks_is_told_by_what_a_file_keeps() -> None:
    """Just before a file is shortened the last third of its windows has the fewest steps."""
    _, second = growing(MOST_LINES - 1 + 60 * (MOST_LINES - FEWER_LINES))
    kept: list[Window] = []
    for one in second.windows:
        kept.append(one)
        if 1 + len(kept) > MOST_LINES:
            kept = fewer(kept, FEWER_LINES - 1)
    assert MOST_LINES - 65 < len(kept) < MOST_LINES
    (found,) = growths([replace(second, windows=kept)])
    assert (found.rank, found.where) == (1, "host")
    assert found.megabytes == pytest.approx(600.0, rel=0.01)
