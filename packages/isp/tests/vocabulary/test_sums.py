"""What slices of the classes add up to is the cross-entropy over all of them; no process but this one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sley_core.losses import cross_entropy
from sley_core.losses.cross_entropy import plain_sum
from sley_isp import vocabulary_sums as sums

IGNORED = -100


def slices(num_classes: int, count: int) -> list[sums.Classes]:
    """As core cuts rows: equal stretches, the last ones shorter or empty."""
    rows = -(-num_classes // count)
    sizes = [max(0, min(rows, num_classes - at * rows)) for at in range(count)]
    return [sums.Classes(at * rows, size, num_classes) for at, size in enumerate(sizes)]


def together(logits: Tensor, labels: Tensor, count: int, smoothing: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sum and gradient, as `count` ranks find them."""
    targets = labels.masked_fill(labels == IGNORED, sums.NO_TARGET)
    classes = slices(logits.shape[1], count)
    parts = [logits.detach()[:, one.first : one.first + one.size].clone() for one in classes]
    found = [sums.statistics(part, targets, one, smoothing) for part, one in zip(parts, classes, strict=True)]
    combined = sums.combine(torch.stack(found))
    for part, one in zip(parts, classes, strict=True):
        sums.to_gradient(part, targets, one, combined.log_sum, torch.tensor(scale, dtype=torch.float64), smoothing)
    return sums.losses(combined, targets, logits.shape[1], smoothing).sum(), torch.cat(parts, 1)


def samples(num_tokens: int, num_classes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 3 * torch.randn(num_tokens, num_classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes, (num_tokens,), generator=generator)
    labels[::3] = IGNORED
    return logits.to(dtype).requires_grad_(), labels


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 6), st.sampled_from([0.0, 0.1]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_cut_gives_the_sum_over_all(num_tokens: int, num_classes: int, count: int, smoothing: float, few: bool) -> None:
    """Also where ranks have no class at all, and a chunk at a time."""
    logits, labels = samples(num_tokens, num_classes)
    expected = plain_sum(logits, labels, IGNORED, smoothing)
    (gradient,) = torch.autograd.grad(0.7 * expected, logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 4 if few else 1 << 19})
        total, found = together(logits, labels, count, smoothing, 0.7)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


def test_narrow_logits_are_summed_in_single_precision() -> None:
    logits, labels = samples(50, 37, torch.bfloat16)
    expected = plain_sum(logits, labels, IGNORED, 0.1)
    (gradient,) = torch.autograd.grad(expected, logits)
    total, found = together(logits, labels, 3, 0.1)
    assert (total.dtype, found.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, gradient, rtol=2**-7, atol=2**-9)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]])
    total, gradient = together(logits, torch.tensor([0, 0]), 2, 0.0)
    assert float(total) == pytest.approx(2e4)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, 0.0], [-1.0, 1.0, 0.0]]))


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_that_no_rank_has_is_not_passed_over(label: int) -> None:
    total, _ = together(torch.zeros(1, 3), torch.tensor([label]), 2, 0.0)
    assert float(total) == torch.inf
