"""Contributions to the gradient store from code and from autograd, and those that come too late."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sley_core.actions.action import Action, Kind
from sley_core.engine.buffers import by_reduce_group, loose
from sley_core.errors import RunError


def reference(modules, losses):
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    return torch.autograd.grad(sum(loss() for loss in losses), parameters, allow_unused=True)


def inputs(n):
    torch.manual_seed(0)
    return [torch.randn(3, 4) for _ in range(n)]


@pytest.mark.parametrize("num_micros", [1, 3])
def test_contributions_from_code_and_from_autograd_add_up(store_of, num_micros):
    a = nn.Linear(4, 2, bias=False)
    harness = store_of(a)
    extra = torch.full((2, 4), 3.0)
    (x,) = inputs(1)

    def loss():
        harness.store.add(harness.registry["l0.weight"], extra)
        return a(x).square().sum()

    wanted = num_micros * (reference([a], [lambda: a(x).square().sum()])[0] + extra)
    for _ in range(2):
        found = harness.step([loss] * num_micros)
        torch.testing.assert_close(found["l0.weight"], wanted)
    assert extra.eq(3).all(), "what is given stays the giver's"


def test_a_contribution_after_ready_is_our_fault_and_says_whose(store_of):
    a = nn.Linear(4, 2, bias=False)
    harness = store_of(a)
    (x,) = inputs(1)
    harness.step([lambda: a(x).square().sum()])
    harness.state.enter(Action(Kind.BACKWARD, 0, 0))
    with pytest.raises(AssertionError, match=r"l0\.weight: a contribution after"):
        harness.store.add(harness.registry["l0.weight"], torch.ones(2, 4))


def test_accumulation_is_in_the_stores_dtype_not_the_parameters(store_of):
    a = nn.Linear(4, 2, bias=False).to(torch.bfloat16)
    harness = store_of(a, dtype=torch.float32)
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    found = harness.step([lambda: a(x).float().sum() * (1 + 2**-7)] * 64)
    one = torch.autograd.grad(a(x).float().sum() * (1 + 2**-7), a.weight)[0].float()
    assert found["l0.weight"].dtype == torch.float32
    assert torch.equal(found["l0.weight"], 64 * one), "64 equal gradients sum exactly"


def test_what_autograd_adds_after_the_last_action_is_our_fault_too(store_of):
    a = nn.Linear(4, 2, bias=False)
    harness = store_of(a)
    (x,) = inputs(1)
    harness.step([lambda: a(x).square().sum()])
    harness.step([lambda: a(x).square().sum()])
    assert [len(tensors) for tensors, *_ in harness.store.norm_groups()] == [1]
    if harness.planner is loose:
        a(x).square().sum().backward()
    with pytest.raises(AssertionError, match=r"l0\.weight: a contribution after"):
        late(harness, a, x)


def late(harness, module, x):
    """What finds a late contribution: the hook where there is one, else whoever reads the gradients."""
    if harness.planner is by_reduce_group:
        harness.state.enter(Action(Kind.BACKWARD, 0, 0))
        module(x).square().sum().backward()
    list(harness.store.norm_groups())


def test_a_backward_between_two_steps_is_told_what_to_do(store_of):
    """By hooks, where gradients lie in buffers, and by products; what the hint says gives the gradient of that backward."""
    a = nn.Linear(4, 2, bias=False)
    harness = store_of(a)
    param = harness.registry["l0.weight"]
    (x,) = inputs(1)
    wanted = harness.step([lambda: a(x).square().sum()])["l0.weight"]
    by_hook = [lambda: a(x).square().sum().backward()] if harness.planner is by_reduce_group else []
    by_code = [lambda: harness.store.add(param, wanted), lambda: harness.store.add_product(param, x.new_ones(3, 2), x)]
    for contribute in by_hook + by_code:
        with pytest.raises(RunError, match=r"'l0\.weight'.*\n.*run\.store\.begin_step\(\)"):
            contribute()
    harness.store.begin_step()
    harness.store.add(param, wanted)
    assert torch.equal(harness.store.gradient(param), wanted)


def test_rows_are_added_at_their_indices_in_every_step(store_of):
    """Contributions that code adds itself, of equal indices too; the next step begins with zeros."""
    table = nn.Embedding(5, 3)
    harness = store_of(table)
    param = harness.registry["l0.weight"]
    harness.store.expect_products(param)
    rows = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    indices = [torch.tensor([4, 0, 4, 2]), torch.tensor([0, 0, 1, 1], dtype=torch.int32)]

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, at):
            ctx.at = at
            return weight.sum()

        @staticmethod
        def backward(ctx, gradient):
            harness.store.add_rows(param, ctx.at, rows * gradient)
            return None, None

    wanted = torch.zeros(5, 3)
    for at in indices:
        for index, row in zip(at.tolist(), rows.float(), strict=True):
            wanted[index] += row
    for step in range(3):
        found = harness.step([lambda at=at: Adds.apply(table.weight, at) for at in indices])
        assert torch.equal(found["l0.weight"], wanted), step
        assert harness.ready == ["l0.weight"]


def test_a_layout_of_a_store_without_memory_has_none(store_of):
    """A reducer that lays buckets out anew, as a load of a checkpoint makes it, while gradients are away."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    harness = store_of(a, b)
    (x,) = inputs(1)
    losses = [lambda: b(a(x)).square().sum()]
    wanted = harness.step(losses)
    harness.store.free()
    harness.store.lay_out(harness.planner)
    assert not [view for _, view in harness.store.held() if view.untyped_storage().nbytes()]
    with pytest.raises(RunError, match=r"run\.store\.begin_step\(\)"):
        harness.store.add(harness.registry["l0.weight"], wanted["l0.weight"])
    harness.store.build()
    found = harness.step(losses)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
