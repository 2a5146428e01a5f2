"""A matrix optimizer that computes in its parameters' dtype (torch's Muon rounds to bfloat16)."""

import torch
from torch import Tensor


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
