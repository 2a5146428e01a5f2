"""The norm of gradients does not depend on how they lie in buffers: it is accurate in each of them."""

from __future__ import annotations

import math

import pytest
import torch

from sley_core.engine.reduction import LONG, joined_norm

GRADIENTS = torch.randn(3_000_017, generator=torch.Generator().manual_seed(1)) * 1e-3


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [1000, LONG - 1, LONG, 1_000_003, len(GRADIENTS)])
def test_a_norm_in_fp32_is_that_in_fp64(kind: float, size: int) -> None:
    found = joined_norm(GRADIENTS.split(size), kind)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.linalg.vector_norm(GRADIENTS.double(), kind), rtol=1e-6, atol=0)


def test_what_has_gaps_counts_once() -> None:
    matrix = GRADIENTS[:1_000_000].view(1000, 1000)
    found = joined_norm([matrix[:, :500], matrix[:, 500:].t()], 2.0)
    torch.testing.assert_close(found, torch.linalg.vector_norm(matrix.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_no_number_is_not_lost(odd: float) -> None:
    gradients = GRADIENTS.clone()
    gradients[-1] = odd
    assert not joined_norm([gradients], 2.0).isfinite()
