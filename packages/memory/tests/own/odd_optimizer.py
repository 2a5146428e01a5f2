"""An optimizer that keeps its states as no optimizer of torch does: `factory = "odd_optimizer:Odd"`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor


class Odd(torch.optim.Optimizer):
    """Momentum whose states are replaced in each step, lie in lists, and come in the third step only; one state is nobody's.

    `state_dict` copies everything, as that of Transformer Engine's optimizers does.
    """

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"])

    def _step(self, parameter: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["sums"] = [torch.zeros_like(parameter), (torch.zeros_like(parameter, dtype=torch.float64), "a word")]
        state["step"] += 1
        first, (second, word) = state["sums"]
        state["sums"] = [first * 0.9 + parameter.grad, (second * 0.5 + parameter.grad, word)]
        if state["step"] == 3:
            state["late"] = parameter.detach().clone()
        update = state["sums"][0] + state["sums"][1][0].to(parameter.dtype) + state.get("late", 0.0)
        parameter.sub_(lr * update)
        if "all" not in self.state:
            self.state["all"] = {"of everybody": torch.arange(300.0)}

    def state_dict(self) -> dict[str, Any]:
        return deepcopy(super().state_dict())
