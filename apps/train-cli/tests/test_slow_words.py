"""What is read of records, and how the judgement of them is told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from written_records import USUAL, record, replicas, stages, window

from sley_doctor.reports.work_record import MOST_DETAILED, Queue, line, read
from sley_doctor.run_report.page import waiting
from sley_doctor.slow.blocks import MOST_BLOCKS, blocks_of
from sley_doctor.slow.judge import judge
from sley_doctor.slow.words import waits_of, work_in_words
from train_cli.run_folder import WORK


def test_whom_a_rank_waits_for_is_who_waits_least() -> None:
    """In an exchange of all, or in all, where others have no such queue: of what is read from this rank, it alone has one."""
    queues = {name: Queue("stage[0, 1, 2]", (0, 1, 2), None, 1.0, 1e5) for name in ("stage main", "stage main of 0")}
    waits = [{"stage main": 0.03, "stage main of 0": 0.02}, {"stage main": 0.04}, {"stage main": 0.001}]
    ranks = [
        record(rank, [window(n, USUAL, some, queues={name: queues[name] for name in some}) for n in range(6)], 3)
        for rank, some in enumerate(waits)
    ]
    blocks = judge(ranks).blocks
    told = [
        (0.03, "in `stage main` (sums of gradients) for rank 2"),
        (0.02, "in `stage main of 0` (sums of gradients) for rank 2"),
    ]
    assert waits_of(0, blocks)[:2] == told


def test_a_report_shows_who_waited_for_whom() -> None:
    figure = waiting("small", replicas(USUAL, {**USUAL, "B0": 0.1}))
    assert "rank 1 makes others wait: its backward of chunk 0 (B0) takes 60 ms longer" in figure.told[0]
    slow, victim = figure.rows
    assert (slow.rank, victim.rank) == (1, 0)
    assert list(slow.work) == pytest.approx([0.0001, 0.02, 0.1, 0.0, 0.005, 0.0])
    assert victim.waiting_s == pytest.approx(0.062)
    assert victim.waits == ["62 ms in `stage main` (sums of gradients) for rank 1"]


def test_each_rank_has_a_line_with_figures() -> None:
    lines = list(work_in_words(judge(replicas(USUAL, {**USUAL, "F0": 0.1}))))
    assert lines[0] == (
        "rank 0 (stage 0): works 65.1 ms of a step (B0 40 ms, F0 20 ms, update 5 ms), "
        "waits 82 ms in `stage main` (sums of gradients) for rank 1"
    )
    assert len(lines) == 2


def test_a_record_is_read_as_it_was_written_and_damage_is_left_out(tmp_path: Path) -> None:
    (written,) = replicas(USUAL, num_windows=2)
    folder = tmp_path / WORK
    folder.mkdir()
    lines = [line(written.start), *map(line, written.windows), '{"first": 21, "la', "\n", "[1]\n"]
    (folder / "rank-0.jsonl").write_text("".join(lines), "utf-8")
    assert read(tmp_path) == [written]
    again = replace(written.start, pid=2)
    with (folder / "rank-0.jsonl").open("a") as file:
        file.write(line(again) + line(written.windows[1]))
    (found,) = read(tmp_path)
    assert (found.start.pid, found.windows) == (2, [written.windows[1]])
    with (folder / "rank-0.jsonl").open("a") as file:
        file.write(line(written.windows[0]))
    (found,) = read(tmp_path)
    assert found.windows == [written.windows[0]], "a run that was brought back takes steps again"


def test_records_of_ranks_that_a_later_start_does_not_have_are_left_out(tmp_path: Path) -> None:
    """A run of four ranks is resumed with two, and then with three."""
    folder = tmp_path / WORK
    folder.mkdir()

    def begin(number: int, world: int) -> None:
        for rank, one in enumerate(replicas(*[USUAL] * world)):
            start = replace(one.start, time=1e4 * number, pid=number)
            with (folder / f"rank-{rank}.jsonl").open("a") as file:
                file.write(line(start) + "".join(map(line, one.windows)))

    for number, world in enumerate((4, 2, 3)):
        begin(number, world)
        assert [(one.start.rank, one.start.pid) for one in read(tmp_path)] == [(rank, number) for rank in range(world)]
        assert judge(read(tmp_path)).why_not == ""


@pytest.mark.parametrize(
    ("way_s", "slow_s", "kind"), [(0.0, 0.06, "work"), (0.05, 0.01, "link")], ids=["a slow layer", "a slow link"]
)
def test_of_a_long_run_the_details_of_some_windows_are_enough(way_s: float, slow_s: float, kind: str, tmp_path: Path) -> None:
    """Windows of ranks end at other steps: those of rank 1 are twice as long from the middle on."""
    works = {"blocks.0": 0.01, "blocks.1": slow_s}, {"blocks.2": 0.01, "blocks.3": 0.01}
    ranks = stages(*works, way_s=way_s, num_windows=1000)
    others = ranks[1].windows[501:]
    joined = [
        replace(one, last=two.last, taken={name: [*some, *two.taken[name]] for name, some in one.taken.items()})
        for one, two in zip(others[::2], others[1::2], strict=False)
    ]
    (tmp_path / WORK).mkdir()
    for one in [ranks[0], replace(ranks[1], windows=[*ranks[1].windows[:501], *joined])]:
        text = line(one.start) + "".join(map(line, one.windows))
        (tmp_path / WORK / f"rank-{one.start.rank}.jsonl").write_text(text, "utf-8")
    found = read(tmp_path)
    assert [len(one.windows) for one in found] == [1000, 501 + len(joined)]
    for one in found:
        detailed = [window for window in one.windows if window.layers or window.sent or window.taken]
        assert 100 < len(detailed) <= 2 * MOST_DETAILED
    (cause,) = judge(found).causes
    assert (cause.kind, cause.layer) == (kind, "blocks.1" if kind == "work" else "")


def test_blocks_are_the_steps_that_all_ranks_have() -> None:
    one, other = replicas(USUAL, USUAL)
    coarse = [replace(other.windows[0], last=30), replace(other.windows[0], first=31, last=50)]
    blocks = blocks_of([one, replace(other, windows=coarse)])
    assert [(block.first, block.last) for block in blocks] == [(1, 30), (31, 50)]
    assert blocks[0].ranks[0].work["F0"].middle == pytest.approx(0.02)


def test_a_long_run_has_no_more_blocks_than_can_be_looked_at() -> None:
    blocks = blocks_of(replicas(USUAL, USUAL, num_windows=500))
    assert len(blocks) <= MOST_BLOCKS
    assert (blocks[0].first, blocks[-1].last) == (1, 5000)
    assert all(one.last + 1 == other.first for one, other in pairwise(blocks))


def test_what_cannot_be_told_is_said() -> None:
    assert judge([]).why_not == "no rank has recorded a step"
    ranks = replicas(USUAL, {**USUAL, "F0": 0.5})
    nothing = "rank 1 has recorded nothing: it was stopped before the end of its first window, its disk was full, or it is on a"
    assert judge(ranks[:1]).why_not == f"{nothing} host that does not share the run's folder"
    again = [ranks[0], replace(ranks[1], start=replace(ranks[1].start, time=1e4))]
    assert judge(again).why_not == "rank 0 has recorded nothing since the run was started again"
    short = [replace(one, windows=[replace(one.windows[0], last=4)]) for one in ranks]
    assert judge(short).why_not == "4 steps are too few to tell, 8 are needed"
