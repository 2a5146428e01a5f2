"""Tests what every loss must pass; the tests of a plugin inherit them.

    class TestHuber(LossContract):
        loss = {"use": "robust.huber"}

        def batch(self):
            return torch.randn(4, 6, dtype=torch.float64), {"y": torch.randn(4, 6)}

A layout may cut a batch anywhere, so a loss is a sum and its weight counts what is summed. The tests run in this process: whole
batches are compared with their micro-batches, gradients with finite differences, half precision with fp64.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sley_core.plan.load import plan_from_dict
from sley_core.protocols import Loss
from sley_testing.plans import small_plan

Batch = dict[str, Tensor]

EXACT = 1e-10  # how far sums in fp64 may be from one another, relative


class LossContract:
    """Tests a loss: inherit, set `loss` to the table `[loss]`, write `batch`, and pytest does the rest. half_tolerance: the
    largest relative error of the loss of a half-precision output, compared with the same values in fp64.
    """

    loss: ClassVar[dict[str, Any]]
    half_tolerance: ClassVar[float] = 2**-6

    def batch(self) -> tuple[Tensor, Batch]:
        """Returns a model's output, fp64, and the batch: at least four samples, an even number, along dim 0 of all tensors."""
        raise NotImplementedError("a loss's tests say what it is called with: write `batch`")

    def nothing(self) -> Batch | None:
        """Returns a batch of as many samples as `batch` in which nothing counts, as if every label is ignored; or None."""
        return None

    def test_weight_is_sum_over_samples(self) -> None:
        """A number on the host, known from the batch alone; that of a batch is the sum of its micro-batches' weights."""
        loss, (_, batch) = self._loss(), self.batch()
        whole = loss.weight(batch)
        assert isinstance(whole, int | float), f"the weight is a {type(whole).__name__}, not a number"
        assert whole > 0, f"the weight of a batch in which something counts is {whole}"
        for size in self._sizes():
            parts = [loss.weight(part) for part in _cut(batch, size)]
            assert sum(parts) == pytest.approx(whole, rel=EXACT), (
                f"the weight of a batch is {whole:g}, and its micro-batches of {size} weigh {sum(parts):g}: "
                "it must count what the loss sums"
            )

    def test_loss_is_sum_over_samples(self) -> None:
        """A scalar; that of a batch is the sum of its micro-batches', and so are the gradients."""
        output, batch = self.batch()
        whole, gradient = self._taken(output, batch)
        for size in self._sizes():
            taken = [self._taken(*part) for part in zip(torch.split(output, size), _cut(batch, size), strict=True)]
            total = sum(loss for loss, _ in taken)
            assert total == pytest.approx(whole, rel=EXACT, abs=EXACT), (
                f"the loss of a batch is {whole:.9g}, and of its micro-batches of {size} {total:.9g}: a mean is no sum"
            )
            error = _error(torch.cat([one for _, one in taken]), gradient)
            assert error <= EXACT, f"gradients of micro-batches of {size} differ from the batch's, relative {error:.3g}"

    def test_gradient_matches_finite_differences(self) -> None:
        """Compared with finite differences, in fp64."""
        output, batch = self.batch()
        loss = self._loss()
        try:
            torch.autograd.gradcheck(lambda value: loss.loss(value, batch), output.detach().requires_grad_())
        except RuntimeError as error:  # torch's GradcheckError, and whatever the backward raises
            raise AssertionError(f"the gradient is not the derivative of the loss: {error}") from error

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_sum_is_at_least_fp32(self, dtype: torch.dtype) -> None:
        """Whatever the dtype of the output: sums of thousands of terms have no digits left in half precision."""
        output, batch = self.batch()
        given = output.to(dtype)
        leaf = given.detach().requires_grad_()
        loss = self._loss().loss(leaf, batch)
        assert loss.dtype in (torch.float32, torch.float64), f"the loss of a {dtype} output is {loss.dtype}"
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        wanted, gradient = self._taken(given.double(), batch)
        tolerance = self.half_tolerance if dtype != torch.float32 else 1e-4
        assert float(loss.detach()) == pytest.approx(wanted, rel=tolerance, abs=tolerance), (
            f"the loss of a {dtype} output is {float(loss.detach()):.6g}, and in fp64 {wanted:.6g}"
        )
        assert leaf.grad is not None, f"a {dtype} output gets no gradient"
        assert leaf.grad.dtype == dtype, f"the gradient of a {dtype} output is {leaf.grad.dtype}"
        error = _error(leaf.grad.double(), gradient)
        assert error <= tolerance, f"the gradient of a {dtype} output is off by {error:.3g}, relative"

    def test_call_keeps_no_state(self) -> None:
        """No output, no graph and no state that a later call would see; what it is given is not written to."""
        loss, (output, batch) = self._loss(), self.batch()
        before = output.clone(), {name: value.clone() for name, value in batch.items()}
        first = loss.weight(batch), float(loss.loss(output, batch))
        assert torch.equal(output, before[0]), "the loss writes to the model's output"
        changed = [name for name, value in batch.items() if not torch.equal(value, before[1][name])]
        assert not changed, f"the loss writes to the batch: {changed}"
        kept = output.detach().requires_grad_() * 1
        total = loss.loss(kept, batch)
        total.backward()  # type: ignore[no-untyped-call]  # torch's
        alive = weakref.ref(kept)
        del kept, total
        gc.collect()
        assert alive() is None, "the loss keeps the model's output, and with it what autograd saved, after its call"
        part = _cut(batch, len(output) // 2)[0]
        with torch.no_grad():  # an evaluation between two steps
            loss.weight(part)
            loss.loss(output[: len(output) // 2], part)
        again = loss.weight(batch), float(loss.loss(output, batch))
        assert again == first, f"weight and loss of one batch are {first}, and {again} after another batch"

    def test_loss_reads_only_its_fields(self) -> None:
        """If it has `fields`: only those are moved to the device."""
        loss, (output, batch) = self._loss(), self.batch()
        fields = getattr(loss, "fields", None)
        if fields is None:
            pytest.skip("it names no fields, and is given all")
        try:
            found = float(loss.loss(output, {name: batch[name] for name in fields}))
        except KeyError as error:
            raise AssertionError(f"the loss reads the field {error}, which is not among its `fields` {fields}") from error
        assert found == float(loss.loss(output, batch)), f"the loss reads more than its `fields` {fields}"

    def test_batch_without_weight(self) -> None:
        """Has weight 0, loss 0 and zero gradients, where `nothing` gives one."""
        batch = self.nothing()
        if batch is None:
            pytest.skip("every batch counts")
        weight = self._loss().weight(batch)
        assert weight == 0, f"a batch in which nothing counts weighs {weight}"
        loss, gradient = self._taken(self.batch()[0], batch)
        assert loss == 0, f"the loss of a batch in which nothing counts is {loss}"
        assert not gradient.count_nonzero(), "a batch in which nothing counts has gradients"

    def _loss(self) -> Loss:
        """Returns the loss, made anew."""
        loss: Loss = plan_from_dict(small_plan(loss=self.loss)).loss.build()
        return loss

    def _sizes(self) -> tuple[int, int]:
        """Returns the sizes of micro-batches that are tried."""
        samples = len(self.batch()[0])
        assert samples >= 4, f"`batch` has {samples} samples: an even number, at least four, is wanted"
        assert samples % 2 == 0, f"`batch` has {samples} samples: an even number, at least four, is wanted"
        return 1, samples // 2

    def _taken(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[float, Tensor]:
        """Returns loss and gradient of an output."""
        leaf = output.detach().clone().requires_grad_()
        loss = self._loss().loss(leaf, batch)
        assert loss.shape == (), f"the loss is {tuple(loss.shape)}, not a scalar"
        assert loss.requires_grad, "the loss does not depend on the model's output, or has been detached from it"
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        assert leaf.grad is not None, "the model's output gets no gradient"
        return float(loss.detach()), leaf.grad


def _cut(batch: Mapping[str, Tensor], size: int) -> list[Batch]:
    """Returns the micro-batches of `size` samples."""
    samples = len(next(iter(batch.values())))
    return [{name: value[start : start + size] for name, value in batch.items()} for start in range(0, samples, size)]


def _error(found: Tensor, wanted: Tensor) -> float:
    """Returns the norm of the difference, relative to that of `wanted`."""
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
