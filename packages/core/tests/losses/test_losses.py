"""Cross-entropy: weight and sum do not depend on the cut, no softmax is kept, and labels that are not shifted are refused."""

from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sley_core.errors import PlanError, RunError
from sley_core.losses import cross_entropy
from sley_core.losses.cross_entropy import ChunkedCrossEntropy, CrossEntropy
from sley_core.plugin import CrossEntropyConfig
from sley_core.protocols import SplitLogits
from sley_testing.data_contract import LossContract

CLASSES = 11
chunked_sum: Any = ChunkedCrossEntropy.apply


def samples(rows: int = 4, positions: int = 9, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits that want a gradient, and labels of which every third is ignored."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, positions, CLASSES, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (rows, positions), generator=generator)
    labels.view(-1)[::3] = -100
    return logits.requires_grad_(), labels


def oracle(logits: Tensor, labels: Tensor, smoothing: float = 0.0, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Sum and gradient by the definition, in fp64: log-softmax against the smoothed target."""
    wide = logits.detach().double().requires_grad_()
    counts = (labels >= 0) & (labels != ignored)
    target = F.one_hot(labels.masked_fill(~counts, 0), CLASSES).double() * (1 - smoothing) + smoothing / CLASSES
    total = -(target * wide.log_softmax(-1)).sum(-1)[counts].sum()
    return total.detach(), torch.autograd.grad(total, wide)[0]


@pytest.fixture(params=["few", "many"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Few logits at once, or many in chunks of two rows."""
    if request.param == "many":
        monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 2 * CLASSES})
    return str(request.param)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
def test_a_compiled_run_sums_many_logits_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph serves batches with and without ignored labels, and the sum and gradient are those of the definition."""
    from torch._dynamo.utils import counters  # loads the compiler

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 2 * CLASSES})
    loss = CrossEntropy(CrossEntropyConfig(label_smoothing=0.1))
    parts: Any = SimpleNamespace(is_compiled=True, world=SimpleNamespace(simulation=None))
    loss.attach(parts)
    counters.clear()
    logits, labels = samples()
    for batch_labels in (labels, labels.abs() % CLASSES):
        total = loss.loss(logits, {"labels": batch_labels})
        (gradient,) = torch.autograd.grad(total, logits)
        expected, expected_gradient = oracle(logits, batch_labels, 0.1)
        torch.testing.assert_close(total.detach(), expected, rtol=1e-13, atol=0)
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-13, atol=1e-13)
    assert counters["stats"]["unique_graphs"] == 1


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


class TestCrossEntropy(LossContract):
    loss: ClassVar[dict[str, Any]] = {"use": "core.cross_entropy", "label_smoothing": 0.1}

    def batch(self) -> tuple[Tensor, dict[str, Tensor]]:
        logits, labels = samples()
        return logits.detach(), {"labels": labels}

    def weightless_batch(self) -> dict[str, Tensor]:
        return {"labels": torch.full((4, 9), -100)}


class Split(SplitLogits):
    """Stands for logits that ranks share; remembers what it is asked. A label that is no class must not come to it."""

    shape, dtype = (2, 3, CLASSES), torch.float64

    def cross_entropy(self, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        assert int(labels.min()) >= min(0, ignore_index)
        assert int(labels.max()) < CLASSES
        self.asked = labels.shape, ignore_index, smoothing
        return labels.new_ones((), dtype=torch.float64)


def test_logits_that_ranks_share_are_asked_for_the_sum() -> None:
    split, (_, labels) = Split(), samples(2, 3)
    loss = CrossEntropy(CrossEntropyConfig(ignore_index=3, label_smoothing=0.1))
    assert float(loss.loss(split, {"labels": labels})) == 1.0
    assert split.asked == ((2, 3), 3, 0.1)
    with pytest.raises(RunError, match=r"shape \[2, 3, 11\] and torch.float64 do not fit labels of shape \[2, 2\]"):
        loss.loss(split, {"labels": labels[:, :2]})


def test_nothing_but_logits_and_labels_is_kept_for_the_backward() -> None:
    logits, labels = samples(dtype=torch.float32)
    flat, kept = logits.reshape(-1, CLASSES), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda none: none):
        chunked_sum(flat, labels.view(-1), -100, 0.0)
    assert kept == [flat.data_ptr(), labels.data_ptr()]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((torch.zeros(2, 3, 4),), "tuple"),
        (None, "NoneType"),
        (torch.zeros(3, 2, 4), r"do not fit labels of shape \[2, 3\]"),
        (torch.zeros(2, 3, 4, dtype=torch.int64), r"do not fit labels of shape \[2, 3\]"),
    ],
)
def test_an_output_that_is_no_logits_of_the_labels_is_refused(output: Any, message: str) -> None:
    with pytest.raises(RunError, match=message) as error:
        CrossEntropy(CrossEntropyConfig()).loss(output, {"labels": torch.zeros(2, 3, dtype=torch.int64)})
    assert error.value.diagnostics[0].code == "loss-output"


def test_a_missing_field_of_labels_is_the_plans_fault() -> None:
    with pytest.raises(PlanError, match=r"`labels`, but the batch has only `images`, `tokens`") as error:
        CrossEntropy(CrossEntropyConfig()).weight({"tokens": torch.zeros(1), "images": torch.zeros(1)})
    assert error.value.diagnostics[0].path == ("loss", "labels")


@pytest.mark.parametrize("ignored", [-100, -1, 3, 255])
def test_negative_labels_are_ignored_and_so_is_the_index(either_way: str, ignored: int) -> None:
    """Of data that marks padding with -1, of core's own that marks with -100, of images that mark with 255: one rule."""
    logits, labels = samples()
    labels[0, :4] = torch.tensor([-1, -7, ignored, 3])
    loss = CrossEntropy(CrossEntropyConfig(ignore_index=ignored))
    wanted, of_logits = oracle(logits, labels, ignored=ignored)
    found = loss.loss(logits, {"labels": labels})
    assert loss.weight({"labels": labels}) == sum(0 <= label != ignored for label in labels.view(-1).tolist())
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], of_logits, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("output", [torch.zeros(2, 3, CLASSES), Split()], ids=["whole", "shared"])
def test_a_class_that_the_logits_do_not_have_is_named(output: Any) -> None:
    loss = CrossEntropy(CrossEntropyConfig(labels="classes"))
    labels = torch.tensor([[0, CLASSES, 1], [-1, -100, 2]])
    loss.weight({"classes": labels})
    with pytest.raises(RunError, match=f"classes from 0 to {CLASSES - 1}, but the field `classes` has {CLASSES}") as caught:
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
    with pytest.raises(RunError, match=f"has {CLASSES + 4}"):
        loss.loss(logits, on_device)
    loss.loss(logits, on_device)


IDS = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(1))
REPEATED = torch.full((4, 8), 7)
MASKED = torch.where(torch.arange(8) < 3, -100, IDS[:, :-1])


def weight(batch: dict[str, Tensor], **table: bool) -> float:
    return CrossEntropy(CrossEntropyConfig(**table)).weight(batch)


@pytest.mark.parametrize("labels", [IDS[:, :-1], MASKED], ids=["all", "with a prompt that does not count"])
@pytest.mark.parametrize("name", ["tokens", "input_ids"])
def test_tokens_as_labels_are_refused(labels: Tensor, name: str) -> None:
    batch = {name: IDS[:, :-1], "labels": labels}
    with pytest.raises(RunError, match=f"`labels` equals `{name}`") as caught:
        weight(batch)
    assert caught.value.diagnostics[0].code == "labels-not-shifted"
    assert weight(batch, copying=True) == float((labels != -100).sum())


@pytest.mark.parametrize(
    "batch",
    [
        {"tokens": IDS[:, :-1], "labels": IDS[:, 1:]},
        {"tokens": REPEATED, "labels": REPEATED},
        {"tokens": IDS[:, :-1], "labels": torch.full((4, 8), -100)},
        {"tokens": IDS[:, 0], "labels": IDS[:, 0]},
        {"positions": IDS[:, :-1], "labels": IDS[:, :-1]},
        {"tokens": IDS[:, :-1].float(), "labels": IDS[:, :-1]},
    ],
    ids=["shifted", "repeated", "ignored", "a class per sample", "positions", "numbers"],
)
def test_what_may_be_right_is_left_alone(batch: dict[str, Tensor]) -> None:
    assert weight(batch) == float((batch["labels"] != -100).sum())


def test_only_the_first_batch_is_looked_at() -> None:
    loss = CrossEntropy(CrossEntropyConfig())
    loss.weight({"tokens": IDS[:, :-1], "labels": IDS[:, 1:]})
    assert loss.weight({"tokens": IDS, "labels": IDS}) == 36.0
