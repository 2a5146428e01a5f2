"""Patches of a forward lie on each other, and are undone in any order without a trace."""

from __future__ import annotations

import copy
import inspect
import pickle
from itertools import permutations

import pytest
import torch
from torch import nn

from sley_core.model.layers import ForwardPatch


class Scale(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, input):
        return input * self.factor


class Careful(Scale):
    """Has a say in what becomes of its attributes."""

    def __setattr__(self, name, value):
        assert name != "forward", "somebody patches me"
        super().__setattr__(name, value)


def with_its_own():
    """A module whose factory replaced its forward."""
    module = Scale()
    module.forward = lambda input: input * 100
    return module


def plus(module, number):
    """A patch that adds to what the module would return without it."""
    below = module.forward
    return ForwardPatch(module, lambda input: below(input) + number)


@pytest.mark.parametrize("make", [Scale, Careful, with_its_own])
@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_undone_in_any_order(make, order):
    module = make()
    was, alone = dict(vars(module)), module(1.0)
    patches = [plus(module, 10.0**at) for at in range(3)]
    assert module(1.0) == alone + 111
    left = {0, 1, 2}
    for at in order:
        for _ in range(2):
            patches[at].undo()
        left.remove(at)
        assert module(1.0) == alone + sum(10.0**one for one in left)
    assert vars(module) == was
    assert list(vars(module)) == list(was)


def test_one_that_was_made_between_takes_the_place_of_one_that_is_gone():
    module = Scale()
    first, second = plus(module, 10), plus(module, 100)
    first.undo()
    third = plus(module, 1000)
    second.undo()
    assert module(1.0) == 1002
    third.undo()
    assert "forward" not in vars(module)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_program_s_own_forward_over_a_patch_stays(order):
    """And no longer passes through what is undone."""
    module = Scale()
    patches = [plus(module, 10)]
    below = module.forward
    own = module.forward = lambda input: -below(input)
    patches.append(plus(module, 100))
    assert module(1.0) == -12 + 100
    for at in order:
        patches[at].undo()
    assert vars(module)["forward"] is own
    assert module(1.0) == -2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_not_patched(copied):
    module = Scale()
    ForwardPatch(module, torch.neg)
    ForwardPatch(module, torch.neg)
    made = copied(module)
    made.factor = 3.0
    assert made(1.0) == 3.0


def test_a_copy_keeps_a_forward_of_the_factory_s():
    module = with_its_own()
    ForwardPatch(module, torch.neg)
    assert copy.deepcopy(module)(1.0) == 100


def test_the_signature_is_the_module_s_own():
    module = Scale()
    wanted = inspect.signature(module.forward)
    plus(module, 1)
    plus(module, 2)
    assert inspect.signature(module.forward) == wanted
    assert module(input=1.0) == 5
