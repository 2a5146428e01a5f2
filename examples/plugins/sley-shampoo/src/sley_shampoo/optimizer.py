"""Shampoo in plain PyTorch.

For each dim i of a parameter, the statistic L_i is the sum of G_i G_i^T over all steps, where G_i is the gradient with dim i
first, as a matrix. The update multiplies the gradient along each dim by L_i^(-1 / 2n), for n dims.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sley_shampoo.plugin import ShampooConfig


class Shampoo(torch.optim.Optimizer):
    """Preconditions the gradient of each parameter along each of its dims."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, momentum: float = 0.9, eps: float = 1e-4, every: int = 1
    ) -> None:
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps, "every": every}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            identities = [torch.eye(size, dtype=gradient.dtype, device=gradient.device) for size in gradient.shape]
            state["step"] = 0
            state["momentum"] = torch.zeros_like(gradient)
            state["statistics"] = [group["eps"] * identity for identity in identities]
            state["roots"] = identities
        update = gradient
        for dim, statistic in enumerate(state["statistics"]):
            rows = gradient.movedim(dim, 0).flatten(1) if gradient.ndim > 1 else gradient[:, None]
            statistic.addmm_(rows, rows.T)
            if state["step"] % group["every"] == 0:
                state["roots"][dim].copy_(inverse_root(statistic, 2 * gradient.ndim))
            update = torch.tensordot(state["roots"][dim], update.movedim(dim, 0), 1).movedim(0, dim)
        state["step"] += 1
        momentum = state["momentum"].mul_(group["momentum"]).add_(update)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum, alpha=group["lr"])


def inverse_root(matrix: Tensor, root: int) -> Tensor:
    """Returns matrix^(-1/root) of a positive definite matrix, computed in float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    inverse: Tensor = vectors * values.clamp(min=1e-30).pow(-1 / root) @ vectors.T
    return inverse.to(matrix.dtype)


def build(config: ShampooConfig, groups: list[dict[str, Any]], device: torch.device) -> Shampoo:
    return Shampoo(groups, config.lr, momentum=config.momentum, eps=config.eps, every=config.every)
