"""A matrix optimizer that computes in its parameters' dtype (torch's Muon rounds to bfloat16), and a model of matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Orthogonal(torch.optim.Optimizer):
    """Muon without bfloat16, which also updates vectors: by the normalised momentum."""

    def __init__(self, params, lr=0.02, weight_decay=0.0, momentum=0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(orthogonal(momentum), alpha=group["lr"])


def orthogonal(momentum: Tensor) -> Tensor:
    """Returns a matrix with the singular vectors of `momentum`, and singular values nearer to 1. A tiny gradient, which is
    rounding noise, has a tiny result.
    """
    update = momentum / (momentum.norm() + 1e-3)
    if momentum.ndim != 2:
        return update
    for _ in range(5):
        update = 1.5 * update - 0.5 * update @ (update.T @ update)
    return update


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.feed_forward = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(x).tanh()


def perceptron(width=24, num_blocks=3, vocab_size=257):
    """Returns layers that have only matrices, as torch's Muon requires, with a tied table."""
    embed, head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, bias=False)
    head.weight = embed.weight
    blocks = [(f"blocks.{index}", Residual(width)) for index in range(num_blocks)]
    return [("embed", Tokens(embed)), *blocks, ("head", head)]


class Tokens(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)
