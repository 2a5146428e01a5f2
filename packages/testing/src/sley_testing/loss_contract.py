"""Defines the tests that every loss must pass, for a plugin's tests to inherit.

    class TestHuber(LossContract):
        loss = {"use": "robust.huber"}

        def batch(self):
            return torch.randn(4, 6, dtype=torch.float64), {"y": torch.randn(4, 6)}

A layout may split a batch between any samples, so a loss is a sum, and its weight counts the terms of the sum. The tests run in
this process.
"""

import gc
import weakref
from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from sley_core.plan.load import plan_from_dict
from sley_core.protocols import Loss
from sley_testing.parity import relative_error
from sley_testing.plain import split_batch
from sley_testing.plans import Tables, small_plan

Batch = dict[str, Tensor]

EXACT_TOLERANCE = 1e-10  # the relative tolerance of fp64 sums


class LossContract:
    """Tests a loss. Subclass it, set `loss` to the table `[loss]`, and implement `batch`."""

    loss: ClassVar[Tables]

    def batch(self) -> tuple[Tensor, Batch]:
        """Returns an fp64 model output and its batch. Dim 0 of all tensors is the samples: an even number of at least four."""
        raise NotImplementedError("implement `batch`: the output and batch to test the loss with")

    def weightless_batch(self) -> Batch | None:
        """Returns a batch of the size of `batch` with weight 0, for example with ignored labels only. None skips the test."""
        return None

    def test_weight_is_sum_over_microbatches(self) -> None:
        """Expects the weight of a batch to be a positive Python number and the sum of the weights of its microbatches."""
        loss, (_, batch) = self._loss(), self.batch()
        total = loss.weight(batch)
        assert isinstance(total, int | float), f"the weight is a {type(total).__name__}, not a number"
        assert total > 0, f"the weight of a batch is {total}, not positive"
        for size in self._micro_sizes():
            weights = [loss.weight(part) for part in split_batch(batch, size)]
            assert sum(weights) == pytest.approx(total, rel=EXACT_TOLERANCE), (
                f"the weight of a batch is {total:g}, but its microbatches of {size} weigh {sum(weights):g}: "
                "the weight must count the terms of the loss"
            )

    def test_loss_is_sum_over_samples(self) -> None:
        """Expects a scalar loss. Loss and gradients of a batch must equal the sums over its microbatches."""
        output, batch = self.batch()
        expected, gradient = self._loss_and_gradient(output, batch)
        for size in self._micro_sizes():
            parts = zip(torch.split(output, size), split_batch(batch, size), strict=True)
            results = [self._loss_and_gradient(*part) for part in parts]
            total = sum(loss for loss, _ in results)
            assert total == pytest.approx(expected, rel=EXACT_TOLERANCE, abs=EXACT_TOLERANCE), (
                f"the loss of a batch is {expected:.9g}, but its microbatches of {size} sum to {total:.9g}: a mean is not a sum"
            )
            error = relative_error(gradient, torch.cat([part_gradient for _, part_gradient in results]), 1e-30)
            assert error <= EXACT_TOLERANCE, f"the relative error of the gradients of microbatches of {size} is {error:.3g}"

    def test_gradient_matches_finite_differences(self) -> None:
        output, batch = self.batch()
        loss = self._loss()
        try:
            torch.autograd.gradcheck(lambda value: loss.loss(value, batch), output.detach().requires_grad_())
        except RuntimeError as error:  # GradcheckError, or an error in the backward
            raise AssertionError(f"the gradient is not the derivative of the loss: {error}") from error

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_sum_is_at_least_fp32(self, dtype: torch.dtype) -> None:
        """Expects an fp32 or fp64 loss for each output dtype, since half precision cannot hold sums of thousands of terms."""
        output, batch = self.batch()
        narrow_output = output.to(dtype)
        leaf = narrow_output.detach().requires_grad_()
        loss = self._loss().loss(leaf, batch)
        assert loss.dtype in (torch.float32, torch.float64), f"the loss of a {dtype} output is {loss.dtype}"
        loss.backward()  # type: ignore[no-untyped-call]
        expected, gradient = self._loss_and_gradient(narrow_output.double(), batch)
        tolerance, actual = 2**-6 if dtype != torch.float32 else 1e-4, float(loss.detach())
        is_close = actual == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert is_close, f"the loss of a {dtype} output is {actual:.6g}, but {expected:.6g} in fp64"
        assert leaf.grad is not None, f"a {dtype} output gets no gradient"
        assert leaf.grad.dtype == dtype, f"the gradient of a {dtype} output is {leaf.grad.dtype}"
        error = relative_error(gradient, leaf.grad, 1e-30)
        assert error <= tolerance, f"the relative error of the gradient of a {dtype} output is {error:.3g}"

    def test_call_keeps_no_state(self) -> None:
        """Expects a call to keep no output, graph or state, and not to write to its inputs."""
        loss, (output, batch) = self._loss(), self.batch()
        inputs = {"the model's output": output, **{f"the field {name}": value for name, value in batch.items()}}
        copies = {name: value.clone() for name, value in inputs.items()}
        first = loss.weight(batch), float(loss.loss(output, batch))
        changed = [name for name, value in inputs.items() if not torch.equal(value, copies[name])]
        assert not changed, f"the loss writes to {', '.join(changed)}"
        live_output = output.detach().requires_grad_() * 1
        total = loss.loss(live_output, batch)
        total.backward()  # type: ignore[no-untyped-call]
        reference = weakref.ref(live_output)
        del live_output, total
        gc.collect()
        assert reference() is None, "the loss keeps the model's output, and thereby its autograd graph, after the call"
        micro_batch = split_batch(batch, len(output) // 2)[0]
        with torch.no_grad():  # an evaluation between two steps
            loss.weight(micro_batch)
            loss.loss(output[: len(output) // 2], micro_batch)
        second = loss.weight(batch), float(loss.loss(output, batch))
        assert second == first, f"weight and loss of a batch are {first}, but {second} after another batch"

    def test_loss_reads_only_its_fields(self) -> None:
        """Passes only the fields in the loss's `fields`, since a run moves no others to the device."""
        loss, (output, batch) = self._loss(), self.batch()
        fields = getattr(loss, "fields", None)
        if fields is None:
            pytest.skip("the loss has no `fields`")
        try:
            actual = float(loss.loss(output, {name: batch[name] for name in fields}))
        except KeyError as error:
            raise AssertionError(f"the loss reads the field {error}, which is not among its `fields` {fields}") from error
        assert actual == float(loss.loss(output, batch)), f"the loss reads more than its `fields` {fields}"

    def test_batch_without_weight(self) -> None:
        batch = self.weightless_batch()
        if batch is None:
            pytest.skip("`weightless_batch` returns None")
        weight = self._loss().weight(batch)
        assert weight == 0, f"a batch of ignored labels has the weight {weight}"
        loss, gradient = self._loss_and_gradient(self.batch()[0], batch)
        assert loss == 0, f"the loss of a batch of ignored labels is {loss}"
        assert not gradient.count_nonzero(), "a batch of ignored labels has gradients"

    def _loss(self) -> Loss:
        loss: Loss = plan_from_dict(small_plan(loss=self.loss)).loss.build()
        return loss

    def _micro_sizes(self) -> tuple[int, int]:
        """Returns the microbatch sizes to test: 1, and half the batch."""
        num_samples = len(self.batch()[0])
        is_valid = num_samples >= 4 and num_samples % 2 == 0
        assert is_valid, f"`batch` must have an even number of samples, at least four, but has {num_samples}"
        return 1, num_samples // 2

    def _loss_and_gradient(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[float, Tensor]:
        leaf = output.detach().clone().requires_grad_()
        loss = self._loss().loss(leaf, batch)
        assert loss.shape == (), f"the loss is {tuple(loss.shape)}, not a scalar"
        assert loss.requires_grad, "the loss does not depend on the model's output, or has been detached from it"
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None, "the model's output gets no gradient"
        return float(loss.detach()), leaf.grad
