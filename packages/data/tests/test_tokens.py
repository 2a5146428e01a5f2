from __future__ import annotations

from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sley_core.data.dataset import IGNORED, DataContext, Split
from sley_core.errors import PlanError
from sley_data.config import TokensConfig
from sley_data.datasets import TokensDataset


def write(path: Path, tokens: list[int], code: str = "H") -> Path:
    path.write_bytes(array(code, tokens).tobytes())
    return path


def dataset(*files: Path, split: Split = "train", **more: Any) -> TokensDataset:
    options = {"sequence": 4, "vocab_size": 60000, **more}
    return TokensDataset(TokensConfig(files=files, **options), DataContext(split=split))


def labels_of(dataset: TokensDataset) -> list[int]:
    labels = torch.cat([dataset[index]["labels"] for index in range(len(dataset))])
    return labels[labels != IGNORED].tolist()


@pytest.mark.parametrize(("dtype", "code", "largest"), [("uint16", "H", 2**16 - 1), ("uint32", "I", 2**32 - 1)])
def test_tokens_are_read_as_they_were_written(tmp_path: Path, dtype: str, code: str, largest: int) -> None:
    tokens = [0, largest, 5, largest - 1, 7, 8]
    data = dataset(write(tmp_path / "a.bin", tokens, code), dtype=dtype, vocab_size=largest + 1)
    assert data[0]["tokens"].tolist() == tokens[:4]
    assert labels_of(data) == tokens[1:]
    assert (data.info.vocab_size, data.info.sequence) == (largest + 1, 4)


def test_files_are_one_stream_in_the_order_of_the_plan(tmp_path: Path) -> None:
    write(tmp_path / "z.bin", [1, 2, 3])
    write(tmp_path / "shard-1.bin", [7, 8, 9])
    write(tmp_path / "shard-0.bin", [4, 5, 6])
    assert labels_of(dataset(tmp_path / "z.bin", tmp_path / "shard-*.bin")) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_documents_end_at_their_token(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 3, 0, 4, 5, 0, 6, 7])
    packed = dataset(path, documents="pack", end_of_document=0)
    assert labels_of(packed) == [2, 3, 0, 5, 0, 7]
    assert packed[1]["tokens"].tolist() == [4, 5, 0, 6]
    assert packed[1]["cu_seqlens"].tolist() == [0, 3, 4]
    assert packed[1]["positions"].tolist() == [0, 1, 2, 0]
    padded = dataset(path, documents="pad", end_of_document=0)
    assert [padded[index]["tokens"].tolist() for index in range(len(padded))] == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 0, 0, 0]]
    assert labels_of(padded) == [2, 3, 0, 5, 0, 7]


@given(st.lists(st.integers(0, 3), min_size=3, max_size=30))
def test_packed_documents_are_those_between_end_tokens(tmp_path_factory: Any, tokens: list[int]) -> None:
    path = write(tmp_path_factory.mktemp("tokens") / "a.bin", tokens)
    data = dataset(path, documents="pack", end_of_document=0, sequence=2)
    assert labels_of(data) == [token for before, token in pairwise(tokens) if before != 0]


def test_odd_sizes_and_missing_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(PlanError, match="3 bytes, which is no whole number of uint16 tokens"):
        len(dataset(tmp_path / "odd.bin"))
    with pytest.raises(PlanError, match="there is no file"):
        len(dataset(tmp_path / "none.bin"))
