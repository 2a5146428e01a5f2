"""The gradient store: right sums, one order of readiness, and nothing left over from a step that failed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from sley_core.actions.action import Action, Kind, actions_of, sequential
from sley_core.actions.lower import lower
from sley_core.actions.placement import loop
from sley_core.engine.book import ParameterBook
from sley_core.engine.layout import Planner, by_reduce_group, loose
from sley_core.engine.step_state import StepState
from sley_core.engine.store import GradientStore
from sley_core.errors import RunError
from sley_core.model.layers import Layer


@pytest.fixture(autouse=True, params=[by_reduce_group, loose], ids=["buffers", "loose"])
def planner(request, monkeypatch):
    """Everything holds whether gradients lie in buffers or, where nobody reduces, where autograd made them."""
    monkeypatch.setattr(Harness, "planner", staticmethod(request.param))


class Harness:
    """A store over some layers in one chunk, and the calls that an executor would make."""

    planner: Planner = staticmethod(by_reduce_group)

    def __init__(self, *modules: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.layers = [Layer(f"l{at}", module) for at, module in enumerate(modules)]
        self.state = StepState()
        self.book = ParameterBook([self.layers])
        self.store = GradientStore(self.book, dtype, torch.device("cpu"), self.state, self.planner)
        self.ready: list[str] = []
        self.during: list[bool] = []
        self.store.on_ready.append(self._note)

    def _note(self, entry):
        self.ready.append(entry.name)
        self.during.append(self.state.action is not None)

    def step(self, losses, fail_at=None):
        """One optimizer step over `losses`, functions that give each micro-batch's loss."""
        self.ready, self.during = [], []
        (steps,) = lower([sequential(len(losses))], loop(1), len(losses))
        actions = actions_of(steps)
        self.state.begin(self.state.step + 1, actions, len(losses), 0)
        self.store.begin_step()
        for action in actions:
            if action.kind is Kind.CHUNK_DONE:
                self.store.chunk_done(action.chunk)
            elif action.kind is Kind.BACKWARD:
                self.state.enter(action)
                losses[action.micro]().backward()
                if fail_at == action.micro:
                    raise ValueError("as asked")
                self.state.leave(action)
        return {entry.name: self.store.gradient(entry).clone() for entry in self.store.entries}


def reference(modules, losses):
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    return torch.autograd.grad(sum(loss() for loss in losses), parameters, allow_unused=True)


def inputs(n):
    torch.manual_seed(0)
    return [torch.randn(3, 4) for _ in range(n)]


@pytest.mark.parametrize("num_micros", [1, 2, 4])
def test_gradients_are_the_sum_over_micro_batches_in_every_step(num_micros):
    torch.manual_seed(1)
    a, b = nn.Linear(4, 4), nn.Linear(4, 2)
    harness = Harness(a, b)
    losses = [lambda x=x: b(a(x).relu()).square().sum() for x in inputs(num_micros)]
    wanted = reference([a, b], losses)
    for step in range(3):
        found = harness.step(losses)
        for entry, gradient in zip(harness.book, wanted, strict=True):
            torch.testing.assert_close(found[entry.name], gradient, rtol=1e-6, atol=1e-6)
        assert harness.ready == ["l1.bias", "l1.weight", "l0.bias", "l0.weight"]
        expected = step > 0 and harness.planner is by_reduce_group
        assert any(harness.during) == expected, "after the first step, where somebody waits: within the backward"


def test_optimizer_reads_the_views_and_zero_grad_in_any_form_changes_nothing():
    a = nn.Linear(4, 2)
    harness = Harness(a)
    losses = [lambda x=x: a(x).square().sum() for x in inputs(2)]
    optimizer = torch.optim.SGD(a.parameters(), lr=0.0)
    first = harness.step(losses)
    if harness.planner is by_reduce_group:
        assert a.weight.grad.data_ptr() == harness.store.gradient(harness.book["l0.weight"]).data_ptr()
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        again = harness.step(losses)
        for name in first:
            assert torch.equal(first[name], again[name])


def test_a_failed_backward_leaves_nothing_behind():
    a, b = nn.Linear(4, 4), nn.Linear(4, 2)
    harness = Harness(a, b)
    losses = [lambda x=x: b(a(x)).square().sum() for x in inputs(2)]
    wanted = harness.step(losses)
    for fail_at in (0, 1):
        with pytest.raises(ValueError, match="as asked"):
            harness.step(losses, fail_at=fail_at)
        found = harness.step(losses)
        for name in wanted:
            assert torch.equal(wanted[name], found[name])


def test_an_unused_parameter_is_completed_as_zeros_once():
    a, unused = nn.Linear(4, 2), nn.Linear(4, 2)
    harness = Harness(a, unused)
    losses = [lambda x=x: a(x).square().sum() for x in inputs(1)]
    for _ in range(2):
        harness.store.gradient(harness.book["l1.weight"]).fill_(7.0)
        found = harness.step(losses)
        assert found["l1.weight"].eq(0).all()
        assert sorted(harness.ready) == sorted(entry.name for entry in harness.book)


def test_a_parameter_used_in_some_steps_only_follows_the_steps():
    a, sometimes = nn.Linear(4, 4), nn.Linear(4, 4)
    harness = Harness(a, sometimes)
    (x,) = inputs(1)
    without = [lambda: a(x).square().sum()]
    with_it = [lambda: sometimes(a(x)).square().sum()]
    for losses, used in [(without, False), (with_it, True), (with_it, True), (without, False), (with_it, True)]:
        found = harness.step(losses)
        wanted = reference([a, sometimes], losses)
        for entry, gradient in zip(harness.book, wanted, strict=True):
            gradient = torch.zeros_like(found[entry.name]) if gradient is None else gradient
            torch.testing.assert_close(found[entry.name], gradient)
        assert bool(found["l1.weight"].any()) == used


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_used_twice_under_checkpointing_is_summed(reentrant):
    a = nn.Linear(4, 4)
    harness = Harness(a)

    def loss(x):
        x = x.clone().requires_grad_()
        once = checkpoint(a, x, use_reentrant=reentrant)
        return checkpoint(a, once.relu(), use_reentrant=reentrant).square().sum()

    losses = [lambda x=x: loss(x) for x in inputs(2)]
    wanted = torch.autograd.grad(sum(a(a(x).relu()).square().sum() for x in inputs(2)), list(a.parameters()))
    for _ in range(3):
        found = harness.step(losses)
        torch.testing.assert_close(found["l0.weight"], wanted[0], rtol=1e-6, atol=1e-6)


def test_what_comes_again_after_its_reduction_began_is_refused_once_and_then_waited_for():
    """A backward within the backward, which no graph shows beforehand; where nobody reduces, it is summed at once."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    harness = Harness(a, b)
    xs = inputs(2)
    once = [lambda x=x: b(a(x).relu()).square().sum() for x in xs]
    again = [lambda x=x: b(checkpoint(b, a(x).relu(), use_reentrant=True)).square().sum() for x in xs]
    harness.step(once)
    harness.step(once)
    if harness.planner is by_reduce_group:
        with pytest.raises(RunError, match=r"gradient-late.*'l1\.(weight|bias)'.*\n.*use_reentrant=False"):
            harness.step(again)
    wanted = reference([a, b], [lambda x=x: b(b(a(x).relu())).square().sum() for x in xs])
    for losses in (again, once, again):
        found = harness.step(losses)
    for entry, gradient in zip(harness.book, wanted, strict=True):
        torch.testing.assert_close(found[entry.name], gradient, rtol=1e-6, atol=1e-6)


def test_a_tie_has_one_slot_and_the_sum_of_both_uses():
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    harness = Harness(a, b)
    losses = [lambda x=x: b(a(x).relu()).square().sum() for x in inputs(2)]
    assert [entry.name for entry in harness.book] == ["l0.weight"]
    assert harness.book["l1.weight"] is harness.book["l0.weight"]
    found = harness.step(losses)
    torch.testing.assert_close(found["l0.weight"], reference([a], losses)[0])


def test_freezing_and_unfreezing_between_steps_is_followed():
    a, b = nn.Linear(4, 4), nn.Linear(4, 2)
    harness = Harness(a, b)
    losses = [lambda x=x: b(a(x)).square().sum() for x in inputs(2)]
    a.weight.requires_grad_(False)
    assert "l0.weight" not in harness.step(losses)
    a.weight.requires_grad_(True)
    found = harness.step(losses)
    wanted = dict(zip(["l0.weight", "l0.bias", "l1.weight", "l1.bias"], reference([a, b], losses), strict=True))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)


def test_memory_is_taken_over_by_the_next_layout_unless_somebody_may_still_write_to_it():
    """Not after a freeze: the step before may have failed with a reduction on its way. Closing frees it."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    harness = Harness(first, second)
    harness.store.lay_out(by_reduce_group)
    (buffer,) = harness.store.buffers
    buffer.data.fill_(1)
    harness.store.lay_out(lambda entries: by_reduce_group(entries[::-1]))
    assert harness.store.buffers[0].data.data_ptr() == buffer.data.data_ptr()
    assert not buffer.data.any()
    first.requires_grad_(False)
    second.requires_grad_(True)
    harness.store.begin_step()
    assert harness.store.num_bytes == buffer.num_bytes
    assert harness.store.buffers[0].data.data_ptr() != buffer.data.data_ptr()
    memory = StorageWeakRef(harness.store.buffers[0].data.untyped_storage())
    harness.store.close()
    assert memory.expired()


def test_all_frozen_is_an_empty_store():
    a = nn.Linear(4, 2)
    a.requires_grad_(False)
    harness = Harness(a)
    assert harness.store.buffers == []
    assert harness.store.entries == []


@pytest.mark.parametrize("num_micros", [1, 3])
def test_contributions_from_code_and_from_autograd_add_up(num_micros):
    a = nn.Linear(4, 2, bias=False)
    harness = Harness(a)
    extra = torch.full((2, 4), 3.0)
    (x,) = inputs(1)

    def loss():
        harness.store.add(harness.book["l0.weight"], extra)
        return a(x).square().sum()

    wanted = num_micros * (reference([a], [lambda: a(x).square().sum()])[0] + extra)
    for _ in range(2):
        found = harness.step([loss] * num_micros)
        torch.testing.assert_close(found["l0.weight"], wanted)
    assert extra.eq(3).all(), "what is given stays the giver's"


def test_a_contribution_after_ready_is_our_fault_and_says_whose():
    a = nn.Linear(4, 2, bias=False)
    harness = Harness(a)
    (x,) = inputs(1)
    harness.step([lambda: a(x).square().sum()])
    harness.state.enter(Action(Kind.BACKWARD, 0, 0))
    with pytest.raises(AssertionError, match=r"l0\.weight: a contribution after"):
        harness.store.add(harness.book["l0.weight"], torch.ones(2, 4))


def test_accumulation_is_in_the_stores_dtype_not_the_parameters():
    a = nn.Linear(4, 2, bias=False).to(torch.bfloat16)
    harness = Harness(a, dtype=torch.float32)
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    found = harness.step([lambda: a(x).float().sum() * (1 + 2**-7)] * 64)
    one = torch.autograd.grad(a(x).float().sum() * (1 + 2**-7), a.weight)[0].float()
    assert found["l0.weight"].dtype == torch.float32
    assert torch.equal(found["l0.weight"], 64 * one), "64 equal gradients sum exactly"


def test_what_autograd_adds_after_the_last_action_is_our_fault_too():
    a = nn.Linear(4, 2, bias=False)
    harness = Harness(a)
    (x,) = inputs(1)
    harness.step([lambda: a(x).square().sum()])
    harness.step([lambda: a(x).square().sum()])
    assert [len(tensors) for tensors, _, _ in harness.store.pieces()] == [1]
    if harness.planner is loose:
        a(x).square().sum().backward()
    with pytest.raises(AssertionError, match=r"l0\.weight: a contribution after"):
        late(harness, a, x)


def late(harness, module, x):
    """What finds a late contribution: the hook where there is one, else whoever reads the gradients."""
    if harness.planner is by_reduce_group:
        harness.state.enter(Action(Kind.BACKWARD, 0, 0))
        module(x).square().sum().backward()
    list(harness.store.pieces())


def test_a_backward_between_two_steps_is_told_what_to_do():
    """By hooks, where gradients lie in buffers, and by products; what the hint says gives the gradient of that backward."""
    a = nn.Linear(4, 2, bias=False)
    harness = Harness(a)
    entry = harness.book["l0.weight"]
    (x,) = inputs(1)
    wanted = harness.step([lambda: a(x).square().sum()])["l0.weight"]
    by_hook = [lambda: a(x).square().sum().backward()] if harness.planner is by_reduce_group else []
    by_code = [lambda: harness.store.add(entry, wanted), lambda: harness.store.add_product(entry, x.new_ones(3, 2), x)]
    for contribute in by_hook + by_code:
        with pytest.raises(RunError, match=r"'l0\.weight'.*\n.*run\.store\.begin_step\(\)"):
            contribute()
    harness.store.begin_step()
    harness.store.add(entry, wanted)
    assert torch.equal(harness.store.gradient(entry), wanted)


def test_rows_are_added_at_their_indices_in_every_step():
    """Contributions that code adds itself, of equal indices too; the next step begins with zeros."""
    table = nn.Embedding(5, 3)
    harness = Harness(table)
    entry = harness.book["l0.weight"]
    harness.store.expect_products(entry)
    rows = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    indices = [torch.tensor([4, 0, 4, 2]), torch.tensor([0, 0, 1, 1], dtype=torch.int32)]

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, at):
            ctx.at = at
            return weight.sum()

        @staticmethod
        def backward(ctx, gradient):
            harness.store.add_rows(entry, ctx.at, rows * gradient)
            return None, None

    wanted = torch.zeros(5, 3)
    for at in indices:
        for index, row in zip(at.tolist(), rows.float(), strict=True):
            wanted[index] += row
    for step in range(3):
        found = harness.step([lambda at=at: Adds.apply(table.weight, at) for at in indices])
        assert torch.equal(found["l0.weight"], wanted), step
        assert harness.ready == ["l0.weight"]
