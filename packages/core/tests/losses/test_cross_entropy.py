"""Cross-entropy: its weight and its sum do not depend on the cut, and it keeps no softmax."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.config import CrossEntropyConfig
from sley_core.errors import PlanError, RunError
from sley_core.losses import cross_entropy
from sley_core.losses.cross_entropy import CrossEntropy, SumOfCrossEntropies, plain_sum
from sley_core.protocols import SplitLogits

CLASSES = 11
chunked_sum: Any = SumOfCrossEntropies.apply


def samples(rows: int = 4, positions: int = 9, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits that want a gradient, and labels of which every third is ignored."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, positions, CLASSES, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (rows, positions), generator=generator)
    labels.view(-1)[::3] = -100
    return logits.requires_grad_(), labels


def oracle(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Sum and gradient by the definition, in fp64: log-softmax against the smoothed target."""
    wide = logits.detach().double().requires_grad_()
    counts = labels != -100
    target = F.one_hot(labels.masked_fill(~counts, 0), CLASSES).double() * (1 - smoothing) + smoothing / CLASSES
    total = -(target * wide.log_softmax(-1)).sum(-1)[counts].sum()
    return total.detach(), torch.autograd.grad(total, wide)[0]


@pytest.fixture(params=["few", "many"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Few logits at once, or many in chunks of two rows."""
    if request.param == "many":
        monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 2 * CLASSES})
    return str(request.param)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sum_and_gradient_are_those_of_the_definition(
    either_way: str, dtype: torch.dtype, tolerance: float, smoothing: float
) -> None:
    logits, labels = samples(dtype=dtype)
    total = CrossEntropy(CrossEntropyConfig(label_smoothing=smoothing)).loss(logits, {"labels": labels})
    (gradient,) = torch.autograd.grad(0.7 * total, logits)
    expected, expected_gradient = oracle(logits, labels, smoothing)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    assert total.item() == pytest.approx(expected.item(), rel=min(tolerance, 1e-6))
    torch.testing.assert_close(gradient.double(), 0.7 * expected_gradient, rtol=tolerance, atol=tolerance)


@given(cuts=st.lists(st.integers(1, 7), max_size=4), ignored=st.sets(st.integers(0, 55)))
@settings(max_examples=50, deadline=None)
def test_weights_and_losses_of_any_cut_add_up_to_the_whole(cuts: list[int], ignored: set[int]) -> None:
    logits, labels = samples(rows=8, positions=7)
    labels.view(-1)[list(ignored)] = -100
    loss = CrossEntropy(CrossEntropyConfig())
    bounds = [0, *sorted({min(cut, 8) for cut in cuts}), 8]
    parts = [slice(*pair) for pair in pairwise(bounds)]
    batches = [{"labels": labels[part]} for part in parts]
    assert sum(loss.weight(batch) for batch in batches) == loss.weight({"labels": labels})
    total = sum(float(loss.loss(logits[part].detach(), batch)) for part, batch in zip(parts, batches, strict=True))
    assert total == pytest.approx(loss.loss(logits, {"labels": labels}).item(), rel=1e-12)


def test_the_weight_is_a_python_number_from_the_labels_alone() -> None:
    weight = CrossEntropy(CrossEntropyConfig()).weight({"labels": torch.tensor([[1, -100, 2], [-100, -100, 0]])})
    assert isinstance(weight, float)
    assert weight == 3.0


def test_another_field_and_another_ignored_label() -> None:
    loss = CrossEntropy(CrossEntropyConfig(labels="targets", ignore_index=0))
    batch = {"targets": torch.tensor([0, 1, 2, 0])}
    assert loss.weight(batch) == 2.0
    logits = torch.zeros(4, 3, dtype=torch.float64)
    assert float(loss.loss(logits, batch)) == pytest.approx(2 * torch.tensor(3.0).double().log().item())


class Split(SplitLogits):
    """Stands for logits that ranks share; remembers what it is asked."""

    shape = (4, 9, CLASSES)
    dtype = torch.float64

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        self.asked = labels.shape, ignore_index, smoothing
        return labels.new_ones((), dtype=torch.float64)


def test_logits_that_ranks_share_are_asked_for_the_sum() -> None:
    split, (_, labels) = Split(), samples()
    loss = CrossEntropy(CrossEntropyConfig(ignore_index=3, label_smoothing=0.1))
    assert float(loss.loss(split, {"labels": labels})) == 1.0
    assert split.asked == ((4, 9), 3, 0.1)
    with pytest.raises(RunError, match=r"shape \[4, 9, 11\] and torch.float64 do not fit labels of shape \[4, 8\]"):
        loss.loss(split, {"labels": labels[:, :8]})


def test_without_a_label_that_counts_loss_and_gradient_are_zero(either_way: str) -> None:
    logits, labels = samples()
    labels.fill_(-100)
    loss = CrossEntropy(CrossEntropyConfig())
    total = loss.loss(logits, {"labels": labels})
    (gradient,) = torch.autograd.grad(total, logits)
    assert (loss.weight({"labels": labels}), total.item()) == (0.0, 0.0)
    assert not gradient.any()


def test_extreme_logits_stay_finite(either_way: str) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]] * 20, requires_grad=True)
    labels = torch.tensor([0, 0] * 20)
    total = CrossEntropy(CrossEntropyConfig()).loss(logits, {"labels": labels})
    (gradient,) = torch.autograd.grad(total, logits)
    assert total.item() == pytest.approx(20 * 2e4)
    torch.testing.assert_close(gradient[1], torch.tensor([-1.0, 1.0, 0.0]))


def test_the_chunked_sum_is_differentiated_rightly() -> None:
    logits, labels = samples(rows=2, positions=3)
    assert torch.autograd.gradcheck(lambda x: chunked_sum(x.reshape(-1, CLASSES), labels.view(-1), -100, 0.2), logits)


def test_nothing_but_logits_and_labels_is_kept_for_the_backward() -> None:
    logits, labels = samples(dtype=torch.float32)
    flat, kept = logits.reshape(-1, CLASSES), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda none: none):
        chunked_sum(flat, labels.view(-1), -100, 0.0)
    assert kept == [flat.data_ptr(), labels.data_ptr()]


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Remembers the largest tensor of a type that any operation returns."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.dtype = dtype
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype == self.dtype:
                self.numel = max(self.numel, tensor.numel())
        return result


def test_narrow_logits_are_widened_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 2 * CLASSES})
    logits, labels = samples(rows=8, dtype=torch.bfloat16)
    with Largest(torch.float32) as chunked:
        total = CrossEntropy(CrossEntropyConfig()).loss(logits, {"labels": labels})
        torch.autograd.grad(total, logits)
    with Largest(torch.float32) as plain:
        plain_sum(logits.reshape(-1, CLASSES), labels.view(-1), -100, 0.0)
    assert plain.numel == logits.numel()
    assert chunked.numel <= max(2 * CLASSES, labels.numel())


@pytest.mark.parametrize("output", [(torch.zeros(2, 3, 4),), {"logits": torch.zeros(2, 3, 4)}, None])
def test_an_output_that_is_no_tensor_is_named(output: Any) -> None:
    with pytest.raises(RunError, match=type(output).__name__) as error:
        CrossEntropy(CrossEntropyConfig()).loss(output, {"labels": torch.zeros(2, 3, dtype=torch.int64)})
    assert error.value.diagnostics[0].code == "loss-output"


@pytest.mark.parametrize("output", [torch.zeros(2, 3), torch.zeros(3, 2, 4), torch.zeros(2, 3, 4, dtype=torch.int64)])
def test_logits_that_do_not_fit_the_labels_are_refused_with_both_shapes(output: Tensor) -> None:
    with pytest.raises(RunError, match=r"do not fit labels of shape \[2, 3\]"):
        CrossEntropy(CrossEntropyConfig()).loss(output, {"labels": torch.zeros(2, 3, dtype=torch.int64)})


def test_a_missing_field_of_labels_is_the_plans_fault() -> None:
    with pytest.raises(PlanError, match=r"`labels`, but a batch holds `images`, `tokens`") as error:
        CrossEntropy(CrossEntropyConfig()).weight({"tokens": torch.zeros(1), "images": torch.zeros(1)})
    assert error.value.diagnostics[0].path == ("loss", "labels")


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, "0.1", True])
def test_smoothing_is_a_fraction_below_one(smoothing: Any) -> None:
    with pytest.raises(ValidationError, match="label_smoothing"):
        CrossEntropyConfig(label_smoothing=smoothing)


def by_hand(logits: Tensor, labels: Tensor, ignored: int) -> tuple[float, Tensor, Tensor]:
    """How many labels count, and torch's own sum and gradient over these alone."""
    counts = (labels >= 0) & (labels != ignored)
    wide = logits.detach().requires_grad_()
    total = F.cross_entropy(wide[counts], labels[counts], reduction="sum")
    return float(counts.sum()), total.detach(), torch.autograd.grad(total, wide)[0]


@pytest.mark.parametrize("ignored", [-100, -1, 3, 255])
def test_negative_labels_are_ignored_and_so_is_the_index(either_way: str, ignored: int) -> None:
    """Of data that marks padding with -1, of core's own that marks with -100, of images that mark with 255: one rule."""
    logits, labels = samples()
    labels[0, :4] = torch.tensor([-1, -7, ignored, 3])
    loss = CrossEntropy(CrossEntropyConfig(ignore_index=ignored))
    weight, wanted, of_logits = by_hand(logits, labels, ignored)
    found = loss.loss(logits, {"labels": labels})
    assert loss.weight({"labels": labels}) == weight
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], of_logits, rtol=1e-13, atol=1e-15)


class Shared(SplitLogits):
    """Logits of which no rank has all; a label that is no class must not come to them."""

    shape, dtype = (2, 3, CLASSES), torch.float32

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        assert int(labels.min()) == ignore_index
        return torch.zeros(())


@pytest.mark.parametrize("output", [torch.zeros(2, 3, CLASSES), Shared()], ids=["whole", "shared"])
def test_a_class_that_the_logits_do_not_have_is_named(output: Any) -> None:
    loss = CrossEntropy(CrossEntropyConfig(labels="classes"))
    labels = torch.tensor([[0, CLASSES, 1], [-1, -100, 2]])
    with pytest.raises(RunError, match=f"`classes` has the class {CLASSES}, but the model's logits have {CLASSES}") as caught:
        loss.loss(output, {"classes": labels})
    assert caught.value.diagnostics[0].code == "label-out-of-range"
    loss.loss(output, {"classes": labels.clamp(max=CLASSES - 1)})


def test_a_device_is_not_asked_for_the_highest_class() -> None:
    """What was weighed on the host says it: `meta` has no values that could be read."""
    loss = CrossEntropy(CrossEntropyConfig())
    logits, labels = torch.zeros(2, 3, CLASSES, device="meta"), torch.tensor([[0, 2, CLASSES + 4]])
    on_device = {"labels": torch.zeros(2, 3, dtype=torch.int64, device="meta")}
    loss.loss(logits, on_device)
    loss.weight({"labels": labels})
    with pytest.raises(RunError, match=f"has the class {CLASSES + 4}"):
        loss.loss(logits, on_device)
    loss.loss(logits, on_device)
