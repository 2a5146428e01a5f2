"""Tests that a failed step leaves no reduction, and that a NaN ends the run on all ranks. (The contract tests recovery.)"""

from __future__ import annotations

from pkgutil import resolve_name

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import record


class LateReduction:
    """A reduction whose result is written only in `wait`."""

    def __init__(self, all_reduce, args, kwargs):
        index, self.tensor = next((index, arg) for index, arg in enumerate(args) if isinstance(arg, torch.Tensor))
        self.copy = self.tensor.clone()
        self.pending = all_reduce(*args[:index], self.copy, *args[index + 1 :], **kwargs)
        self.is_complete = False

    def test(self):
        return self.is_complete

    def wait(self):
        if not self.is_complete:
            self.is_complete = True
            self.pending.wait()
            self.tensor.copy_(self.copy)

    wait_sent = wait


class SlowTransport:
    """Makes every reduction a `LateReduction`, which completes at the latest before the second backward of a step."""

    def __init__(self, owner):
        self.sent = []
        all_reduce = owner.all_reduce

        def send(*args, **kwargs):
            self.sent.append(LateReduction(all_reduce, args, kwargs))
            return self.sent[-1]

        owner.all_reduce = send

    def before_backward(self, micro, output_gradient):
        if micro.micro == 1:
            while self.sent:
                self.sent.pop().wait()

    def ignore(self, *args):
        pass

    before_forward = after_forward = before_loss = after_loss = after_backward = ignore


def fail_in_backward(run, micro, layer):
    """Runs a step that raises in the backward of micro-batch `micro` at `layer`, and resets the data."""
    micro_numbers = iter(range(micro + 1))

    def fail(gradient):
        if next(micro_numbers) == micro:
            raise ValueError("as asked")

    hook = run.registry[f"{layer}.bias"].parameter.register_hook(fail)
    before = run.feed.state()
    with pytest.raises(ValueError, match="as asked"):
        run.step()
    hook.remove()
    run.feed.restore(before)


def steps_with_failures(tables, folder, late):
    """Returns the gradients of four steps, each after a step that fails in another micro-batch or layer."""
    results = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.caller.hooks.append(SlowTransport(resolve_name(late)))
        for micro, layer in ((0, "layer2"), (1, "first"), (1, "layer1"), (0, "first")):
            fail_in_backward(run, micro, layer)
            run.step()
            results.append({param.name: run.store.gradient(param).clone() for param in run.store.params})
    return results


@pytest.mark.parametrize(
    ("handler", "owner"),
    [({"bucket_mb": 0.0005}, "sley_core.comm.backends:MessageTransport"), ({"use": "core.each"}, "sley_core.comm.group:Group")],
)
def test_a_reduction_of_a_failed_step_does_not_change_the_next_step(ranks, small, own, handler, owner):
    """Otherwise its result would be written while the next step accumulates in the same memory."""
    tables = small(handler, batch__global_size=4, parallel__cross_memory_attach=False)
    clean = ranks(2)(record, tables, 4, folder=own)
    for one, results in zip(clean, ranks(2)(steps_with_failures, tables, own, late=owner), strict=True):
        for before, after in zip(one.gradients, results, strict=True):
            assert_close_gradients(before, after, 1e-12)


def steps_with_nan(tables, folder):
    """Returns the error code of the third step, in which the second rank has a NaN gradient, and the numbers of later steps."""
    numbers = iter(range(9))
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:

        def spoil(param):
            if param.name == "layer1.bias" and next(numbers) == 2 and world.rank == 1:
                run.store.gradient(param).fill_(float("nan"))

        run.store.on_ready.insert(0, spoil)
        run.step()
        run.step()
        with pytest.raises(RunError) as caught:
            run.step()
        return caught.value.diagnostics[0].code, [run.step()["step"] for _ in range(2)]


@pytest.mark.parametrize("handler", [{}, {"reduction": "bf16"}])
def test_a_nan_on_one_rank_ends_all_in_the_same_step(ranks, small, own, handler):
    """All ranks get the same norm, even from an inexact sum. The step counts, and later steps run."""
    assert ranks(2)(steps_with_nan, small(handler), own) == [("not-finite", [4, 5])] * 2


def fail_on_one_rank(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        run.step()
        if world.rank == 1:
            fail_in_backward(run, 1, "layer2")
        else:
            run.step()


@pytest.mark.parametrize("attaches", [True, False])
def test_the_error_names_the_bucket_that_a_peer_does_not_reduce(ranks, small, own, attaches):
    """The other rank waits at most for the time limit, and its error names the bucket and the group."""
    tables = small({"bucket_mb": 0.0005}, batch__global_size=4, limits__collective_timeout_s=2.0)
    tables["parallel"] = {"cross_memory_attach": attaches}
    message = r"of the bucket of layer2\.\w+ over stage\[0, 1\] (with rank 1 )?failed on rank 0"
    with pytest.raises(RunError, match=message):
        ranks(2, timeout_s=20)(fail_on_one_rank, tables, own)
