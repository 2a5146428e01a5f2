"""One buffer, aligned views, zero padding."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.engine.buffers import FlatBuffer
from sley_core.sizes import ALIGNMENT_BYTES

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(deadline=None)
@given(SHAPES, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_views_are_aligned_disjoint_and_leave_the_padding_zero(shapes, dtype):
    buffer = FlatBuffer(shapes, dtype, torch.device("cpu"))
    start = buffer.data.data_ptr()
    for number, (view, shape) in enumerate(zip(buffer.views, shapes, strict=True), start=1):
        assert view.shape == shape
        assert view.dtype == dtype
        if view.numel():
            assert (view.data_ptr() - start) % ALIGNMENT_BYTES == 0
        view.fill_(number)
    assert [view.unique().tolist() for view in buffer.views if view.numel()] == [
        [number] for number, shape in enumerate(shapes, start=1) if torch.Size(shape).numel()
    ]
    expected = sum(number * torch.Size(shape).numel() for number, shape in enumerate(shapes, start=1))
    assert buffer.data.double().sum().item() == expected
