"""Where an element lies in a tensor changes no bit of its update, in the form that canonical sums take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sley_core.optim.build import EVERYWHERE_ALIKE, adamw, sgd
from sley_core.optim.config import AdamWConfig, SGDConfig

CPU = torch.device("cpu")
SIZE = 200


def stepped(build, config, first: int, last: int, options: dict) -> list[Tensor]:
    """Elements `first` to `last` of weight and states after three steps, of an optimizer that has these alone."""
    generator = torch.Generator().manual_seed(1)
    weight, *gradients = (torch.randn(SIZE, generator=generator) for _ in range(4))
    parameter = torch.nn.Parameter(weight[first:last].clone())
    groups = [{"params": [parameter], "lr": 1e-2, "initial_lr": 1e-2, "weight_decay": 0.1, **options}]
    optimizer = build(config, groups, CPU)
    for gradient in gradients:
        parameter.grad = gradient[first:last].clone()
        optimizer.step()
    states = optimizer.state[parameter].values()
    return [parameter.detach(), *(state for state in states if isinstance(state, Tensor) and state.ndim)]


@pytest.mark.parametrize(
    ("build", "config"), [(adamw, AdamWConfig(lr=1e-2)), (sgd, SGDConfig(lr=1e-2, momentum=0.9))], ids=["adamw", "sgd"]
)
def test_a_part_of_a_tensor_is_stepped_as_the_whole(build, config):
    whole = stepped(build, config, 0, SIZE, EVERYWHERE_ALIKE)
    for first, last in [(0, 1), (0, 7), (3, 64), (5, 71), (64, 103), (100, 199), (1, 200)]:
        part = stepped(build, config, first, last, EVERYWHERE_ALIKE)
        assert all(torch.equal(one[first:last], other) for one, other in zip(whole, part, strict=True)), (first, last)


def test_the_fastest_form_is_taken_where_nothing_is_said():
    parameter = torch.nn.Parameter(torch.ones(3))
    for options, is_fused in (({}, True), (EVERYWHERE_ALIKE, False)):
        group = {"params": [parameter], "lr": 1e-2, "initial_lr": 1e-2, "weight_decay": 0.1, **options}
        optimizer = adamw(AdamWConfig(lr=1e-2), [group], CPU)
        assert bool(optimizer.param_groups[0]["fused"]) == is_fused
