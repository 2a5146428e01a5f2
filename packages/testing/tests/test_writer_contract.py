"""The contract of metrics writers holds for a simple one, and says what is wrong with each that is wrong on purpose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_testing.writer_contract import MetricsWriterContract, Point

pytestmark = pytest.mark.usefixtures("wrong")

WRONG = [
    ("begins", "a_folder_that_is_written_to_again_keeps_its_rows", r"missing: \[\(1, 'loss'\), \(2, 'loss'\)\]"),
    ("first", "rows_may_differ", r"missing: \[\(2, 'held_out_loss'\), \(2, 'tokens'\), \(3, 'norms/layer.0'\)\]"),
    ("whole", "rows_may_differ", r"\(1, 'loss'\) is 2, not 2.5"),
    ("late", "what_is_written_outlives_the_process", r"a run that is killed now would leave \[\]"),
    ("deaf", "steps_that_are_taken_again_stand_once", r"step and name stand more than once: \[\(2, 'loss'\)\]"),
    ("eager", "steps_that_are_taken_again_stand_once", r"missing: \[\(1, 'loss'\)\]"),
    ("once", "it_closes_twice", "a second close fails: AttributeError"),
    ("mute", "a_full_disk_is_an_error", "of 512 rows are there: neither write nor close says so"),
    ("strict", "numbers_that_are_not_finite_do_no_harm", r"\(1, 'lr'\) is None, beside a number that is not finite"),
]


class OfLines(MetricsWriterContract):
    """Reads lines of JSON."""

    def read(self, folder: Path) -> Iterator[Point]:
        for line in (folder / "numbers.txt").read_text().splitlines():
            if line.endswith("}"):  # the last one of a full disk does not
                row = json.loads(line)
                yield from ((row["step"], name, value) for name, value in row.items())


class TestNaive(OfLines):
    writer: ClassVar[dict[str, Any]] = {"use": "wrong.naive"}


@pytest.mark.parametrize(("name", "test", "words"), WRONG)
def test_what_is_wrong_is_said(name: str, test: str, words: str, tmp_path: Path) -> None:
    class Wrong(OfLines):
        writer: ClassVar[dict[str, Any]] = {"use": f"wrong.{name}"}

    with pytest.raises(AssertionError, match=words):
        getattr(Wrong(), f"test_{test}")(tmp_path)
