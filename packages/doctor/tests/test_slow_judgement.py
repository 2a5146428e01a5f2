"""Who is named for which records, and in which words: causes have work, victims have waits. Records are written here; nothing
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sley_doctor.reports.work_record import (
    DATA,
    DEVICE,
    UPDATE,
    Queue,
    Spread,
    Start,
    Window,
    WorkRecord,
    format_line,
    read_records,
)
from sley_doctor.slow.blocks import MAX_BLOCKS, build_blocks
from sley_doctor.slow.describe import describe_cause, describe_no_cause, describe_work, longest_waits, remedy
from sley_doctor.slow.judge import Cause, judge
from train_cli.run_folder import WORK

BLOCK = "Block Linearx2 4096"


def spread(seconds: float, width: float = 0.1) -> Spread:
    return Spread(seconds * (1 - width), seconds, seconds * (1 + width))


def window(number: int, work: Mapping[str, float], waits: Mapping[str, float], **more: Any) -> Window:
    """Ten steps, from `10 * number + 1` on. waits: of the group of all ranks."""
    seconds = sum(work.values()) + sum(waits.values())
    return Window(
        first=10 * number + 1,
        last=10 * number + 10,
        time=float(number),
        seconds=spread(seconds),
        work={place: spread(one) for place, one in work.items()},
        layers=more.get("layers", {}),
        waits={queue: spread(one) for queue, one in waits.items()},
        queues=more.get("queues", {queue: Queue((0, 1), None, 1.0, 1e5) for queue in waits}),
    )


def record(rank: int, windows: Sequence[Window], world: int = 2, stage: int = 0, **more: Any) -> WorkRecord:
    return WorkRecord(Start(rank, world, stage, "here", 1, "cpu", 0.0, **more), windows)


def replicas(*works: Mapping[str, float], num_windows: int = 6) -> list[WorkRecord]:
    """Ranks of one stage that do this in every step, and wait for the slowest of them in their sums."""
    step_s = max(sum(work.values()) for work in works) + 0.002
    queues = {"stage main": Queue(tuple(range(len(works))), None, 1.0, 1e5)}
    return [
        record(
            rank,
            [window(n, work, {"stage main": step_s - sum(work.values())}, queues=queues) for n in range(num_windows)],
            len(works),
        )
        for rank, work in enumerate(works)
    ]


USUAL = {DATA: 0.0001, "F0": 0.02, "B0": 0.04, UPDATE: 0.005}


def stages(*layers: Mapping[str, float], num_windows: int = 6) -> list[WorkRecord]:
    """A rank for each stage, whose chunk has these layers."""
    works = [sum(some.values()) for some in layers]
    step_s = 1.5 * max(works)
    queues = {"pp up 0>1": Queue((0, 1), 0, 1.0, 1e4)}
    return [
        record(
            rank,
            [
                window(
                    number,
                    {"F0": works[rank]},
                    {"pp up 0>1": step_s - works[rank]},
                    layers={"F0": {name: spread(one) for name, one in some.items()}},
                    queues=queues if rank else {},
                )
                for number in range(num_windows)
            ],
            len(layers),
            rank,
            layers={name: BLOCK if name.startswith("blocks") else name for name in some},
        )
        for rank, some in enumerate(layers)
    ]


# -- who is named ------------------------------------------------------------------------------------------------------


def only(causes: tuple[Cause, ...]) -> Cause:
    (cause,) = causes
    return cause


@pytest.mark.parametrize("place", [DATA, "F0", "B0", UPDATE])
@pytest.mark.parametrize("slow", [0, 2])
def test_the_rank_that_works_longer_is_named_with_its_place_and_never_its_victims(place: str, slow: int) -> None:
    works = [{**USUAL, place: USUAL[place] + 0.06 * (rank == slow)} for rank in range(3)]
    cause = only(judge(replicas(*works)).causes)
    assert (cause.kind, cause.ranks, cause.location) == ("work", (slow,), place)
    assert cause.seconds == pytest.approx(0.06)
    assert cause.usual_s == pytest.approx(USUAL[place])
    assert f"rank {slow} makes other ranks wait" in describe_cause(cause)
    assert "takes 60 ms longer than on other ranks in a step of" in describe_cause(cause)
    assert remedy(cause)


@pytest.mark.parametrize("more_s", [0.0, 0.01, 0.02])
def test_less_than_a_quarter_of_a_step_is_not_told(more_s: float) -> None:
    judged = judge(replicas(USUAL, {**USUAL, "F0": 0.02 + more_s}))
    assert not judged.causes
    assert describe_no_cause(judged).startswith("none: in steps 11 to 60 no rank worked 25% of a step longer than its peers")


def test_work_that_nobody_waits_for_is_no_cause() -> None:
    """As a rank that writes metrics beside the others' work: its peers wait for nothing."""
    fast, slow = replicas(USUAL, {**USUAL, "B0": 0.1})
    free = [replace(one, waits={"stage main": spread(0.001)}) for one in fast.windows]
    assert not judge([replace(fast, windows=free), slow]).causes


def test_steps_that_vary_as_much_as_ranks_differ_name_nobody() -> None:
    first, second = replicas(USUAL, {**USUAL, "B0": 0.08})
    wide = [replace(one, work={**one.work, "B0": Spread(0.03, 0.08, 0.2)}) for one in second.windows]
    assert not judge([first, replace(second, windows=wide)]).causes


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    first, second = replicas(USUAL, {**USUAL, "B0": 0.1}, num_windows=9)
    usual = replicas(USUAL, USUAL, num_windows=9)[1].windows
    mixed = [one if number % 2 else other for number, (one, other) in enumerate(zip(second.windows, usual, strict=True))]
    assert not judge([first, replace(second, windows=mixed)]).causes


def test_a_rank_that_has_become_slow_lately_is_named_with_the_steps() -> None:
    quick, slow = replicas(USUAL, USUAL, num_windows=9), replicas(USUAL, {**USUAL, "F0": 0.1}, num_windows=9)
    later = [replace(one, windows=[*one.windows[:6], *other.windows[6:]]) for one, other in zip(quick, slow, strict=True)]
    cause = only(judge(later).causes)
    assert (cause.kind, cause.ranks, cause.location) == ("work", (1,), "F0")
    assert cause.first > 60


def test_a_layer_is_named_where_most_of_the_excess_is() -> None:
    def layers(slow_s: float) -> dict[str, Any]:
        return {"layers": {"B0": {"blocks.0": spread(0.02), "blocks.1": spread(0.02 + slow_s)}}}

    quick, slow = replicas(USUAL, {**USUAL, "B0": 0.12})
    quick = replace(quick, windows=[replace(one, **layers(0.0)) for one in quick.windows])
    slow = replace(slow, windows=[replace(one, **layers(0.08)) for one in slow.windows])
    cause = only(judge([quick, slow]).causes)
    assert (cause.location, cause.layer) == ("B0", "blocks.1")
    assert "in layer `blocks.1`" in describe_cause(cause)


def test_a_stage_of_one_rank_is_compared_with_layers_that_are_alike() -> None:
    cause = only(judge(stages({"blocks.0": 0.01, "blocks.1": 0.06}, {"blocks.2": 0.01, "head": 0.02})).causes)
    assert (cause.ranks, cause.location, cause.layer) == ((0,), "F0", "blocks.1")


def test_a_stage_with_other_layers_is_not_slow_for_that() -> None:
    assert not judge(stages({"embed": 0.002, "blocks.0": 0.01}, {"blocks.1": 0.01, "head": 0.2})).causes


def test_a_slow_replica_of_one_stage_is_named_and_not_the_stages_that_wait_for_it() -> None:
    """Rank 3 is slow in a backward of stage 1: its replica waits in sums, stage 0 for its gradients."""
    other = {"F0": 0.01, "B0": 0.02}
    works = [other, other, USUAL, {**USUAL, "B0": 0.1}]
    queues = {"all main": Queue((0, 1, 2, 3), None, 1.0, 48.0)}
    ranks = [
        record(rank, [window(n, work, {"all main": 0.15 - sum(work.values())}, queues=queues) for n in range(6)], 4, rank // 2)
        for rank, work in enumerate(works)
    ]
    cause = only(judge(ranks).causes)
    assert (cause.ranks, cause.location) == ((3,), "B0")


def on_cuda(*works: Mapping[str, float], control: Sequence[float] = ()) -> list[WorkRecord]:
    """Ranks of one stage whose hosts wait for their devices, and for each other when a step begins."""
    queues = {"control main": Queue(tuple(range(len(works))), None, 1.0, 48.0)}
    waits = control or [0.0005] * len(works)
    ranks = [
        record(rank, [window(n, work, {"control main": waits[rank]}, queues=queues) for n in range(6)], world=len(works))
        for rank, work in enumerate(works)
    ]
    return [replace(one, start=replace(one.start, device="cuda")) for one in ranks]


def test_a_host_that_comes_late_to_a_step_is_named_where_the_hosts_of_others_wait_for_it() -> None:
    ranks = on_cuda({**USUAL, DEVICE: 0.004}, {**USUAL, DATA: 0.1, DEVICE: 0.004}, control=[0.1, 0.0005])
    cause = only(judge(ranks).causes)
    assert (cause.ranks, cause.location) == ((1,), DATA)
    assert "waits 100 ms in `control main`" in next(iter(describe_work(judge(ranks))))


def test_a_host_with_time_left_is_not_named_although_others_wait_for_it_elsewhere() -> None:
    ranks = on_cuda({"F0": 0.02, DEVICE: 0.02}, {"F0": 0.08, DEVICE: 0.02}, control=[0.06, 0.0005])
    assert not judge(ranks).causes


def test_a_collective_in_which_the_last_to_come_waits_names_the_link() -> None:
    works = [{place: one / 2 for place, one in USUAL.items()}] * 2
    ranks = [record(rank, [window(n, work, {"stage main": 0.05}) for n in range(6)]) for rank, work in enumerate(works)]
    cause = only(judge(ranks).causes)
    assert (cause.kind, cause.ranks) == ("link", (0, 1))


def test_data_that_every_rank_waits_for_is_told_of_all() -> None:
    cause = only(judge(replicas({**USUAL, DATA: 0.1}, {**USUAL, DATA: 0.1})).causes)
    assert (cause.kind, cause.ranks) == ("data", (0, 1))


# -- how records are read, and told ------------------------------------------------------------------------------------


def test_whom_a_rank_waits_for_is_who_waits_least() -> None:
    """In an exchange of all, or in all, where others have no such queue: of what is read from this rank, it alone has one."""
    queues = {name: Queue((0, 1, 2), None, 1.0, 1e5) for name in ("stage main", "stage main of 0")}
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
    assert longest_waits(0, blocks)[:2] == told


def test_a_record_is_read_as_it_was_written_and_damage_is_left_out(tmp_path: Path) -> None:
    (written,) = replicas(USUAL, num_windows=2)
    folder = tmp_path / WORK
    folder.mkdir()
    lines = [format_line(written.start), *map(format_line, written.windows), '{"first": 21, "la', "\n", "[1]\n"]
    (folder / "rank-0.jsonl").write_text("".join(lines), "utf-8")
    assert read_records(tmp_path) == [written]
    again = replace(written.start, pid=2)
    with (folder / "rank-0.jsonl").open("a") as file:
        file.write(format_line(again) + format_line(written.windows[1]))
    (found,) = read_records(tmp_path)
    assert (found.start.pid, found.windows) == (2, [written.windows[1]])
    with (folder / "rank-0.jsonl").open("a") as file:
        file.write(format_line(written.windows[0]))
    (found,) = read_records(tmp_path)
    assert found.windows == [written.windows[0]], "a run that was brought back takes steps again"


def test_records_of_ranks_that_a_later_start_does_not_have_are_left_out(tmp_path: Path) -> None:
    """A run of four ranks is resumed with two, and then with three."""
    folder = tmp_path / WORK
    folder.mkdir()

    def begin(number: int, world: int) -> None:
        for rank, one in enumerate(replicas(*[USUAL] * world)):
            start = replace(one.start, time=1e4 * number, pid=number)
            with (folder / f"rank-{rank}.jsonl").open("a") as file:
                file.write(format_line(start) + "".join(map(format_line, one.windows)))

    for number, world in enumerate((4, 2, 3)):
        begin(number, world)
        assert [(one.start.rank, one.start.pid) for one in read_records(tmp_path)] == [(rank, number) for rank in range(world)]
        assert judge(read_records(tmp_path)).why_not == ""


def test_blocks_are_the_steps_that_all_ranks_have() -> None:
    one, other = replicas(USUAL, USUAL)
    coarse = [replace(other.windows[0], last=30), replace(other.windows[0], first=31, last=50)]
    blocks = build_blocks([one, replace(other, windows=coarse)])
    assert [(block.first, block.last) for block in blocks] == [(1, 30), (31, 50)]
    assert blocks[0].ranks[0].work["F0"].median == pytest.approx(0.02)


def test_a_long_run_has_no_more_blocks_than_can_be_looked_at() -> None:
    blocks = build_blocks(replicas(USUAL, USUAL, num_windows=500))
    assert len(blocks) <= MAX_BLOCKS
    assert (blocks[0].first, blocks[-1].last) == (1, 5000)
    assert all(one.last + 1 == other.first for one, other in pairwise(blocks))
