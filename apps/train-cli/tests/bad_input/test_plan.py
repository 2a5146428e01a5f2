"""Whatever is wrong with a plan is one clear diagnostic with its place and exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HANDLER = '[[gradient_handlers]]\nuse = "core.each"\n'

Refused = Callable[..., None]


def replace(plan: Path, old: str, new: str) -> None:
    text = plan.read_text("utf-8")
    assert old in text
    plan.write_text(text.replace(old, new), "utf-8")


def test_no_such_plan(folder: Path, refused: Refused) -> None:
    refused(Path("absent.toml"), "plan-missing", "absent.toml")


def test_a_folder(folder: Path, refused: Refused) -> None:
    (folder / "plans").mkdir()
    refused(Path("plans"), "plan-is-folder", "plans")


def test_not_utf8(plan: Path, refused: Refused) -> None:
    plan.write_bytes(plan.read_bytes() + b'x = "\xff"\n')
    refused(plan, "plan-not-utf8", "\N{REPLACEMENT CHARACTER}")


EDITS = {
    "syntax error": ("steps = 4", "steps = = 4", "syntax", "= 4"),
    "unknown table": ("[batch]", "[batsch]\na = 1\n[batch]", "unknown-table", "batsch"),
    "unknown key": ("micro_size", "micro_sise = 1\nmicro_size", "unknown-key", "micro_sise"),
    "unknown key of a record": ("hidden =", "hiden = 3\nhidden =", "unknown-key", "hiden"),
    "missing key": ("steps = 4", "", "missing-key", "[run]"),
    "bool for an integer": ("steps = 4", "steps = true", "wrong-type", "true"),
    "string for an integer": ("steps = 4", 'steps = "5"', "wrong-type", '"5"'),
    "out of range": ("micro_size = 1", "micro_size = 0", "out-of-range", "0"),
    "unknown record": ("core.adamw", "core.adamv", "unknown-record", '"core.adamv"'),
    "batch that does not divide": ("global_size = 4", "global_size = 5", "batch-does-not-divide", "5"),
    "precision that is to come": ("[parallel]", '[precision]\ngradients = "bf16"\n[parallel]', None, '"bf16"'),
    "slices without an attention": ("dp = 2", "dp = 2\nsp = 2", "sequence-missing", "2"),
    "stages without a schedule": ("dp = 2", "dp = 2\npp = 2", "pipeline-missing", "2"),
    "no handler for the sum": ("plan = 1", "plan = 1\ngradient_handlers = []", "handler-missing", "[]"),
    "handler listed twice": ("dp = 2", "dp = 2\n" + 2 * HANDLER, "handler-twice", '"core.each"'),
    "data file missing": ("corpus.txt", "absent.txt", "data-missing", '"absent.txt"'),
    "data file empty": ("corpus.txt", "empty.txt", "data-empty", '"empty.txt"'),
    "data shorter than a sequence": ("sequence = 16", "sequence = 100000", "data-short", "100000"),
}
"""What is replaced by what in a valid plan, the code, and the text under the caret."""


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("command", ["run", "check"])
def test_wrong_plan(plan: Path, folder: Path, refused: Refused, name: str, command: str) -> None:
    old, new, code, at = EDITS[name]
    (folder / "empty.txt").touch()
    replace(plan, old, new)
    refused(plan, code or "precision-unsupported", at, command=command)


def test_all_problems_at_once(plan: Path, cli: Callable[..., Any]) -> None:
    replace(plan, "steps = 4", "steps = true")
    replace(plan, "lr =", "lrr =")
    result = cli("run", plan, "--message-format", "short")
    *lines, count = result.err.splitlines()
    assert [line.split("error[")[1].split("]")[0] for line in lines] == ["wrong-type", "missing-key", "unknown-key"]
    assert count == "found 3 errors"


def test_another_world_than_the_plan_says(plan: Path, refused: Refused) -> None:
    refused(plan, "layout", "2", "--nproc", "3")
    refused(plan, "layout", "2", "--world", "3", command="check")


def test_an_override_has_a_place_too(plan: Path, refused: Refused) -> None:
    refused(plan, "unknown-key", "--set #2", "--set", "run.seed=3", "--set", "run.sed=3")
