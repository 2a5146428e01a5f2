from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.data.dataset import IGNORED, DataContext, Split
from sley_core.errors import PlanError
from sley_data.config import TextConfig
from sley_data.datasets import TextDataset

TEXTS = {"a.txt": b"abcdefghij", "b.txt": b"0123456", "empty.txt": b"", "sub/c.txt": b"\xff\x00\xfe\x80 not UTF-8"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / name).write_bytes(text)
    return tmp_path


def dataset(*files: Path, split: Split = "train", **more: Any) -> TextDataset:
    options = {"sequence": 4, "held_out": 0.0, **more}
    return TextDataset(TextConfig(files=files, **options), DataContext(split=split))


def labels_of(dataset: TextDataset) -> bytes:
    samples = [dataset[index] for index in range(len(dataset))]
    labels = torch.cat([sample["labels"] for sample in samples])
    return bytes(labels[labels != IGNORED].tolist())


def test_cut_every_byte_after_the_first_is_a_label_once(corpus: Path) -> None:
    assert labels_of(dataset(corpus / "**/*.txt", documents="cut")) == b"".join(TEXTS.values())[1:]


@pytest.mark.parametrize("documents", ["pack", "pad"])
def test_kept_apart_every_byte_after_the_first_of_its_document_is_a_label_once(corpus: Path, documents: str) -> None:
    assert labels_of(dataset(corpus / "**/*.txt", documents=documents)) == b"".join(text[1:] for text in TEXTS.values())


def test_packed_labels_never_cross_a_boundary(corpus: Path) -> None:
    data = dataset(corpus / "a.txt", corpus / "b.txt", documents="pack")
    sample = data[2]
    assert bytes(sample["tokens"].tolist()) == b"ij01"
    assert sample["labels"].tolist() == [ord("j"), IGNORED, ord("1"), ord("2")]
    assert sample["positions"].tolist() == [0, 1, 0, 1]
    assert sample["cu_seqlens"].tolist() == [0, 2, 4]
    assert data[0]["cu_seqlens"].tolist() == [0, 4, 4]


def test_the_splits_share_no_document_and_lose_none(corpus: Path) -> None:
    for number in range(50):
        (corpus / f"{number}.md").write_bytes(b"%02d" % number * 3)
    parts = {}
    for split in ("train", "held_out"):
        data = dataset(corpus / "*.md", documents="pad", held_out=0.3, split=split, sequence=5)
        parts[split] = {bytes(data[index]["tokens"].tolist())[:2] for index in range(len(data))}
    assert parts["train"] | parts["held_out"] == {b"%02d" % number for number in range(50)}
    assert not parts["train"] & parts["held_out"]
    assert 5 < len(parts["held_out"]) < 25


def test_the_split_of_a_document_depends_on_it_alone(tmp_path: Path) -> None:
    def held_out(folder: Path, names: range) -> set[bytes]:
        folder.mkdir()
        for number in names:
            (folder / f"{number}.txt").write_bytes(b"%02d" % number)
        config = TextConfig(files=(folder / "*.txt",), sequence=1, held_out=0.4, documents="pad")
        data = TextDataset(config, DataContext(split="held_out"))
        return {bytes(data[index]["tokens"].tolist() + data[index]["labels"].tolist()) for index in range(len(data))}

    few, many = held_out(tmp_path / "one", range(10, 25)), held_out(tmp_path / "two", range(10, 40))
    assert few < many


def test_held_out_files_are_a_split_of_their_own(corpus: Path) -> None:
    options: dict[str, Any] = {"held_out_files": (corpus / "b.txt",), "documents": "cut"}
    assert labels_of(dataset(corpus / "a.txt", **options)) == TEXTS["a.txt"][1:]
    assert labels_of(dataset(corpus / "a.txt", split="held_out", **options)) == TEXTS["b.txt"][1:]


def test_a_separator_makes_documents_within_a_file(tmp_path: Path) -> None:
    path = tmp_path / "all.txt"
    path.write_bytes(b"first--second----third")
    data = dataset(path, separator="--", documents="pad", sequence=5)
    assert [bytes(data[index]["tokens"].tolist()).rstrip(b"\0") for index in range(len(data))] == [b"firs", b"secon", b"thir"]


def test_too_little_text_is_an_error(corpus: Path) -> None:
    with pytest.raises(PlanError, match="has 7 tokens; one sample needs 7 and a label") as caught:
        len(dataset(corpus / "b.txt", sequence=7))
    assert caught.value.diagnostics[0].code == "data-short"
    assert len(dataset(corpus / "b.txt", sequence=6)) == 1


def test_the_standard_library_is_text_that_every_machine_has() -> None:
    begin = time.perf_counter()
    data = TextDataset(TextConfig(source="python-stdlib", sequence=256), DataContext())
    assert len(data) > 10_000
    assert time.perf_counter() - begin < 10
    held_out = TextDataset(TextConfig(source="python-stdlib", sequence=256), DataContext(split="held_out"))
    assert 50 < len(held_out) < len(data) / 10
