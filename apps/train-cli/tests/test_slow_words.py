"""What is read of records, and how the judgement of them is told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from written_records import USUAL, record, replicas, window

from sley_doctor.reports.work_record import Queue, line, read
from sley_doctor.slow.blocks import MOST_BLOCKS, blocks_of
from sley_doctor.slow.judge import judge
from sley_doctor.slow.words import waits_of
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
