from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sley_data.packing import TokenArray

DTYPES = [torch.uint8, torch.uint16, torch.uint32]


@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=5), st.data())
def test_parts_read_as_one_stream(parts: list[list[int]], data: st.DataObject) -> None:
    whole = list(chain.from_iterable(parts))
    array = TokenArray([torch.tensor(part).to(torch.uint16) for part in parts])
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    found = array.read(start, stop)
    assert (found.dtype, found.tolist(), len(array)) == (torch.int64, whole[start:stop], len(whole))


@given(st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=4), st.integers(1, 7))
def test_a_token_is_found_wherever_it_lies(parts: list[list[int]], block: int) -> None:
    array = TokenArray([torch.tensor(part, dtype=torch.int64).to(torch.uint16) for part in parts])
    expected = [place for place, token in enumerate(chain.from_iterable(parts)) if token == 2]
    assert array.find(2, block=block).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_tokens_are_not_negative(dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max
    array = TokenArray([torch.tensor([0, largest, 1, largest]).to(dtype)])
    assert array.read(0, 4).tolist() == [0, largest, 1, largest]
    assert array.find(largest).tolist() == [1, 3]
