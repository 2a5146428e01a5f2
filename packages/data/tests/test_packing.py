"""Compares each way of making samples with the obvious loop over tokens."""

from itertools import accumulate, chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.data.dataset import IGNORE_INDEX
from sley_data import datasets
from sley_data.datasets import StreamSamples, count_windows, locate_window
from sley_data.plugin import DocumentMode
from sley_data.streams import TokenStream

DOCUMENTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=8)
SEQUENCES = st.integers(1, 9)


def build_samples(documents: list[list[int]], way: DocumentMode, sequence: int) -> StreamSamples:
    tokens = np.array(list(chain.from_iterable(documents)), np.uint8)
    offsets = np.array([0, *accumulate(map(len, documents))])
    return StreamSamples(TokenStream([tokens], offsets), way, sequence)


def naive_window(documents: list[list[int]], index: int, sequence: int) -> dict[str, list[int]]:
    """Returns one sample, token by token. `owners` has the document of each token of the stream."""
    owners = [number for number, document in enumerate(documents) for _ in document]
    stream = list(chain.from_iterable(documents))
    start, num_covered = locate_window(index, len(stream), sequence)
    labels, positions, starts = [], [], [0]
    for position in range(start, start + sequence):
        if position > start and owners[position] != owners[position - 1]:
            starts.append(position - start)
        positions.append(position - start - starts[-1])
        is_ignored = owners[position + 1] != owners[position] or position < start + num_covered
        labels.append(IGNORE_INDEX if is_ignored else stream[position + 1])
    return {"tokens": stream[start : start + sequence], "labels": labels, "positions": positions, "starts": starts}


@given(st.integers(0, 300), st.integers(1, 40))
def test_windows_cover_every_label_once_and_are_full(num_tokens: int, sequence: int) -> None:
    count = count_windows(num_tokens, sequence)
    if num_tokens < sequence + 1:
        assert count == 0
        return
    labels = []
    for index in range(count):
        start, num_covered = locate_window(index, num_tokens, sequence)
        assert 0 <= start <= num_tokens - sequence - 1
        assert 0 <= num_covered < sequence
        labels += range(start + num_covered + 1, start + sequence + 1)
    assert labels == list(range(1, num_tokens))


@settings(max_examples=40)
@given(DOCUMENTS, SEQUENCES)
def test_packed_and_cut_windows(documents: list[list[int]], sequence: int) -> None:
    packed = build_samples(documents, "pack", sequence)
    expected = [naive_window(documents, index, sequence) for index in range(len(packed))]
    assert packed.max_documents_per_window == max((len(window["starts"]) for window in expected), default=0)
    for index, window in enumerate(expected):
        sample = packed.read_sample(index)
        padding = [sequence] * (packed.max_documents_per_window + 1 - len(window["starts"]))
        window["cu_seqlens"] = window.pop("starts") + padding
        assert {name: values.tolist() for name, values in sample.items()} == window
        assert sample["cu_seqlens"].dtype == np.int32
    cut, text = build_samples(documents, "cut", sequence), [list(chain.from_iterable(documents))]
    for index in range(len(cut)):
        window = naive_window(text, index, sequence)
        assert {name: values.tolist() for name, values in cut.read_sample(index).items()} == {
            name: window[name] for name in ("tokens", "labels")
        }


@settings(max_examples=40)
@given(DOCUMENTS, SEQUENCES)
def test_padded_documents(documents: list[list[int]], sequence: int) -> None:
    expected = []
    for document in documents:
        for start in range(0, len(document) - 1, sequence):
            inputs = document[start : min(start + sequence, len(document) - 1)]
            labels = document[start + 1 : start + 1 + sequence]
            num_padding = sequence - len(labels)
            expected.append((inputs + [0] * num_padding, labels + [IGNORE_INDEX] * num_padding))
    padded = build_samples(documents, "pad", sequence)
    assert len(padded) == len(expected)
    samples = [padded.read_sample(index) for index in range(len(padded))]
    assert [(sample["tokens"].tolist(), sample["labels"].tolist()) for sample in samples] == expected


def test_the_most_documents_are_counted_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_WINDOWS_PER_BLOCK", 2)
    assert build_samples([[0] * size for size in (10, 1, 1, 1, 1, 16)], "pack", 4).max_documents_per_window == 3


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=5), st.data())
def test_parts_read_as_one_stream(parts: list[list[int]], data: st.DataObject) -> None:
    tokens = list(chain.from_iterable(parts))
    stream = TokenStream([np.array(part, np.uint16) for part in parts], np.array([0, len(tokens)]))
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    values = stream.read(start, stop)
    assert (values.dtype, values.tolist(), len(stream)) == (np.int64, tokens[start:stop], len(tokens))
