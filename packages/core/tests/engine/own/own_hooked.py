"""Blocks whose constructor sets hooks on the gradients of parameters: `factory = "own_hooked:model"`, `options.kind`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_core.model.layers import Model
from sley_testing.habits import Embed, HookedWeights, init


class Before(nn.Module):
    """Hooks on a parameter before a module has it, and on the one that was given, afterwards."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        one, two = nn.Parameter(torch.eye(hidden)), nn.Parameter(torch.eye(hidden))
        one.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        self.one, self.two = one, two
        two.register_hook(lambda gradient: gradient * 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.linear(F.linear(hidden, self.one).tanh(), self.two)


class OfModules(HookedWeights):
    """Hooks of modules, which see gradients on their way."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.one.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 2,))
        self.two.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.two.register_full_backward_pre_hook(lambda module, of_output: (of_output[0] * 0.5,))


class Accumulated(HookedWeights):
    """A hook that is called when autograd has summed a gradient."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.one.weight.register_post_accumulate_grad_hook(lambda parameter: None)


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (HookedWeights, Before, OfModules, Accumulated)}


def layers(data: DataInfo, kind: str, hidden: int = 8) -> list[tuple[str, nn.Module]]:
    assert data.vocab_size is not None
    blocks = [(f"blocks.{at}", KINDS[kind](hidden)) for at in range(2)]
    return [("embed", Embed(data.vocab_size, hidden)), *blocks, ("head", nn.Linear(hidden, data.vocab_size))]


def model(data: DataInfo, kind: str) -> Model:
    return Model(layers(data, kind), init)
