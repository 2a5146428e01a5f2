"""Held out means never trained on: by content, whatever the names, patterns and copies."""

import json
from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sley_core.data.dataset import DataContext, Split
from sley_core.errors import PlanError
from sley_data.datasets import TokenDataset, check_token_dataset
from sley_data.documents import read_documents
from sley_data.files import find_document_files
from sley_data.plugin import TextConfig, TokensConfig

WAYS: dict[str, dict[str, Any]] = {"files": {}, "separator": {"separator": "\n\n"}, "field": {"field": "text"}}


def write(path: Path, documents: list[str], way: str) -> None:
    """Writes documents in one file, or, if each file is one, in files beside each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if way == "files":
        for number, text in enumerate(documents):
            path.with_name(f"{path.stem}-{number}{path.suffix}").write_text(text)
    else:
        lines = (json.dumps({"text": text}) for text in documents)
        path.write_text("\n".join(lines) if way == "field" else "\n\n".join(documents))


def texts(config: TextConfig, split: Split, notes: list[str] | None = None) -> list[bytes]:
    files, problems = find_document_files(config, split)
    assert not problems
    return [text for _, text in read_documents(files, config, split, notes)]


def drawn(count: int, seed: int = 0) -> list[str]:
    random = Random(seed)
    return [" ".join(random.choices(["weft", "warp", "sley", "reed"], k=random.randint(2, 2000))) for _ in range(count)]


@pytest.mark.parametrize("way", WAYS)
def test_copies_are_on_one_side(tmp_path: Path, way: str) -> None:
    documents = drawn(60)
    for name in ("a", "b", "sub/a", "other"):
        write(tmp_path / f"{name}.txt", documents[:40] if name == "b" else documents, way)
    config = TextConfig(files=(tmp_path / "**/*.txt", tmp_path / "sub/*.txt"), sequence=4, held_out=0.3, **WAYS[way])
    trained, held = texts(config, "train"), texts(config, "held_out")
    assert not {*trained} & {*held}
    assert {*trained} | {*held} == {text.encode() for text in documents}
    assert 5 < len({*held}) < 35
    again = TextConfig(files=(tmp_path / "sub/*.txt",), sequence=4, held_out=0.3, **WAYS[way])
    assert {*texts(again, "held_out")} == {*held}
    more = TextConfig(files=(tmp_path / "sub/*.txt",), sequence=4, held_out=0.6, **WAYS[way])
    assert {*texts(more, "held_out")} > {*held}


@pytest.mark.parametrize("way", WAYS)
def test_what_held_out_files_have_is_not_trained_on_and_said(tmp_path: Path, way: str) -> None:
    documents = drawn(30)
    write(tmp_path / "train" / "a.txt", documents, way)
    write(tmp_path / "held" / "b.txt", [*documents[20:25], "another"], way)
    options: dict[str, Any] = {"sequence": 4, "documents": "pad", **WAYS[way]}
    held_out_files = (tmp_path / "held/*.txt",)
    config = TextConfig(files=(tmp_path / "train/*.txt",), held_out_files=held_out_files, **options)
    notes: list[str] = []
    trained = texts(config, "train", notes)
    assert sorted(trained) == sorted(text.encode() for text in (*documents[:20], *documents[25:]))
    assert notes == ["5 of 30 documents in `files` are also in `held_out_files`: training excludes them"]
    assert sorted(texts(config, "held_out")) == sorted(text.encode() for text in (*documents[20:25], "another"))
    data = TokenDataset(config, DataContext())
    assert len(data)
    assert data.data_notes == notes
    within = TextConfig(files=(tmp_path / "*/*.txt",), held_out_files=held_out_files, **options)
    assert sorted(texts(within, "train")) == sorted(trained)
    every = TextConfig(files=held_out_files, held_out_files=held_out_files, **options)
    (problem,) = check_token_dataset(every, evaluates=True)
    assert (problem.code, "held-out documents" in problem.message) == ("data-short", True)


def ids(path: Path, values: list[int]) -> Path:
    path.write_bytes(array("H", values).tobytes())
    return path


@pytest.mark.parametrize(
    ("first", "last", "is_trained_on"),
    [(0, 50_000, True), (0, 9_000, True), (41_000, 50_000, True), (20_001, 22_000, True), (7, 60, True), (None, None, False)],
)
def test_token_files_of_which_one_has_the_others_tokens(
    tmp_path: Path, first: int | None, last: int | None, is_trained_on: bool
) -> None:
    random = Random(1)
    tokens = [random.randrange(5000) for _ in range(50_000)]
    others = [random.randrange(5000) for _ in range(9_000)]
    held = ids(tmp_path / "held.bin", others if first is None else tokens[first:last])
    config = TokensConfig(
        files=(ids(tmp_path / "other.bin", others[::-1]), ids(tmp_path / "train.bin", tokens)),
        held_out_files=(held,),
        vocab_size=5000,
        sequence=4,
    )
    found = [problem.code for problem in check_token_dataset(config, evaluates=True)]
    assert found == (["held-out-trained"] if is_trained_on else [])
    data = TokenDataset(config, DataContext(split="held_out"))
    if is_trained_on:
        with pytest.raises(PlanError, match=r"held\.bin.*train\.bin"):
            len(data)
    else:
        assert len(data) == 2250
    assert len(TokenDataset(config, DataContext())) == 12500 + 2250


def test_tokens_that_say_nothing_are_no_copy(tmp_path: Path) -> None:
    config = TokensConfig(
        files=(ids(tmp_path / "train.bin", [0] * 3000 + list(range(2000))),),
        held_out_files=(ids(tmp_path / "held.bin", [0] * 2000),),
        vocab_size=5000,
        sequence=4,
    )
    assert list(check_token_dataset(config, evaluates=True)) == []
