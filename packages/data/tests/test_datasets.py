"""Datasets of text and of token ids: every token behind the first of its document is a label once."""

from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.data.dataset import IGNORE_INDEX, DataContext
from sley_data.datasets import TokenDataset
from sley_data.plugin import TextConfig, TokensConfig

TEXTS = {"a.txt": b"abcdefghij", "b.txt": b"0123456", "empty.txt": b"", "sub/c.txt": b"\xff\x00\xfe\x80 not UTF-8"}


def text(*files: Path, **more: Any) -> TokenDataset:
    return TokenDataset(TextConfig(files=files, **{"sequence": 4, "held_out": 0.0, **more}), DataContext())


def tokens(*files: Path, **more: Any) -> TokenDataset:
    return TokenDataset(TokensConfig(files=files, **{"sequence": 4, "vocab_size": 60000, **more}), DataContext())


def labels_of(dataset: TokenDataset) -> list[int]:
    labels = torch.cat([dataset[index]["labels"] for index in range(len(dataset))])
    return labels[labels != IGNORE_INDEX].tolist()


@pytest.mark.parametrize("documents", ["cut", "pack", "pad"])
def test_every_byte_after_the_first_is_a_label_once(tmp_path: Path, documents: str) -> None:
    """After the first of all where text is cut, else after the first of its document."""
    (tmp_path / "sub").mkdir()
    for name, content in TEXTS.items():
        (tmp_path / name).write_bytes(content)
    wanted = b"".join(TEXTS.values())[1:] if documents == "cut" else b"".join(content[1:] for content in TEXTS.values())
    assert bytes(labels_of(text(tmp_path / "**/*.txt", documents=documents))) == wanted


def test_the_standard_library_is_text_that_every_machine_has() -> None:
    data = TokenDataset(TextConfig(source="python-stdlib", sequence=256), DataContext())
    assert len(data) > 10_000
    held_out = TokenDataset(TextConfig(source="python-stdlib", sequence=256), DataContext(split="held_out"))
    assert 50 < len(held_out) < len(data) / 10


def write(path: Path, ids: list[int], code: str = "H") -> Path:
    path.write_bytes(array(code, ids).tobytes())
    return path


@pytest.mark.parametrize(("dtype", "code", "largest"), [("uint16", "H", 2**16 - 1), ("uint32", "I", 2**32 - 1)])
def test_tokens_are_read_as_they_were_written(tmp_path: Path, dtype: str, code: str, largest: int) -> None:
    ids = [0, largest, 5, largest - 1, 7, 8]
    data = tokens(write(tmp_path / "a.bin", ids, code), dtype=dtype, vocab_size=largest + 1)
    assert data[0]["tokens"].tolist() == ids[:4]
    assert labels_of(data) == ids[1:]
    assert (data.info.vocab_size, data.info.sequence) == (largest + 1, 4)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=30))
def test_packed_documents_are_those_between_end_tokens(tmp_path_factory: Any, ids: list[int]) -> None:
    path = write(tmp_path_factory.mktemp("tokens") / "a.bin", ids)
    data = tokens(path, documents="pack", end_of_document=0, sequence=2)
    assert labels_of(data) == [token for before, token in pairwise(ids) if before != 0]


@pytest.mark.parametrize(("documents", "padding"), [("pack", 0), ("cut", 0), ("pad", 1)])
def test_rows_count_labels_and_padding(tmp_path: Path, documents: Any, padding: int) -> None:
    """Documents of 3, 1 and 4 tokens."""
    (tmp_path / "a.txt").write_bytes(b"abc|d|efgh")
    config = TextConfig(files=(tmp_path / "a.txt",), separator="|", documents=documents, sequence=2, held_out=0.0)
    data = TokenDataset(config, DataContext())
    assert data.counts["trained"] == len(labels_of(data))
    assert (data.counts["documents"], data.counts["longest"], data.counts["padding"]) == (3, 4, padding)
