"""Tests the rounding of shards to e4m3 numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sley_isp.config import FP8_BYTES
from sley_isp.param_group import decode, encode


def rounded(shard: Tensor) -> Tensor:
    full = torch.empty_like(shard)
    decode(encode(shard)[None], full)
    return full


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=300),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_the_error_of_e4m3_numbers(values: list[float], dtype: torch.dtype) -> None:
    """Three bits of mantissa, and subnormals of a block whose largest element is at least 224 units."""
    weight = torch.tensor(values, dtype=dtype)
    error = (rounded(weight) - weight).abs().double()
    assert (error <= 2**-4 * weight.abs().double() + 2**-18 * weight.abs().max().double()).all()
    assert torch.equal(rounded(rounded(weight)), rounded(weight)), "a rounded weight is not rounded again"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_e4m3_numbers_of_a_weight_that_is_not_finite_are_not_finite(value: float) -> None:
    weight = torch.ones(256)
    weight[3] = value
    assert rounded(weight)[3].isnan()
    assert rounded(weight)[128:].eq(1.0).all()


def test_the_size_of_encoded_shards() -> None:
    """The estimator multiplies elements by FP8_BYTES."""
    assert encode(torch.zeros(1280)).nbytes == 1280 * FP8_BYTES
