"""Schedules in files: read as they were written, and refused with the line that is wrong."""

from __future__ import annotations

import pytest

from sley_core.actions.action import Action, Kind, loop, v
from sley_core.errors import PlanError
from sley_pp.config import CsvConfig
from sley_pp.schedules import build_csv, interleaved, one_f_one_b, read_csv, write_csv, zero_bubble_v


@pytest.mark.parametrize(
    ("generate", "placement"),
    [(one_f_one_b, loop(1)), (one_f_one_b, loop(4)), (interleaved, loop(3, 2)), (zero_bubble_v, v(3))],
)
def test_what_is_written_is_read_again(generate, placement):
    lists = generate(placement.stages, placement.chunks, 5)
    assert read_csv(write_csv(lists, placement), "a.csv") == (placement, lists)


def test_waits_and_blanks_mean_nothing_and_overlapped_actions_come_one_after_another():
    placement, lists = read_csv("0F0, ,0F1,,(0F2;0B0)OVERLAP_F_B,0I1,0W1,0B2\r\n", "a.csv")
    f, b, d, w = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
    words = [(f, 0), (f, 1), (f, 2), (b, 0), (d, 1), (w, 1), (b, 2)]
    assert placement == loop(1)
    assert lists == [[Action(kind, 0, micro) for kind, micro in words]]


def test_any_deal_of_the_parts_is_read():
    placement, lists = read_csv("0F0,3F0,3B0,0B0\n2F0,2B0,1B0,1F0", "a.csv")
    assert placement.route == (0, 1, 1, 0)
    placement, lists = read_csv("1F0,2F0,2B0,1B0\n0F0,3F0,3B0,0B0", "a.csv")
    assert placement.route == (1, 0, 0, 1)
    assert [action.chunk for action in lists[1]] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0\n1F0,1SEND_B0,1B0", "a.csv:2:5 has `1SEND_B0`, which is no compute action"),
        ("0F0,0X0", "a.csv:1:5 has `0X0`"),
        ("0F0,0B", "has `0B`"),
        ("0F" + "9" * 5000, "has `0F999"),
        ("0F0,0B0\n2F0,2B0", "does not give each part of the model, counted from 0, to one rank (rank 0: [0]; rank 1: [2])"),
        ("0F0,0B0\n0F1,0B1", "does not give each part of the model, counted from 0, to one rank (rank 0: [0]; rank 1: [0])"),
        ("0F0,0B0\n\n1F0,1B0", "equally many parts of the model (rank 0: [0]; rank 1: []; rank 2: [1])"),
        ("", "a.csv has no actions"),
        (" , ,", "a.csv has no actions"),
    ],
)
def test_what_is_no_schedule_is_refused(text, fault):
    with pytest.raises(PlanError) as caught:
        read_csv(text, "a.csv")
    assert caught.value.diagnostics[0].code == "schedule-file"
    assert fault in caught.value.diagnostics[0].message


def test_a_file_is_for_its_own_sizes(tmp_path):
    path = tmp_path / "v.csv"
    path.write_text(write_csv(zero_bubble_v(2, 2, 3), v(2)), "utf-8")
    schedule = build_csv(CsvConfig(file=path))
    assert schedule.placement(2) == v(2)
    assert schedule.lists(2, 3) == zero_bubble_v(2, 2, 3)
    with pytest.raises(PlanError, match="is for 2 stages, but the plan has 3"):
        schedule.placement(3)
    for stages, micros in ((3, 3), (2, 4)):
        with pytest.raises(PlanError, match=rf"is for 2 stages and 3 micro-batches, but the plan has {stages} and {micros}"):
            schedule.lists(stages, micros)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"missing\.csv cannot be read"):
        build_csv(CsvConfig(file=tmp_path / "missing.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(PlanError, match=r"bytes\.csv cannot be read"):
        build_csv(CsvConfig(file=tmp_path / "bytes.csv"))
