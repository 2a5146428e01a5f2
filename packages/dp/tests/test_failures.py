"""A failed step leaves nothing behind, and a NaN ends the run on all ranks alike. (The contract tests clean recovery.)"""

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


class Late:
    """A reduction whose result arrives when somebody waits for it, or when the test says so."""

    def __init__(self, all_reduce, args, given):
        at, self.tensor = next((at, arg) for at, arg in enumerate(args) if isinstance(arg, torch.Tensor))
        self.copy = self.tensor.clone()
        self.pending = all_reduce(*args[:at], self.copy, *args[at + 1 :], **given)
        self.has_landed = False

    def test(self):
        return self.has_landed

    def wait(self):
        if not self.has_landed:
            self.has_landed = True
            self.pending.wait()
            self.tensor.copy_(self.copy)

    wait_sent = wait


class SlowLine:
    """Every reduction is `Late`; what nobody has waited for lands between the backwards of a step's two micro-batches."""

    def __init__(self, owner):
        self.sent = []
        all_reduce = owner.all_reduce

        def send(*args, **given):
            self.sent.append(Late(all_reduce, args, given))
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
    """One step that raises in the backward of micro-batch `micro`, at `layer`; the data goes back to where it was."""
    left = iter(range(micro + 1))

    def fail(gradient):
        if next(left) == micro:
            raise ValueError("as asked")

    hook = run.registry[f"{layer}.bias"].parameter.register_hook(fail)
    before = run.feed.state()
    with pytest.raises(ValueError, match="as asked"):
        run.step()
    hook.remove()
    run.feed.restore(before)


def steps_with_failures(tables, folder, late):
    """Returns the gradients of four steps, before each of which one fails: in another micro-batch, at another layer."""
    found = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.caller.hooks.append(SlowLine(resolve_name(late)))
        for micro, layer in ((0, "layer2"), (1, "first"), (1, "layer1"), (0, "first")):
            fail_in_backward(run, micro, layer)
            run.step()
            found.append({param.name: run.store.gradient(param).clone() for param in run.store.params})
    return found


@pytest.mark.parametrize(
    ("handler", "owner"),
    [({"bucket_mb": 0.0005}, "sley_core.comm.backends:Direct"), ({"use": "core.each"}, "sley_core.comm.group:Group")],
)
def test_a_reduction_that_a_failed_step_began_never_lands_in_the_next(ranks, small, own, handler, owner):
    """Its result would arrive while the next step accumulates in the same memory."""
    tables = small(handler, batch__global_size=4, parallel__cross_memory_attach=False)
    clean = ranks(2)(record, tables, 4, folder=own)
    for one, found in zip(clean, ranks(2)(steps_with_failures, tables, own, late=owner), strict=True):
        for before, after in zip(one.gradients, found, strict=True):
            assert_close_gradients(before, after, 1e-12)


def steps_until_it_ends(tables, folder):
    """Returns the error of the third step, in which the second rank has a NaN in its gradient, and the steps after it."""
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
    """All ranks see the same norm, also through an inexact sum. The step counts, and those after it are taken."""
    assert ranks(2)(steps_until_it_ends, small(handler), own) == [("not-finite", [4, 5])] * 2


def leave_in_the_third_step(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        run.step()
        if world.rank == 1:
            fail_in_backward(run, 1, "layer2")
        else:
            run.step()


@pytest.mark.parametrize("attaches", [True, False])
def test_a_reduction_that_a_peer_leaves_out_is_named(ranks, small, own, attaches):
    """The other rank waits no longer than the limit, and says which bucket over which group."""
    tables = small({"bucket_mb": 0.0005}, batch__global_size=4, limits__collective_timeout_s=2.0)
    tables["parallel"] = {"cross_memory_attach": attaches}
    what = r"of the bucket of layer2\.\w+ over stage\[0, 1\] (with rank 1 )?failed on rank 0"
    with pytest.raises(RunError, match=what):
        ranks(2, timeout_s=20)(leave_in_the_third_step, tables, own)
