"""Each way of making samples against the obvious loop over tokens."""

from __future__ import annotations

from itertools import accumulate, chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.data.dataset import IGNORE_INDEX
from sley_data import packing
from sley_data.documents import locate_window, num_chunks, num_windows
from sley_data.packing import TokenArray

documents_of = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=8)
sequences = st.integers(1, 9)


def as_stream(documents: list[list[int]]) -> tuple[TokenArray, torch.Tensor]:
    tokens = torch.tensor(list(chain.from_iterable(documents))).to(torch.uint8)
    return TokenArray([tokens]), torch.tensor([0, *accumulate(map(len, documents))])


def naive_window(documents: list[list[int]], index: int, sequence: int) -> dict[str, list[int]]:
    """One sample, token by token: `owner` says which document a token of the stream belongs to."""
    owner = [number for number, document in enumerate(documents) for _ in document]
    stream = list(chain.from_iterable(documents))
    start, covered = locate_window(index, len(stream), sequence)
    labels, positions, starts = [], [], [0]
    for place in range(start, start + sequence):
        if place > start and owner[place] != owner[place - 1]:
            starts.append(place - start)
        positions.append(place - start - starts[-1])
        crosses = owner[place + 1] != owner[place]
        labels.append(IGNORE_INDEX if crosses or place < start + covered else stream[place + 1])
    tokens = stream[start : start + sequence]
    return {"tokens": tokens, "labels": labels, "positions": positions, "starts": starts}


@given(st.integers(0, 300), st.integers(1, 40))
def test_windows_cover_every_label_once_and_are_full(num_tokens: int, sequence: int) -> None:
    count = num_windows(num_tokens, sequence)
    if num_tokens < sequence + 1:
        assert count == 0
        return
    labels = []
    for index in range(count):
        start, covered = locate_window(index, num_tokens, sequence)
        assert 0 <= start <= num_tokens - sequence - 1
        assert 0 <= covered < sequence
        labels += range(start + covered + 1, start + sequence + 1)
    assert labels == list(range(1, num_tokens))


@settings(max_examples=40)
@given(documents_of, sequences)
def test_packed(documents: list[list[int]], sequence: int) -> None:
    tokens, offsets = as_stream(documents)
    count = num_windows(len(tokens), sequence)
    oracles = [naive_window(documents, index, sequence) for index in range(count)]
    most = packing.max_documents(offsets, sequence)
    assert most == max((len(oracle["starts"]) for oracle in oracles), default=0)
    for index, oracle in enumerate(oracles):
        sample = packing.pack_sample(tokens, offsets, index, sequence, most)
        ends = [sequence] * (most + 1 - len(oracle["starts"]))
        assert sample["tokens"].tolist() == oracle["tokens"]
        assert sample["labels"].tolist() == oracle["labels"]
        assert sample["positions"].tolist() == oracle["positions"]
        assert sample["cu_seqlens"].tolist() == oracle["starts"] + ends
        assert sample["cu_seqlens"].dtype == torch.int32


@settings(max_examples=40)
@given(documents_of, sequences)
def test_cut(documents: list[list[int]], sequence: int) -> None:
    tokens, _ = as_stream(documents)
    one = [list(chain.from_iterable(documents))]
    for index in range(num_windows(len(tokens), sequence)):
        sample = packing.cut_sample(tokens, index, sequence)
        oracle = naive_window(one, index, sequence)
        assert {name: value.tolist() for name, value in sample.items()} == {name: oracle[name] for name in ("tokens", "labels")}


@settings(max_examples=40)
@given(documents_of, sequences)
def test_padded(documents: list[list[int]], sequence: int) -> None:
    expected = []
    for document in documents:
        for start in range(0, len(document) - 1, sequence):
            inputs = document[start : min(start + sequence, len(document) - 1)]
            labels = document[start + 1 : start + 1 + sequence]
            pad = sequence - len(labels)
            expected.append((inputs + [0] * pad, labels + [IGNORE_INDEX] * pad))
    tokens, offsets = as_stream(documents)
    ends = packing.chunk_ends(offsets, sequence)
    count = int(ends[-1])
    assert count == num_chunks(map(len, documents), sequence)
    samples = [packing.pad_sample(tokens, offsets, ends, index, sequence) for index in range(count)]
    assert [(sample["tokens"].tolist(), sample["labels"].tolist()) for sample in samples] == expected


def test_the_most_documents_are_found_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = torch.tensor([0, 10, 11, 12, 13, 14, 30])
    monkeypatch.setattr(packing, "WINDOW_BLOCK", 2)
    assert packing.max_documents(offsets, 4) == 3


@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=5), st.data())
def test_parts_read_as_one_stream(parts: list[list[int]], data: st.DataObject) -> None:
    whole = list(chain.from_iterable(parts))
    array = TokenArray([torch.tensor(part).to(torch.uint16) for part in parts])
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    found = array.read(start, stop)
    assert (found.dtype, found.tolist(), len(array)) == (torch.int64, whole[start:stop], len(whole))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32])
def test_the_largest_tokens_are_not_negative(dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max
    array = TokenArray([torch.tensor([0, largest, 1, largest]).to(dtype)])
    assert array.read(0, 4).tolist() == [0, largest, 1, largest]
