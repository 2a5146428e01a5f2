"""The gradient store: right sums, one order of readiness, contributions of code and of autograd, and what comes too late."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from sley_core.actions.action import Action, Kind, loop, select_actions, sequential_actions
from sley_core.actions.lower import lower
from sley_core.engine.buffers import Layout, Planner, group_by_reduce_group, plan_without_buffers
from sley_core.engine.gradients import GradientStore
from sley_core.engine.parts import StepState
from sley_core.engine.reduction import Reduction
from sley_core.engine.registry import Param, ParameterRegistry
from sley_core.errors import RunError
from sley_core.model.layers import Layer


class Harness:
    """A store over some layers in one chunk, and the calls that an executor would make."""

    def __init__(self, planner: Planner, modules: tuple[nn.Module, ...], dtype: torch.dtype) -> None:
        self.planner = planner
        self.layers = [Layer(f"l{at}", module) for at, module in enumerate(modules)]
        self.state = StepState()
        self.registry = ParameterRegistry([self.layers])
        self.store = GradientStore(self.registry, dtype, torch.device("cpu"), Reduction({}, self.state), planner)
        self.ready: list[str] = []
        self.during: list[bool] = []
        self.store.on_ready.append(self._note)

    def _note(self, param: Param) -> None:
        self.ready.append(param.name)
        self.during.append(self.state.action is not None)

    def step(self, losses: Sequence[Callable[[], Tensor]]) -> dict[str, Tensor]:
        """One optimizer step over `losses`, functions that give each microbatch's loss."""
        self.ready, self.during = [], []
        (steps,) = lower([sequential_actions(len(losses))], loop(1), len(losses))
        actions = select_actions(steps)
        self.state.begin(self.state.step + 1, actions, len(losses), 0)
        self.store.begin_step()
        for action in actions:
            if action.kind is Kind.CHUNK_DONE:
                self.store.chunk_done(action.chunk)
            elif action.kind is Kind.BACKWARD:
                self.state.enter(action)
                losses[action.micro]().backward()
                self.store.backward_done()
                self.state.leave(action)
        return {param.name: self.store.gradient(param).clone() for param in self.store.params}


@pytest.fixture(params=[group_by_reduce_group, plan_without_buffers], ids=["buffers", "loose"])
def store_of(request: pytest.FixtureRequest) -> Callable[..., Harness]:
    """`store_of(*modules, dtype=fp32)`: a harness of a store over these layers.

    Everything holds whether gradients lie in buffers or, where nobody reduces, where autograd made them.
    """

    def store_of(*modules: nn.Module, dtype: torch.dtype = torch.float32) -> Harness:
        return Harness(request.param, modules, dtype)

    return store_of


def reference(modules, losses):
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    return torch.autograd.grad(sum(loss() for loss in losses), parameters, allow_unused=True)


def inputs(n):
    torch.manual_seed(0)
    return [torch.randn(3, 4) for _ in range(n)]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_gradients_are_the_sum_over_micro_batches_in_every_step(store_of, num_microbatches):
    torch.manual_seed(1)
    a, b = nn.Linear(4, 4), nn.Linear(4, 2)
    harness = store_of(a, b)
    assert harness.registry.num_parameters == 4 * 4 + 4 + 2 * 4 + 2
    losses = [lambda x=x: b(a(x).relu()).square().sum() for x in inputs(num_microbatches)]
    wanted = reference([a, b], losses)
    for step in range(3):
        found = harness.step(losses)
        for param, gradient in zip(harness.registry, wanted, strict=True):
            torch.testing.assert_close(found[param.name], gradient, rtol=1e-6, atol=1e-6)
        assert harness.ready == ["l1.bias", "l1.weight", "l0.bias", "l0.weight"]
        expected = step > 0 and harness.planner is group_by_reduce_group
        assert any(harness.during) == expected, "after the first step, where somebody waits: within the backward"


class Added(nn.Module):
    """Autograd makes the gradients of its parameters in one memory: views of one tensor, or parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(3, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a[None] + self.b[None]) + torch.cat([self.c, self.d])[:3] * x


def plan_one_buffer(params: list[Param]) -> Layout:
    return Layout([params[:1]], params, params[1:])


@pytest.mark.parametrize("planner", [group_by_reduce_group, plan_without_buffers, plan_one_buffer])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_gradients_share_no_memory_with_each_other_or_with_what_others_keep(planner, num_microbatches):
    torch.manual_seed(2)
    module, kept = Added(), []
    harness = Harness(planner, (module,), torch.float32)

    def loss(x):
        added = module(x) + module.d[None]
        if added.requires_grad:
            added.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
        return added.square().sum()

    losses = [lambda x=x: loss(x) for x in inputs(num_microbatches)]
    wanted = reference([module], losses)
    for _ in range(2):
        harness.step(losses)
        for param in harness.store.params:
            harness.store.gradient(param).mul_(2)  # as clipping does
        for param, gradient in zip(harness.registry, wanted, strict=True):
            torch.testing.assert_close(harness.store.gradient(param), 2 * gradient)
    assert all(torch.equal(gradient, before) for gradient, before in kept)


def test_optimizer_reads_the_views_and_zero_grad_in_any_form_changes_nothing(store_of):
    a = nn.Linear(4, 2)
    harness = store_of(a)
    losses = [lambda x=x: a(x).square().sum() for x in inputs(2)]
    optimizer = torch.optim.SGD(a.parameters(), lr=0.0)
    first = harness.step(losses)
    if harness.planner is group_by_reduce_group:
        assert a.weight.grad.data_ptr() == harness.store.gradient(harness.registry["l0.weight"]).data_ptr()
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        again = harness.step(losses)
        for name in first:
            assert torch.equal(first[name], again[name])


def test_a_parameter_that_is_not_used_in_a_step_is_completed_as_zeros_once(store_of):
    a, sometimes = nn.Linear(4, 4), nn.Linear(4, 4)
    harness = store_of(a, sometimes)
    (x,) = inputs(1)
    without = [lambda: a(x).square().sum()]
    with_it = [lambda: sometimes(a(x)).square().sum()]
    for losses, used in [(without, False), (with_it, True), (with_it, True), (without, False), (with_it, True)]:
        harness.store.gradient(harness.registry["l1.weight"]).fill_(7.0)
        found = harness.step(losses)
        assert sorted(harness.ready) == sorted(param.name for param in harness.registry)
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
    if harness.planner is group_by_reduce_group:
        with pytest.raises(RunError, match=r"gradient-late.*'l1\.(weight|bias)'.*\n.*use_reentrant=False"):
            harness.step(again)
    wanted = reference([a, b], [lambda x=x: b(b(a(x).relu())).square().sum() for x in xs])
    for losses in (again, once, again):
        found = harness.step(losses)
    for param, gradient in zip(harness.registry, wanted, strict=True):
        torch.testing.assert_close(found[param.name], gradient, rtol=1e-6, atol=1e-6)


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
    for param, gradient in zip(harness.registry, reference([a, b], losses), strict=True):
        torch.testing.assert_close(found[param.name], gradient, rtol=1e-6, atol=1e-6)
    frozen = store_of(nn.Linear(4, 2).requires_grad_(False)).store
    assert frozen.buffers == frozen.params == []


def test_a_layout_after_a_freeze_has_new_memory_and_closing_frees_it(store_of):
    """The step before may have failed with a reduction in flight, which may still write into the old memory."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    harness = store_of(first, second)
    harness.store.lay_out(group_by_reduce_group)
    (buffer,) = harness.store.buffers
    first.requires_grad_(False)
    second.requires_grad_(True)
    harness.store.begin_step()
    assert harness.store.num_bytes == buffer.num_bytes
    assert harness.store.buffers[0].data.data_ptr() != buffer.data.data_ptr()
    memory = StorageWeakRef(harness.store.buffers[0].data.untyped_storage())
    harness.store.close()
    assert memory.expired()


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_contributions_from_code_and_from_autograd_add_up(store_of, num_microbatches):
    a = nn.Linear(4, 2, bias=False)
    harness = store_of(a)
    extra = torch.full((2, 4), 3.0)
    (x,) = inputs(1)

    def loss():
        harness.store.add(harness.registry["l0.weight"], extra)
        return a(x).square().sum()

    wanted = num_microbatches * (reference([a], [lambda: a(x).square().sum()])[0] + extra)
    for _ in range(2):
        found = harness.step([loss] * num_microbatches)
        torch.testing.assert_close(found["l0.weight"], wanted)
    assert extra.eq(3).all(), "what is given stays the giver's"


@pytest.mark.parametrize("by", ["code", "autograd"])
def test_a_contribution_after_the_last_action_is_our_fault_and_says_whose(store_of, by):
    """A hook notices it where there is one, else whoever reads the gradients."""
    a = nn.Linear(4, 2, bias=False)
    harness = store_of(a)
    (x,) = inputs(1)
    for _ in range(2):
        harness.step([lambda: a(x).square().sum()])
    assert [len(tensors) for tensors, *_ in harness.store.norm_groups()] == [1]

    def contribute():
        if by == "code" or harness.planner is group_by_reduce_group:
            harness.state.enter(Action(Kind.BACKWARD, 0, 0))
        if by == "code":
            harness.store.add(harness.registry["l0.weight"], torch.ones(2, 4))
        else:
            a(x).square().sum().backward()
            list(harness.store.norm_groups())

    with pytest.raises(AssertionError, match=r"l0\.weight: a contribution after"):
        contribute()


def test_a_backward_between_two_steps_is_told_what_to_do(store_of):
    """By hooks, where gradients lie in buffers, and by products; what the hint says gives the gradient of that backward."""
    a = nn.Linear(4, 2, bias=False)
    harness = store_of(a)
    param = harness.registry["l0.weight"]
    (x,) = inputs(1)
    wanted = harness.step([lambda: a(x).square().sum()])["l0.weight"]
    by_hook = [lambda: a(x).square().sum().backward()] if harness.planner is group_by_reduce_group else []
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
    param.has_products = True
    rows = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    indices = [torch.tensor([4, 0, 4, 2]), torch.tensor([0, 0, 1, 1], dtype=torch.int32)]

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, at):
            ctx.at = at
            return weight.sum()

        @staticmethod
        def backward(ctx, gradient):
            harness.store.add_rows(param, rows * gradient, ctx.at)
            return None, None

    wanted = torch.zeros(5, 3)
    for at in indices:
        for index, row in zip(at.tolist(), rows.float(), strict=True):
            wanted[index] += row
    for step in range(3):
        found = harness.step([lambda at=at: Adds.apply(table.weight, at) for at in indices])
        assert torch.equal(found["l0.weight"], wanted), step
        assert harness.ready == ["l0.weight"]


def test_a_store_without_memory_takes_no_contribution_and_no_step(store_of):
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    harness = store_of(a, b)
    (x,) = inputs(1)
    losses = [lambda: b(a(x)).square().sum()]
    wanted = harness.step(losses)
    harness.store.free()
    assert not [view for _, view in harness.store.named_tensors() if view.untyped_storage().nbytes()]
    with pytest.raises(RunError, match=r"run\.store\.begin_step\(\)"):
        harness.store.add(harness.registry["l0.weight"], wanted["l0.weight"])
    harness.store.build()
    found = harness.step(losses)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
