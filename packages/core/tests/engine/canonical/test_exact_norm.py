"""The norm has one value, however elements lie, and it is the norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sley_core.engine.canonical.totals import digits, largest, norm_of, tree_sum, weight_digits, weight_of
from sley_core.engine.canonical.tree import Node, PartialSums, leaf

CPU = torch.device("cpu")


def norm(ranks: list[list[Tensor]], kind: float) -> Tensor:
    """The norm of what the tensors of several ranks hold together."""
    most = torch.stack([largest(tensors, CPU) for tensors in ranks]).max()
    return norm_of(torch.stack([digits(tensors, most, kind) for tensors in ranks]).sum(0), most, kind)


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


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 13])
def test_losses_are_added_in_the_order_of_the_tree(count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    sums = PartialSums(count)
    for at in range(count):
        sums.put(0, leaf(at), values[at].clone())
    assert torch.equal(tree_sum(values), sums.take(0, Node(0, count), values[0]))


def test_a_loss_weight_has_no_order():
    weights = [0.1 * number + 1e-7 for number in range(24)]
    found = {
        weight_of([sum(digit) for digit in zip(*(weight_digits(weights[at::ranks]) for at in range(ranks)), strict=True)])
        for ranks in (1, 2, 3, 8)
    }
    assert len(found) == 1
    assert math.isclose(found.pop(), math.fsum(weights), rel_tol=1e-15)
    assert weight_of(weight_digits([])) == 0.0
    assert weight_of(weight_digits([3.0, 5.0])) == 8.0
    assert math.isnan(weight_of(weight_digits([math.nan, 1.0])))
