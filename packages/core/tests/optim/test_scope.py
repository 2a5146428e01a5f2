"""What is known of torch.optim's classes is what they do."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from sley_core.optim.config import ELEMENTWISE, PER_MATRIX


def stepped(kind, cuts):
    """A matrix [6, 4] in one parameter, or in rows of several, after five steps with gradients of very different sizes."""
    torch.manual_seed(0)
    whole = torch.randn(6, 4, dtype=torch.float64)
    parts = [nn.Parameter(part.clone()) for part in whole.split(cuts)]
    optimizer = kind(parts, lr=0.1)
    for step in range(5):
        gradient = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).exp()
        for part, own in zip(parts, gradient.split(cuts), strict=True):
            part.grad = own.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


@pytest.mark.parametrize("name", sorted(ELEMENTWISE | PER_MATRIX))
def test_an_elementwise_optimizer_is_one_that_a_cut_does_not_change(name):
    kind = getattr(torch.optim, name)
    assert torch.equal(stepped(kind, [6]), stepped(kind, [1, 3, 2])) == (name in ELEMENTWISE)


def test_every_class_of_torch_that_can_be_stepped_is_known():
    """A new one is unknown, and refused where it matters, until somebody has looked at it."""
    known = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    assert known - ELEMENTWISE - PER_MATRIX <= {"Optimizer", "LBFGS", "SparseAdam"}
    assert known >= ELEMENTWISE
