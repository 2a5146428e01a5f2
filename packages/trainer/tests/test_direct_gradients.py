"""Weight gradients that linears multiply into the store are those of autograd, at once and in a split backward."""

import pytest
import torch

from sley_core.engine.direct import WeightGradientSink, WeightQueue
from sley_core.errors import RunError
from sley_testing.plans import small_plan
from sley_testing.runs import record


@pytest.mark.parametrize("mode", ["autograd", "direct"])
def test_autograd_sees_no_weight_gradient_of_a_linear(texts, mode):
    """In direct mode the product is written where it is summed: autograd gets nothing to keep."""
    seen = []

    def watch(run):
        parameter = run.registry["blocks.0.feed_forward.up.weight"].parameter
        # a hook on the gradient itself would be a reason to make one
        parameter.register_post_accumulate_grad_hook(lambda summed: seen.append(summed.grad is not None))

    record(small_plan(precision__accumulation=mode), 1, folder=texts, prepare=watch)
    assert seen == [mode == "autograd"] * 4


PLACE = (0, 0)


class Given(torch.autograd.Function):
    """Hands its output's gradient over, as a linear does."""

    @staticmethod
    def forward(ctx, x, sink):
        ctx.sink = sink
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.sink(gradient, x, is_shared=ctx.sink.shares_memory(gradient))
        return gradient * 1.0, None


def products(branch):
    """Returns the product of each of three steps, and its value. branch: (x, gives, step), of a linear that is called last, so
    that its backward runs first; a step may raise.
    """
    queue, made = WeightQueue(), []
    sink = WeightGradientSink(lambda rows, inputs: made.append(rows.t() @ inputs), queue)
    for step in range(3):
        x = torch.arange(1.0, 7.0).reshape(3, 2).requires_grad_()
        hidden = x * 1.0
        with queue.collect(PLACE):
            result = branch(hidden, lambda hidden=hidden: Given.apply(hidden, sink), step)
            (result * torch.full_like(result, 2.0)).sum().backward()
        queue.run(PLACE)
    return made, torch.full((3, 2), 2.0).t() @ x.detach()


def zero(gradient):
    gradient.zero_()


def written_beside(x, gives, step):
    beside = x * 1.0
    beside.register_hook(zero)
    return gives() + beside


def written_as_a_view(x, gives, step):
    beside = x.reshape(2, 3) * 1.0
    beside.register_hook(zero)
    return gives().view(2, 3) + beside


def written_uncounted(x, gives, step):
    beside = x * 1.0
    beside.register_hook(lambda gradient: zero(gradient.data))
    return gives() + beside


def not_written(x, gives, step):
    return gives() + x


def written_later(x, gives, step):
    return written_beside(x, gives, step) if step == 2 else not_written(x * 1.0, gives, step)


def kept_and_written(x, gives, step):
    kept, beside = [], x * 1.0
    beside.register_hook(lambda gradient: zero(kept[0]))
    given = gives()
    given.register_hook(kept.append)
    return given * 3.0 + beside


def input_written(x, gives, step):
    beside = x * 1.0
    beside.register_hook(lambda gradient: zero(x.detach()))
    return gives() + beside


@pytest.mark.parametrize("branch", [written_beside, written_as_a_view, written_uncounted, not_written])
def test_a_gradient_that_another_branch_writes_is_multiplied_as_it_was(branch):
    made, wanted = products(branch)
    torch.testing.assert_close(made, [wanted] * 3, rtol=0, atol=0)


@pytest.mark.parametrize("branch", [written_later, kept_and_written, input_written])
def test_what_is_written_without_a_copy_is_refused(branch):
    with pytest.raises(RunError, match=r"gradient-written.*writes in place to the saved input"):
        products(branch)
