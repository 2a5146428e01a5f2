"""summary.json: a pure function of rows and facts, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.json_text import to_json, write_json
from train_cli.summary import NAME, RunFacts, RunTotals, summary, write_summary

FACTS = RunFacts("quickstart", "cpu", 2, {"core": "sley-core 0.1.0"}, {"torch": "2.13.0"}, 1000, 900, 4, 320)


def rows(num_steps: int) -> list[dict[str, float | int]]:
    return [{"step": step, "loss": 6.0 - step / 8, "tokens": 512, "seconds": 0.25} for step in range(1, num_steps + 1)]


def test_a_finished_run() -> None:
    of = rows(40)
    of[19]["held_out_loss"] = 3.75
    of[39] |= {"held_out_loss": 1.5, "memory_mb": 31.5}
    counts = {"isp.communicator": {"gathers_per_step": 13}}
    memory = {"weights": 4000}
    assert summary(FACTS, "finished", RunTotals(of), counts, memory) == {
        "name": "quickstart",
        "outcome": "finished",
        "steps": 40,
        "skipped_steps": 0,
        "final_loss": 1.0,
        "mean_loss_last_20": sum(6.0 - step / 8 for step in range(21, 41)) / 20,
        "held_out_loss": 1.5,
        "tokens": 40 * 512,
        "seconds": 10.0,
        "tokens_per_s": 2048.0,
        "samples": 160,
        "samples_per_s": 16.0,
        "epochs": 0.5,
        "parameters": 1000,
        "trained_parameters": 900,
        "memory_bytes": memory,
        "memory_mb": 31.5,
        "world": 2,
        "device": "cpu",
        "plugins": {"core": "sley-core 0.1.0"},
        "versions": {"torch": "2.13.0"},
        "counts": counts,
        "notes": [],
    }


def test_a_step_that_was_skipped_for_its_loss_has_no_part_in_the_mean() -> None:
    of = rows(4)
    of[3] |= {"loss": math.nan, "skipped": 1}
    content = summary(FACTS, "finished", RunTotals(of))
    assert (content["steps"], content["skipped_steps"]) == (4, 1)
    assert (content["final_loss"], content["mean_loss_last_20"]) == (of[2]["loss"], 5.75)


def test_a_run_shorter_than_twenty_steps_has_the_mean_of_all() -> None:
    assert summary(FACTS, "interrupted", RunTotals(rows(3)))["mean_loss_last_20"] == pytest.approx(5.75)


def test_data_without_sequences_has_samples_and_no_tokens() -> None:
    of = [{"step": step, "loss": 1.0, "samples": 4, "samples_per_s": 16.0, "seconds": 0.25} for step in (1, 2)]
    content = summary(FACTS, "finished", RunTotals(of))
    assert (content["tokens"], content["tokens_per_s"]) == (0, None)
    assert (content["samples"], content["samples_per_s"]) == (8, 16.0)


def test_a_run_that_failed_at_once_has_no_losses() -> None:
    content = summary(FACTS, "failed", RunTotals())
    keys = ("final_loss", "mean_loss_last_20", "held_out_loss", "tokens_per_s")
    assert [content[key] for key in keys] == [None] * 4
    assert (content["outcome"], content["steps"], content["tokens"], content["seconds"]) == ("failed", 0, 0, 0.0)


def test_totals_do_not_grow_with_the_run() -> None:
    totals = RunTotals(rows(1000))
    assert len(totals.losses) == 20
    assert totals.steps == 1000


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_counting_in_two_parts_is_counting_at_once(first: int, second: int) -> None:
    of = rows(first + second)
    totals = RunTotals(of[:first])
    for row in of[first:]:
        totals.add(row)
    assert summary(FACTS, "finished", totals) == summary(FACTS, "finished", RunTotals(of))


def test_the_file_holds_the_content_and_nothing_else_is_left(tmp_path: Path) -> None:
    content = summary(FACTS, "finished", RunTotals(rows(2)))
    write_summary(tmp_path, content)
    assert json.loads((tmp_path / "summary.json").read_text()) == content
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_summary(tmp_path, {"steps": 1})

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_summary(tmp_path, {"steps": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_what_json_has_no_form_for_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", [1])
    with pytest.raises(TypeError):
        write_json(tmp_path / "file.json", [object()])
    assert (tmp_path / "file.json").read_text() == "[\n  1\n]\n"


def test_numbers_that_are_not_finite_become_null_at_any_depth() -> None:
    value = {"a": [math.inf, (1.5, math.nan)], "b": {"c": -math.inf}, "d": "é", "e": True, "f": None}
    assert to_json(value) == '{"a": [null, [1.5, null]], "b": {"c": null}, "d": "é", "e": true, "f": null}'


def test_a_link_does_not_say_where_a_file_is_written(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine", "utf-8")
    (tmp_path / f".{NAME}.{os.getpid()}").symlink_to(precious)
    write_summary(tmp_path, {"steps": 1})
    assert precious.read_text("utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", NAME]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_summary(tmp_path / "gone", {"steps": 1})
    assert caught.value.filename == str(tmp_path / "gone" / NAME)
