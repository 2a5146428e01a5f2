"""Megatron's token files: the index says types and documents; one that is damaged is named, with what is wrong."""

import struct
from array import array
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from sley_core.data.dataset import IGNORE_INDEX, DataContext
from sley_data.datasets import TokenDataset, check_token_dataset
from sley_data.plugin import TextConfig, TokensConfig

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[], []], [], [[7, 8, 9, 10, 11]]]
TEXTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11]]
"""The documents that have tokens, of all their sequences."""


def write(prefix: Path, documents: Any = DOCUMENTS, code: int = 8, *, modes: bool = False) -> Path:
    """Writes what Megatron's documents say, field by field; returns the path of the tokens."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    ends = [0, *accumulate(map(len, documents))]
    form, width = {4: ("i", 4), 8: ("H", 2)}[code]
    fields = [
        b"MMIDIDX\0\0",
        struct.pack("<Q", 1),
        struct.pack("<B", code),
        struct.pack("<Q", len(sequences)),
        struct.pack("<Q", len(ends)),
        *(struct.pack("<i", length) for length in lengths),
        *(struct.pack("<q", width * start) for start in list(accumulate(lengths, initial=0))[:-1]),
        *(struct.pack("<q", end) for end in ends),
        bytes(len(sequences) if modes else 0),
    ]
    prefix.with_suffix(".idx").write_bytes(b"".join(fields))
    tokens = prefix.with_suffix(".bin")
    tokens.write_bytes(b"".join(array(form, sequence).tobytes() for sequence in sequences))
    return tokens


def config(*files: Path, **more: Any) -> TokensConfig:
    return TokensConfig(files=files, **{"sequence": 2, "vocab_size": 60000, **more})


def labels_of(table: TokensConfig) -> list[int]:
    dataset = TokenDataset(table, DataContext())
    return [label for at in range(len(dataset)) for label in dataset[at]["labels"].tolist() if label != IGNORE_INDEX]


@pytest.mark.parametrize("name", ["a.bin", "a.idx", "a.*"])
@pytest.mark.parametrize("code", [4, 8])
@pytest.mark.parametrize("documents", ["cut", "pack", "pad"])
def test_documents_are_those_of_the_index(tmp_path: Path, documents: str, code: int, name: str) -> None:
    write(tmp_path / "a", code=code, modes=name == "a.idx")
    table = config(tmp_path / name, documents=documents)
    assert list(check_token_dataset(table, evaluates=False)) == []
    whole = [token for text in TEXTS for token in text]
    assert labels_of(table) == (whole[1:] if documents == "cut" else [token for text in TEXTS for token in text[1:]])


def test_files_with_and_without_an_index_are_one_stream(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(array("H", [40, 41, 0, 42]).tobytes())
    wide = write(tmp_path / "wide", [[[70_000, 70_001]], [[70_002, 70_003, 70_004]]], code=4)
    table = config(tmp_path / "raw.bin", wide, write(tmp_path / "narrow"), documents="pack", vocab_size=65_536)
    (problem,) = check_token_dataset(table, evaluates=False)
    assert problem.code == "data-documents"
    options: dict[str, Any] = {"end_of_document": 0, "documents": "pack", "vocab_size": 80_000, "dtype": "uint32"}
    dataset = TokenDataset(config(wide, write(tmp_path / "narrow"), **options), DataContext())
    assert dataset[0]["tokens"].tolist() == [70_000, 70_001]
    assert dataset[2]["tokens"].tolist() == [70_004, 1], "a sample of both"
    raw = config(tmp_path / "raw.bin", write(tmp_path / "narrow"), tmp_path / "raw.bin", end_of_document=0, documents="pack")
    assert labels_of(raw) == [41, 0, 2, 3, 4, 6, 8, 9, 10, 11]
    other = TokenDataset(config(write(tmp_path / "b", [[each] for each in TEXTS]), documents="pack"), DataContext())
    assert TokenDataset(config(tmp_path / "narrow.bin", documents="pack"), DataContext()).data_digest == other.data_digest
    one = TokenDataset(config(write(tmp_path / "c", [TEXTS]), documents="pack"), DataContext())
    assert one.data_digest != other.data_digest, "other boundaries"


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (slice(0, 9), b"TNTIDX\0\0\0", "is not an index of Megatron"),
        (slice(20, None), b"", "cut off in its header, after 20 bytes"),
        (slice(0, None), b"", "cut off in its header, after 0 bytes"),
        (slice(9, 17), struct.pack("<Q", 2), "version 2"),
        (slice(17, 18), b"\7", "the type float32"),
        (slice(17, 18), b"\4", "tokens of 4 bytes, but the `.bin` file has 22 bytes"),
        (slice(18, 26), struct.pack("<Q", 7), "7 sequences in 5 documents need"),
        (slice(90, None), b"", "has 90 bytes, but 6 sequences in 5 documents need"),
        (slice(34, 42), struct.pack("<ii", 6, -2), "negative length"),
        (slice(34, 42), struct.pack("<ii", 2, 2), "with gaps or overlaps"),
        (slice(146, 154), struct.pack("<q", 5), "documents that do not contain its 6 sequences in order"),
        (slice(114, 122), struct.pack("<q", 4), "documents that do not contain its 6 sequences in order"),
    ],
)  # fmt: skip
def test_a_wrong_index_is_named(tmp_path: Path, place: slice, value: bytes, why: str) -> None:
    index = write(tmp_path / "a").with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[place] = value
    index.write_bytes(content)
    (problem,) = check_token_dataset(config(tmp_path / "a.bin"), evaluates=False)
    assert problem.message.startswith(f"`{index}` ")
    assert why in problem.message


def test_a_pair_is_whole_and_no_text(tmp_path: Path) -> None:
    index = write(tmp_path / "a").with_suffix(".idx")
    (problem,) = check_token_dataset(TextConfig(files=(index,), sequence=2), evaluates=False)
    assert "data.tokens" in str(problem.hint)
    index.with_suffix(".bin").unlink()
    (problem,) = check_token_dataset(config(index), evaluates=False)
    assert (problem.code, "a.bin" in problem.message) == ("data-missing", True)
