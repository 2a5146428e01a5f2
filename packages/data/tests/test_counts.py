from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sley_data.documents import num_chunks, num_windows, window


@given(st.integers(0, 300), st.integers(1, 40))
def test_windows_cover_every_label_once_and_are_full(num_tokens: int, sequence: int) -> None:
    count = num_windows(num_tokens, sequence)
    if num_tokens < sequence + 1:
        assert count == 0
        return
    labels = []
    for index in range(count):
        start, covered = window(index, num_tokens, sequence)
        assert 0 <= start <= num_tokens - sequence - 1
        assert 0 <= covered < sequence
        labels += range(start + covered + 1, start + sequence + 1)
    assert labels == list(range(1, num_tokens))


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 20))
def test_chunks_are_what_walking_the_documents_gives(lengths: list[int], sequence: int) -> None:
    walked = sum(1 for length in lengths for _ in range(1, length, sequence))
    assert num_chunks(lengths, sequence) == walked
