"""Sums of one order: the tree over all microbatches, the norm that has one value, and what is refused by name."""

import math
from contextlib import nullcontext
from itertools import pairwise
from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sley_core.comm.world import World
from sley_core.engine.canonical import CanonicalReduction, digit_sums, max_abs, norm_from_digits, tree_sum
from sley_core.engine.canonical_tree import PartialSums, SumMemory, SumNode, covering_nodes
from sley_core.engine.parts import StepState
from sley_core.errors import RunError, SleyError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import running
from sley_trainer.assemble import assemble

CPU = torch.device("cpu")
PLAN = small_plan(parallel={"reduction": "canonical"}, precision__compute="fp32")


def sum_of(node: SumNode, gradients: Tensor) -> Tensor:
    """The sum of a node's microbatches as the definition of the tree has it."""
    if node.last - node.first == 1:
        return gradients[node.first]
    left, right = node.children
    return sum_of(left, gradients) + sum_of(right, gradients)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 96), st.data())
def test_any_cut_and_any_order_give_the_bits_of_the_one_tree(num_leaves, data):
    """Each part joins what it can, and hands over the rest. Losses are added in the same order."""
    gradients = torch.randn(num_leaves, 4, generator=torch.Generator().manual_seed(num_leaves), dtype=torch.float64)
    borders = sorted(data.draw(st.sets(st.integers(1, num_leaves), max_size=6)) | {0, num_leaves})
    total = PartialSums(num_leaves)
    for first, last in data.draw(st.permutations(list(pairwise(borders)))):
        part = PartialSums(num_leaves)
        for leaf in data.draw(st.permutations(range(first, last))):
            part.put(0, SumNode(leaf, leaf + 1), gradients[leaf].clone())
        nodes = covering_nodes(first, last, num_leaves)
        assert part.nodes == [(0, node) for node in nodes]
        assert len(nodes) <= 2 * log2(num_leaves) + 1
        for node in nodes:
            total.put(0, node, part.pop(0, node, gradients[0]))
    root = SumNode(0, num_leaves)
    expected = sum_of(root, gradients)
    assert torch.equal(total.pop(0, root, gradients[0]), expected)
    assert torch.equal(tree_sum(gradients[:, 0].clone()), expected[0])


def test_eight_micro_batches_need_three_sums_besides_the_one_that_comes():
    sum_memory, most = SumMemory(), 0
    sums = PartialSums(8, sum_memory)
    for at in range(8):
        incoming = sum_memory.allocate(torch.empty(4))
        incoming.fill_(at)
        most = max(most, len(sums.nodes))
        sums.put(0, SumNode(at, at + 1), incoming)
    assert most == 3
    assert len(sum_memory.created) == 3 + 1
    assert sums.pop(0, SumNode(0, 8), torch.empty(4)).tolist() == [28.0] * 4


def test_a_micro_batch_of_which_nothing_comes_is_a_zero_in_every_layout():
    """So a gradient of -0.0 becomes 0.0, as it does where another rank adds its zeros."""
    sums = PartialSums(4)
    sums.put(0, SumNode(1, 2), torch.tensor([-0.0, 2.0]))
    found = sums.pop(0, SumNode(0, 4), torch.empty(2))
    assert found.tolist() == [0.0, 2.0]
    assert not torch.signbit(found).any()


def norm(ranks: list[list[Tensor]], kind: float) -> Tensor:
    """The norm of what the tensors of several ranks hold together."""
    most = torch.stack([max_abs(tensors, CPU) for tensors in ranks]).max()
    return norm_from_digits(torch.stack([digit_sums(tensors, most, kind) for tensors in ranks]).sum(0), most, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [1.0, 2.0])
def test_cuts_and_orders_change_no_bit_where_plain_norms_differ(dtype, kind):
    generator = torch.Generator().manual_seed(1)
    size = torch.randn(300_001, generator=generator, dtype=torch.float64).mul(8).exp2()
    elements = (torch.randn(300_001, generator=generator, dtype=torch.float64) * size).to(dtype)
    wanted = torch.linalg.vector_norm(elements.double(), kind)
    found, plain = set(), set()
    for number in range(6):
        order = torch.randperm(elements.numel(), generator=generator)
        borders = sorted(torch.randint(elements.numel(), (number,), generator=generator).tolist())
        parts = list(torch.tensor_split(elements[order], borders))
        ranks = [parts[at::2] for at in range(2)]
        found.add(float(norm(ranks, kind)))
        plain.add(float(torch.stack([torch.linalg.vector_norm(part, kind) for part in parts]).norm(kind)))
    assert len(found) == 1
    assert len(plain) > 1
    assert math.isclose(found.pop(), float(wanted), rel_tol=1e-12)


@pytest.mark.parametrize("exponent", [-140, -100, 0, 60, 120])
def test_it_is_right_at_the_ends_of_the_format(exponent):
    elements = torch.tensor([3.0, 4.0, 0.0, -12.0]).double().mul(2.0**exponent).float()
    wanted = float(torch.linalg.vector_norm(elements.double()))
    assert math.isclose(float(norm([[elements], []], 2.0)), wanted, rel_tol=1e-14)


def test_nothing_has_the_norm_zero_and_no_number_an_infinite_one():
    assert float(norm([[torch.zeros(4)], []], 2.0)) == 0.0
    assert float(norm([[], []], 2.0)) == 0.0
    for bad in (math.nan, math.inf):
        assert math.isinf(float(norm([[torch.tensor([1.0, bad])], [torch.ones(3)]], 2.0)))


def test_a_loss_weight_has_no_order():
    reduction = CanonicalReduction({}, StepState())

    def total(*weights_of_ranks: list[float]) -> float:
        terms = map(reduction.weight_terms, weights_of_ranks)
        return reduction.weight_from_terms([sum(digit) for digit in zip(*terms, strict=True)])

    weights = [0.1 * number + 1e-7 for number in range(24)]
    found = {total(*(weights[at::ranks] for at in range(ranks))) for ranks in (1, 2, 3, 8)}
    assert len(found) == 1
    assert math.isclose(found.pop(), math.fsum(weights), rel_tol=1e-15)
    assert total([]) == 0.0
    assert total([3.0, 5.0]) == 8.0
    assert math.isnan(total([math.nan, 1.0]))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, None),
        ({"parallel__sp": 2, "data__sequence": 24}, "parallel.sp"),
        ({"model__compile": True}, "model.compile"),
        ({"precision__accumulation": "autograd"}, "precision.accumulation"),
        ({"precision__accumulation": "direct"}, None),
        ({"optimizer__clip_kind": 3.0}, "optimizer.clip_kind"),
        ({"optimizer__clip_kind": "inf"}, None),
        ({"optimizer": {"factory": "torch.optim:Adam", "lr": 0.1, "options": {"fused": True}}}, "optimizer.options"),
        ({"gradient_handlers": [{"use": "core.each"}]}, None),
    ],
)
def test_a_plan_that_cannot_keep_the_order_is_refused_where_it_says_so(texts, changes, path):
    tables = changed(PLAN, **changes)
    world = tables["parallel"].get("sp", 1)
    found = [problem for problem in check_plan(plan_from_dict(tables, texts), world) if problem.code[:9] == "canonical"]
    assert [".".join(map(str, problem.path)) for problem in found] == ([path] if path else [])
    if path:
        tables["parallel"]["reduction"] = "fast"
        problems = check_plan(plan_from_dict(tables, texts), world)
        assert not [problem for problem in problems if problem.code[:9] == "canonical"]


class Embed(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(*sizes)

    def forward(self, tokens):
        return self.table(tokens)


class Twice(nn.Module):
    """A linear whose weight is also used as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, hidden):
        return self.linear(hidden) @ self.linear.weight


class Scaled(nn.Module):
    """A parameter that no linear holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, hidden):
        return hidden * self.scale


def with_embedding(*inner):
    return [Embed(256, 16), *inner, nn.Linear(16, 256)]


def twice():
    return with_embedding(Twice())


def shared():
    scaled = Scaled(), Scaled()
    scaled[1].scale = scaled[0].scale
    return with_embedding(*scaled)


def tied():
    layers = with_embedding(nn.Linear(16, 16))
    layers[-1].weight = layers[0].table.weight
    return layers


@pytest.mark.parametrize(
    ("factory", "code", "name"),
    [(twice, "canonical-autograd", "1.linear.weight"), (shared, "canonical-tie", "1.scale"), (tied, None, None)],
)
def test_a_weight_that_autograd_sees_too_is_refused_and_ties_of_linears_and_embeddings_are_summed_apart(
    texts, monkeypatch, request, factory, code, name
):
    monkeypatch.syspath_prepend(request.path.parent)
    plan = plan_from_dict(changed(PLAN, model={"factory": f"{__name__}:{factory.__name__}"}), texts)
    expected = pytest.raises(SleyError, match=name) if code else nullcontext()
    with World.join("cpu") as world, expected as caught, assemble(plan, world) as run:
        run.step()
    if caught:
        assert caught.value.diagnostics[0].code == code


def test_a_gradient_in_pieces_with_others_between_is_refused(texts):
    with running(PLAN, texts) as run:
        run.step()
        run.store.begin_step()
        param = run.registry["blocks.0.attention.query.weight"]
        piece = torch.ones(param.shape)
        run.store.add_microbatches(param, {0: piece, 1: piece}, param.layers[0])
        with pytest.raises(RunError) as caught:
            run.store.add_microbatches(param, {0: piece}, param.layers[0])
    assert caught.value.diagnostics[0].code == "canonical-again"


def test_a_backward_by_hand_between_two_steps_is_summed(texts):
    with running(PLAN, texts) as run:
        run.step()
        run.store.begin_step()
        param = next(param for param in run.registry if len(param.shape) == 1)
        for _ in range(2):
            (3 * param.parameter.sum()).backward()
        run.store.chunk_done(0)
        run.step()
        assert not run.store.reduction.partial_sums()


def unequal(plans, folder):
    """What steps say in which rank 1 has one microbatch more than rank 0, and the number of the next step."""
    found = []
    for tables in plans:
        with running(tables, folder) as run:
            own = run.feed.next()
            micros = [{name: value[at : at + 2] for name, value in own.items()} for at in (0, 2)]
            try:
                run.step(micros[: 1 + run.world.rank])
            except RunError as error:
                found.append(error.diagnostics[0].code)
            found.append(run.step()["step"])
    return found


def test_ranks_with_other_numbers_of_micro_batches_are_refused_before_they_sum(ranks, texts):
    """Only where the order of sums is fixed. The run goes on."""
    tables = changed(PLAN, model__num_layers=1)
    plans = [changed(tables, parallel__dp=2), changed(tables, parallel={"dp": 2})]
    assert ranks(2)(unequal, plans, texts) == [["ranks-differ", 1, 2]] * 2


def test_sums_count_as_gradients_while_there_are_any(texts):
    with running(PLAN, texts) as run:
        run.step()
        between = run.memory.bytes["gradients"]
        seen: list[int] = []
        run.store.on_ready.append(lambda _: seen.append(run.memory.bytes["gradients"]))
        run.step()
        assert run.memory.bytes["gradients"] == between
    assert max(seen) > between
