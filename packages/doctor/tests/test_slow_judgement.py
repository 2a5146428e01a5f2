"""Tests which rank a judgement names for written records: the rank that works longer, never one that waits. Also tests their
files, with failures of the file system and damaged lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sley_doctor.commands import doctor
from sley_doctor.slow_ranks import (
    MAX_BLOCKS,
    Cause,
    build_blocks,
    describe_cause,
    describe_no_cause,
    describe_work,
    find_remedy,
    judge,
)
from sley_doctor.verdict import RunState, describe_state
from sley_doctor.work_record import FORMAT, Location, Spread, Start, Window, WorkFile, WorkRecord, format_line, read_records
from train_cli.run_folder import WORK


def spread(seconds: float, width: float = 0.1) -> Spread:
    return Spread(seconds * (1 - width), seconds, seconds * (1 + width))


def window(number: int, work: Mapping[str, float], wait_s: float) -> Window:
    """Returns a window of ten steps, from step `10 * number + 1`."""
    return Window(
        first=10 * number + 1,
        last=10 * number + 10,
        time=float(number),
        seconds=spread(sum(work.values()) + wait_s),
        work={location: spread(seconds) for location, seconds in work.items()},
        waits=spread(wait_s),
    )


def records(*works: Mapping[str, float], stages: Sequence[int] = (), num_windows: int = 6, **start: Any) -> list[WorkRecord]:
    """Returns records of ranks that do `works` in every step and wait for the slowest rank. stages: by rank; 0 by default."""
    step_s = max(sum(work.values()) for work in works) + 0.002
    stages = stages or [0] * len(works)
    return [
        WorkRecord(
            Start(rank, len(works), stages[rank], "here", 1, start.get("device", "cpu"), 0.0),
            [window(number, work, step_s - sum(work.values())) for number in range(num_windows)],
        )
        for rank, work in enumerate(works)
    ]


USUAL = {Location.DATA: 0.0001, "F0": 0.02, "B0": 0.04, Location.UPDATE: 0.005}


def only_cause(records: Sequence[WorkRecord]) -> Cause:
    """Judges the records and returns the only cause."""
    (cause,) = judge(records).causes
    return cause


@pytest.mark.parametrize("location", [Location.DATA, "F0", "B0", Location.UPDATE])
@pytest.mark.parametrize("slow", [0, 2])
def test_the_rank_that_works_longer_is_named_with_its_location(location: str, slow: int) -> None:
    works = [{**USUAL, location: USUAL[location] + 0.06 * (rank == slow)} for rank in range(3)]
    cause = only_cause(records(*works))
    assert (cause.kind, cause.ranks, cause.location) == ("work", (slow,), location)
    assert cause.seconds == pytest.approx(0.06)
    assert cause.usual_s == pytest.approx(USUAL[location])
    assert f"rank {slow} makes other ranks wait" in describe_cause(cause)
    assert "takes 60 ms longer than that of other ranks (" in describe_cause(cause)
    assert find_remedy(cause)


@pytest.mark.parametrize("excess_s", [0.0, 0.01, 0.02])
def test_less_than_a_quarter_of_a_step_names_nobody(excess_s: float) -> None:
    judgement = judge(records(USUAL, {**USUAL, "F0": 0.02 + excess_s}))
    assert not judgement.causes
    assert describe_no_cause(judgement).startswith("none: in steps 11 to 60 no rank worked 25% of a step longer than its peers")


def test_work_that_nobody_waits_for_or_that_varies_as_much_as_ranks_differ_is_no_cause() -> None:
    fast, slow = records(USUAL, {**USUAL, "B0": 0.1})
    free = [replace(window, waits=spread(0.001)) for window in fast.windows]
    assert not judge([replace(fast, windows=free), slow]).causes
    first, second = records(USUAL, {**USUAL, "B0": 0.08})
    varying = [replace(window, work={**window.work, "B0": Spread(0.03, 0.08, 0.2)}) for window in second.windows]
    assert not judge([first, replace(second, windows=varying)]).causes


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    first, second = records(USUAL, {**USUAL, "B0": 0.1}, num_windows=9)
    usual = records(USUAL, USUAL, num_windows=9)[1].windows
    mixed = [slow if number % 2 else fast for number, (slow, fast) in enumerate(zip(second.windows, usual, strict=True))]
    assert not judge([first, replace(second, windows=mixed)]).causes


def test_a_rank_that_became_slow_in_the_last_third_is_named_with_its_steps() -> None:
    fast, slow = records(USUAL, USUAL, num_windows=9), records(USUAL, {**USUAL, "F0": 0.1}, num_windows=9)
    pairs = zip(fast, slow, strict=True)
    cause = only_cause([replace(before, windows=[*before.windows[:6], *after.windows[6:]]) for before, after in pairs])
    assert (cause.kind, cause.ranks, cause.location) == ("work", (1,), "F0")
    assert cause.first > 60


def test_a_stage_of_one_rank_is_compared_with_other_stages() -> None:
    usual = {"F0": 0.02, "B0": 0.04}
    cause = only_cause(records({"F0": 0.02, "B0": 0.16}, usual, stages=[0, 1]))
    assert (cause.ranks, cause.location) == ((0,), "B0")
    for location in ("B0", "I0"):
        assert not judge(records({"F0": 0.02, location: 0.1}, usual, stages=[0, 1])).causes


def test_a_slow_replica_of_one_stage_is_named_and_not_the_stage_that_waits_for_it() -> None:
    """Rank 3 is slow in a backward of stage 1: its replica waits in sums, stage 0 for its gradients."""
    first_stage = {"F0": 0.01, "B0": 0.02}
    cause = only_cause(records(first_stage, first_stage, USUAL, {**USUAL, "B0": 0.1}, stages=[0, 0, 1, 1]))
    assert (cause.ranks, cause.location) == ((3,), "B0")


def test_a_late_host_is_named_if_other_hosts_wait_for_it() -> None:
    usual = {**USUAL, Location.DEVICE: 0.004}
    late = records(usual, {**usual, Location.DATA: 0.1}, device="cuda")
    cause = only_cause(late)
    assert (cause.ranks, cause.location) == ((1,), Location.DATA)
    assert "waits 102 ms for other ranks and 4 ms for its device" in next(iter(describe_work(judge(late))))


def test_a_host_that_waits_for_its_device_is_not_named() -> None:
    assert not judge(records({"F0": 0.02, Location.DEVICE: 0.02}, {"F0": 0.08, Location.DEVICE: 0.02}, device="cuda")).causes


def test_a_wait_of_every_rank_for_data_is_named() -> None:
    cause = only_cause(records(*[{**USUAL, Location.DATA: 0.1}] * 2))
    assert (cause.kind, cause.ranks) == ("data", (0, 1))
    assert describe_cause(cause).startswith("every rank waits for its data for 100 ms in a step of")


def write_record(record: WorkRecord, folder: Path) -> Path:
    """Writes the record of a rank as a run does, and returns its file."""
    path, notes = folder / WORK / f"rank-{record.start.rank}.jsonl", list[str]()
    file = WorkFile(path, record.start, notes)
    for entry in record.windows:
        file.write(format_line(entry))
    assert notes == []
    return path


def test_the_command_prints_the_cause_and_the_work_of_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for record in records(USUAL, {**USUAL, "B0": 0.1}):
        write_record(record, tmp_path)
    (tmp_path / "plan.toml").touch()
    doctor(tmp_path)
    printed = capsys.readouterr().out
    assert "all ranks finished step 60" in printed
    assert "\nslow      rank 1 makes other ranks wait" in printed
    assert "\nsteps     11 to 60\nremedy    " in printed
    assert "\nwork and waits of each rank in a step\n  rank 0" in printed
    assert describe_state(RunState("finished", 3, None), 0.0) == "the run has ended: finished; all ranks finished step 3"


def test_damaged_lines_and_repeated_steps_are_skipped(tmp_path: Path) -> None:
    """A full disk cuts the last line of the first start. The second start repeats steps."""
    (record,) = records(USUAL)
    path = write_record(record, tmp_path)
    assert read_records(tmp_path) == [record]
    path.write_bytes(path.read_bytes()[:-40])
    assert read_records(tmp_path) == [replace(record, windows=record.windows[:-1])]
    restarted = WorkRecord(replace(record.start, host="there", time=2.0), record.windows[3:])
    write_record(restarted, tmp_path)
    assert read_records(tmp_path) == [restarted]
    with path.open("a") as file:
        file.write("[1]\n" + format_line(record.windows[4]))
    assert read_records(tmp_path) == [replace(restarted, windows=record.windows[3:5])]


def test_windows_of_another_format_are_not_those_of_the_start_before(tmp_path: Path) -> None:
    (record,) = records(USUAL)
    path = write_record(record, tmp_path)
    path.write_bytes(path.read_bytes() * 2)
    assert read_records(tmp_path) == [record]
    first, second = path.read_text("utf-8").split('{"format"')[1:]
    path.write_text('{"format"' + first + '{"format"' + second.replace(f"{FORMAT}", f"{FORMAT + 1}", 1), "utf-8")
    assert read_records(tmp_path) == []


def test_records_of_ranks_that_a_later_start_does_not_have_are_left_out(tmp_path: Path) -> None:
    """A run of four ranks is resumed with two, and then with three."""
    folder = tmp_path / WORK
    folder.mkdir()
    for number, world in enumerate((4, 2, 3)):
        for rank, record in enumerate(records(*[USUAL] * world)):
            start = replace(record.start, time=1e4 * number, pid=number)
            with (folder / f"rank-{rank}.jsonl").open("a") as file:
                file.write(format_line(start) + "".join(map(format_line, record.windows)))
        assert [(record.start.rank, record.start.pid) for record in read_records(tmp_path)] == [
            (rank, number) for rank in range(world)
        ]
        assert judge(read_records(tmp_path)).no_cause_reason == ""


def test_blocks_are_the_windows_that_all_ranks_have() -> None:
    first, second = records(USUAL, USUAL)
    blocks = build_blocks([first, replace(second, windows=second.windows[1:4])])
    assert [(block.first, block.last) for block in blocks] == [(11, 20), (21, 30), (31, 40)]
    assert blocks[0].ranks[0].window == first.windows[1]
    assert build_blocks([first, replace(second, windows=[])]) == []


def test_a_long_run_has_a_limited_number_of_blocks() -> None:
    blocks = build_blocks(records(USUAL, USUAL, num_windows=500))
    assert MAX_BLOCKS / 2 < len(blocks) <= MAX_BLOCKS
    assert blocks[-1].last == 5000
    assert len({following.first - block.first for block, following in pairwise(blocks)}) == 1
