"""A step that fails leaves nothing behind, and numbers that are none end the run on all ranks alike."""

from __future__ import annotations

from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.groups import Group
from sley_core.comm.progress import SentBytes
from sley_core.comm.world import World
from sley_core.engine.buffers import FlatBuffer
from sley_core.engine.registry import Param
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_dp.bucketed import Exact
from sley_dp.narrow import Narrow
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import record


class Late:
    """A reduction whose result arrives when somebody waits for it, or when the test says so."""

    def __init__(self, all_reduce, args, given):
        at, self.tensor = next((at, one) for at, one in enumerate(args) if isinstance(one, torch.Tensor))
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


def steps_with_failures(tables, folder, late=None):
    """Gradients of four steps, before each of which one fails: in another micro-batch, at another layer."""
    found = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        if late:
            run.caller.hooks.append(SlowLine(resolve_name(late)))
        for micro, layer in ((0, "layer2"), (1, "first"), (1, "layer1"), (0, "first")):
            fail_in_backward(run, micro, layer)
            run.step()
            found.append({param.name: run.store.gradient(param).clone() for param in run.store.params})
    return found


@pytest.mark.parametrize("handler", [{}, {"reduction": "bf16"}])
def test_steps_after_failed_ones_are_as_if_there_had_been_none(ranks, small, own, handler):
    """Whichever micro-batch fails and however much of it is done, the next gradients are bit for bit those of a clean run."""
    tables = small(handler | {"bucket_mb": 0.0005}, batch__global_size=4)
    clean = ranks(2)(record, tables, 4, folder=own)
    for one, found in zip(clean, ranks(2)(steps_with_failures, tables, own), strict=True):
        for before, after in zip(one.gradients, found, strict=True):
            assert_same_bits(before, after)


@pytest.mark.parametrize(
    ("handler", "owner"),
    [({"bucket_mb": 0.0005}, "sley_core.comm.backends:Direct"), ({"use": "core.each"}, "sley_core.engine.handlers")],
)
def test_a_reduction_that_a_failed_step_began_never_lands_in_the_next(ranks, small, own, handler, owner):
    """Its result would arrive while the next step accumulates in the same memory."""
    tables = small(handler, batch__global_size=4, parallel__cross_memory_attach=False)
    clean = ranks(2)(record, tables, 4, folder=own)
    for one, found in zip(clean, ranks(2)(steps_with_failures, tables, own, late=owner), strict=True):
        for before, after in zip(one.gradients, found, strict=True):
            assert_close_gradients(before, after, 1e-12)


class Counted:
    """A collective under way that counts itself out when somebody waits for it."""

    under_way = 0

    def __init__(self, *args, **kwargs):
        Counted.under_way += 1

    def test(self):
        return False

    def wait(self):
        Counted.under_way -= 1

    def wait_sent(self):
        pass


@pytest.mark.parametrize(
    ("module", "sums"), [("sley_dp.bucketed", lambda: Exact(SentBytes())), ("sley_dp.narrow", lambda: Narrow(SentBytes()))]
)
def test_forgetting_waits_for_all_that_is_under_way(monkeypatch, module, sums):
    """Whichever collective of a bucket it is, nothing writes into memory that the next step has in use."""
    for name in ("all_reduce", "all_to_all", "all_gather"):
        monkeypatch.setattr(f"{module}.{name}", Counted, raising=False)
    group = Group("stage", (0, 1), 0, {}, {"main": SimpleNamespace(all_reduce=Counted)})
    under_test = sums()
    for number in range(5):
        buffer = FlatBuffer([(8, 8)], torch.float32, torch.device("cpu"))
        buffer.contents = 0
        buffer.params = [Param(f"parameter{number}", (8, 8), [])]
        under_test.start(buffer, group)
    assert Counted.under_way >= 2
    under_test.forget()
    assert Counted.under_way == 0
    under_test.finish()


def poison(run):
    """The second rank's gradient of one parameter is no number in the third step, when its bucket is about to be reduced."""
    steps = iter(range(9))

    def spoil(param):
        if param.name == "layer1.bias" and next(steps) == 2 and run.world.rank == 1:
            run.store.gradient(param).fill_(float("nan"))

    run.store.on_ready.insert(0, spoil)


def steps_until_it_ends(tables, folder):
    done = 0
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        poison(run)
        try:
            for _ in range(5):
                run.step()
                done += 1
        except RunError as error:
            # Nothing was kept of that step but its number: those after it are taken.
            after = [run.step()["step"] for _ in range(2)]
            return done, error.diagnostics[0].code, after
    return done, None, []


@pytest.mark.parametrize("handler", [{}, {"reduction": "bf16"}])
def test_what_is_no_number_on_one_rank_ends_all_in_the_same_step(ranks, small, own, handler):
    """In fp32, where no scale is tried: all ranks see the same norm, also through an inexact sum."""
    assert ranks(2)(steps_until_it_ends, small(handler), own) == [(2, "not-finite", [4, 5])] * 2


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
