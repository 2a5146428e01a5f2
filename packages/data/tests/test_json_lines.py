"""Files of JSON lines: a text under a key is a document, and what is none is an error with file and row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sley_core.data.dataset import DataContext
from sley_core.errors import PlanError
from sley_data.check import check
from sley_data.config import TextConfig
from sley_data.datasets import TextDataset
from sley_data.documents import read_documents
from sley_data.files import text_files

LINES = [{"id": 1, "text": 'a "quoted"\nline'}, {"text": ""}, {"text": "schön"}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n", "utf-8")
    return path


def config(*files: Path, **more: Any) -> TextConfig:
    return TextConfig(files=files, **{"sequence": 4, "held_out": 0.0, "documents": "pad", **more})


def test_each_line_is_a_document(path: Path) -> None:
    table = config(path, field="text")
    files, problems = text_files(table, "train")
    assert not problems
    found = list(read_documents(files, table, "train"))
    assert found == [("corpus.jsonl#1", b'a "quoted"\nline'), ("corpus.jsonl#3", "schön".encode())]
    assert list(check(table, evaluates=False)) == []
    assert bytes(TextDataset(table, DataContext())[0]["tokens"].tolist()) == b'a "q'


def test_lines_are_held_out_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"text {number}"}) for number in range(400)), "utf-8")
    table = config(path, field="text", held_out=0.25)
    files, _ = text_files(table, "train")
    counts = [len(list(read_documents(files, table, split))) for split in ("train", "held_out")]
    assert sum(counts) == 400
    assert 60 < counts[1] < 140


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.NDJSON"])
def test_braces_are_no_text_unless_the_plan_says_so(path: Path, name: str) -> None:
    named = path.rename(path.parent / name)
    (problem,) = check(config(named), evaluates=False)
    assert (problem.code, problem.path) == ("data-json", ("data", "files"))
    assert "`field = " in str(problem.hint)
    with pytest.raises(PlanError, match="JSON lines"):
        len(TextDataset(config(named), DataContext()))
    assert list(check(config(named, separator="\n"), evaluates=False)) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"row 4 of `.*corpus.jsonl` has no `text`"),
        ('{"text": ["x"]}', "row 4 of .* has no text as `text`"),
        ('["x"]', "row 4 of .* is no JSON object"),
        ('{"text": "x"', "row 4 of .* cannot be read"),
        ('{"text": "\\ud800"}', "row 4 of .* cannot be read"),
        ("[" * 5000, "row 4 of .* cannot be read"),
    ],
)
def test_a_line_that_is_no_document_is_named(path: Path, line: str, message: str) -> None:
    with path.open("a") as file:
        file.seek(0)
        file.truncate()
        file.write('{"text": "fine"}\n\n{"text": "fine too"}\n' + line)
    (problem,) = check(config(path, field="text"), evaluates=False)
    assert problem.code == "data-json"
    with pytest.raises(PlanError, match=message):
        len(TextDataset(config(path, field="text"), DataContext()))


@pytest.mark.parametrize("more", [{"separator": "|"}, {"source": "python-stdlib", "files": ()}])
def test_a_field_goes_with_lines_of_files_alone(path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`field`"):
        TextConfig.model_validate({"files": [str(path)], "sequence": 4, "field": "text", **more})
