"""The gradient store: right sums, one order of readiness, and nothing left over from a step that failed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from sley_core.engine.buffers import by_reduce_group
from sley_core.errors import RunError


def reference(modules, losses):
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    return torch.autograd.grad(sum(loss() for loss in losses), parameters, allow_unused=True)


def inputs(n):
    torch.manual_seed(0)
    return [torch.randn(3, 4) for _ in range(n)]


@pytest.mark.parametrize("num_micros", [1, 2, 4])
def test_gradients_are_the_sum_over_micro_batches_in_every_step(store_of, num_micros):
    torch.manual_seed(1)
    a, b = nn.Linear(4, 4), nn.Linear(4, 2)
    harness = store_of(a, b)
    losses = [lambda x=x: b(a(x).relu()).square().sum() for x in inputs(num_micros)]
    wanted = reference([a, b], losses)
    for step in range(3):
        found = harness.step(losses)
        for param, gradient in zip(harness.registry, wanted, strict=True):
            torch.testing.assert_close(found[param.name], gradient, rtol=1e-6, atol=1e-6)
        assert harness.ready == ["l1.bias", "l1.weight", "l0.bias", "l0.weight"]
        expected = step > 0 and harness.planner is by_reduce_group
        assert any(harness.during) == expected, "after the first step, where somebody waits: within the backward"


def test_optimizer_reads_the_views_and_zero_grad_in_any_form_changes_nothing(store_of):
    a = nn.Linear(4, 2)
    harness = store_of(a)
    losses = [lambda x=x: a(x).square().sum() for x in inputs(2)]
    optimizer = torch.optim.SGD(a.parameters(), lr=0.0)
    first = harness.step(losses)
    if harness.planner is by_reduce_group:
        assert a.weight.grad.data_ptr() == harness.store.gradient(harness.registry["l0.weight"]).data_ptr()
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        again = harness.step(losses)
        for name in first:
            assert torch.equal(first[name], again[name])


def test_a_failed_backward_leaves_nothing_behind(store_of):
    a, b = nn.Linear(4, 4), nn.Linear(4, 2)
    harness = store_of(a, b)
    losses = [lambda x=x: b(a(x)).square().sum() for x in inputs(2)]
    wanted = harness.step(losses)
    for fail_at in (0, 1):
        with pytest.raises(ValueError, match="as asked"):
            harness.step(losses, fail_at=fail_at)
        found = harness.step(losses)
        for name in wanted:
            assert torch.equal(wanted[name], found[name])


def test_an_unused_parameter_is_completed_as_zeros_once(store_of):
    a, unused = nn.Linear(4, 2), nn.Linear(4, 2)
    harness = store_of(a, unused)
    losses = [lambda x=x: a(x).square().sum() for x in inputs(1)]
    for _ in range(2):
        harness.store.gradient(harness.registry["l1.weight"]).fill_(7.0)
        found = harness.step(losses)
        assert found["l1.weight"].eq(0).all()
        assert sorted(harness.ready) == sorted(param.name for param in harness.registry)


def test_a_parameter_used_in_some_steps_only_follows_the_steps(store_of):
    a, sometimes = nn.Linear(4, 4), nn.Linear(4, 4)
    harness = store_of(a, sometimes)
    (x,) = inputs(1)
    without = [lambda: a(x).square().sum()]
    with_it = [lambda: sometimes(a(x)).square().sum()]
    for losses, used in [(without, False), (with_it, True), (with_it, True), (without, False), (with_it, True)]:
        found = harness.step(losses)
        wanted = reference([a, sometimes], losses)
        for param, gradient in zip(harness.registry, wanted, strict=True):
            gradient = torch.zeros_like(found[param.name]) if gradient is None else gradient
            torch.testing.assert_close(found[param.name], gradient)
        assert bool(found["l1.weight"].any()) == used


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_used_twice_under_checkpointing_is_summed(store_of, reentrant):
    a = nn.Linear(4, 4)
    harness = store_of(a)

    def loss(x):
        x = x.clone().requires_grad_()
        once = checkpoint(a, x, use_reentrant=reentrant)
        return checkpoint(a, once.relu(), use_reentrant=reentrant).square().sum()

    losses = [lambda x=x: loss(x) for x in inputs(2)]
    wanted = torch.autograd.grad(sum(a(a(x).relu()).square().sum() for x in inputs(2)), list(a.parameters()))
    for _ in range(3):
        found = harness.step(losses)
        torch.testing.assert_close(found["l0.weight"], wanted[0], rtol=1e-6, atol=1e-6)


def test_what_comes_again_after_its_reduction_began_is_refused_once_and_then_waited_for(store_of):
    """A backward within the backward, which no graph shows beforehand; where nobody reduces, it is summed at once."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    harness = store_of(a, b)
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
    for param, gradient in zip(harness.registry, wanted, strict=True):
        torch.testing.assert_close(found[param.name], gradient, rtol=1e-6, atol=1e-6)


def test_a_tie_has_one_slot_and_the_sum_of_both_uses(store_of):
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    harness = store_of(a, b)
    losses = [lambda x=x: b(a(x).relu()).square().sum() for x in inputs(2)]
    assert [param.name for param in harness.registry] == ["l0.weight"]
    assert harness.registry["l1.weight"] is harness.registry["l0.weight"]
    found = harness.step(losses)
    torch.testing.assert_close(found["l0.weight"], reference([a], losses)[0])


def test_freezing_and_unfreezing_between_steps_is_followed(store_of):
    a, b = nn.Linear(4, 4), nn.Linear(4, 2)
    harness = store_of(a, b)
    losses = [lambda x=x: b(a(x)).square().sum() for x in inputs(2)]
    a.weight.requires_grad_(False)
    assert "l0.weight" not in harness.step(losses)
    with pytest.raises(RunError, match=r"gradient-frozen.*'l0\.weight'"):
        harness.store.gradient(harness.store.registry["l0.weight"])
    a.weight.requires_grad_(True)
    found = harness.step(losses)
    wanted = dict(zip(["l0.weight", "l0.bias", "l1.weight", "l1.bias"], reference([a, b], losses), strict=True))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6)


def test_memory_is_taken_over_by_the_next_layout_unless_somebody_may_still_write_to_it(store_of):
    """Not after a freeze: the step before may have failed with a reduction on its way. Closing frees it."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    harness = store_of(first, second)
    harness.store.lay_out(by_reduce_group)
    (buffer,) = harness.store.buffers
    buffer.data.fill_(1)
    harness.store.lay_out(lambda params: by_reduce_group(params[::-1]))
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


def test_all_frozen_is_an_empty_store(store_of):
    a = nn.Linear(4, 2)
    a.requires_grad_(False)
    harness = store_of(a)
    assert harness.store.buffers == []
    assert harness.store.params == []
