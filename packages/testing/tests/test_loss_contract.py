"""The contract of losses holds for a simple one, and says what is wrong with each that is wrong on purpose."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sley_testing.loss_contract import LossContract

pytestmark = pytest.mark.usefixtures("wrong")

WRONG = [
    ("Mean", "it_is_a_sum_over_samples", (), "a mean is no sum"),
    ("Calls", "its_weight_is_a_sum_over_samples", (), "the weight of a batch is 1, and its micro-batches of 1 weigh 6"),
    ("Narrow", "it_sums_in_fp32_at_least", (torch.bfloat16,), "the loss of a torch.bfloat16 output is torch.bfloat16"),
    ("Twice", "its_gradient_is_its_derivative", (), "the gradient is not the derivative of the loss"),
    ("Keeps", "a_call_leaves_nothing", (), "the loss keeps the model's output"),
    ("Running", "a_call_leaves_nothing", (), "weight and loss of one batch are .* after another batch"),
    ("Writes", "a_call_leaves_nothing", (), "the loss writes to the model's output"),
    ("Fields", "it_reads_the_fields_that_it_names", (), "reads the field 'mask', which is not among its `fields`"),
    ("Detached", "it_is_a_sum_over_samples", (), "does not depend on the model's output"),
    ("Each", "it_is_a_sum_over_samples", (), r"the loss is \(6,\), not a scalar"),
    ("Empty", "a_batch_in_which_nothing_counts", (), "a batch in which nothing counts weighs 1"),
]


class OfLosses(LossContract):
    """Six samples of four numbers, some of them masked."""

    def batch(self) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        output, y = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
        return output, {"y": y, "mask": torch.rand(6, 4, generator=generator) > 0.3}

    def nothing(self) -> dict[str, Tensor]:
        return {"y": torch.ones(6, 4), "mask": torch.zeros(6, 4, dtype=torch.bool)}


class TestNaive(OfLosses):
    loss: ClassVar[dict[str, Any]] = {"factory": "wrong_losses:Naive"}


@pytest.mark.parametrize(("name", "test", "arguments", "words"), WRONG)
def test_what_is_wrong_is_said(name: str, test: str, arguments: tuple[Any, ...], words: str) -> None:
    class Wrong(OfLosses):
        loss: ClassVar[dict[str, Any]] = {"factory": f"wrong_losses:{name}"}

    with pytest.raises(AssertionError, match=words):
        getattr(Wrong(), f"test_{test}")(*arguments)
