"""Optimizers that are correct in a plain loop but unusual, and optimizers that a run cannot support."""

import random
from typing import Any

import torch
from torch import Tensor


class Plain(torch.optim.Optimizer):
    """Implements gradient descent. Each other class changes one thing."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(gradient, alpha=group["lr"])


class AssignsData(Plain):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.data = parameter.data - group["lr"] * gradient


class KeepsGradients(Plain):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        before = self.state[parameter].get("before", gradient)
        parameter.sub_(1.5 * gradient - 0.5 * before, alpha=group["lr"])
        self.state[parameter]["before"] = gradient


class Counts(Plain):
    """Divides by the step number, stored in an attribute, an option, a tensor option or a state, as `place` names."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, place: str = "attribute") -> None:
        super().__init__(params, lr, weight_decay)
        self.place, self.count = place, 0

    def step(self, closure: Any = None) -> None:
        self.count += self.place == "attribute"
        if self.place == "state":
            self.state.setdefault("all", {"count": torch.zeros(1)})["count"] += 1
        for group in self.param_groups:
            group["count"] = group.get("count", torch.zeros(()) if self.place == "tensor" else 0)
            group["count"] += self.place in ("option", "tensor")
        super().step()

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = float(self.state["all"]["count"][0]) if self.place == "state" else 0.0
        parameter.sub_(gradient, alpha=group["lr"] / (self.count + float(group["count"]) + state))


class ManyKinds(Plain):
    """Has nested states, states of other dtypes, states that are replaced in each step, and states that are no tensors."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"pair": [torch.zeros_like(parameter), 0], "is_up": torch.zeros_like(parameter, dtype=torch.bool)}
            state["deep"] = {"mean": (torch.zeros_like(parameter, dtype=torch.float64), "mean")}
        state["pair"] = [0.5 * state["pair"][0] + gradient, state["pair"][1] + 1]
        state["is_up"].copy_(state["pair"][0] > 0)
        state["deep"]["mean"][0].lerp_(gradient.double(), 0.1)
        change = state["pair"][0] / state["pair"][1] + state["deep"]["mean"][0].to(gradient.dtype)
        parameter.sub_(torch.where(state["is_up"], change, 2 * change), alpha=group["lr"])


class Draws(Plain):
    """Draws from torch's generator, from `random`, or from its own generator."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, source: str = "torch") -> None:
        super().__init__(params, lr, weight_decay)
        self.source = source
        self.own = [torch.Generator().manual_seed(1)] if source == "own" else []

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if self.source == "random":
            noise = torch.full_like(gradient, random.random())
        else:
            noise = torch.rand(gradient.shape, dtype=gradient.dtype, generator=self.own[0] if self.own else None)
        parameter.sub_(gradient * (1 + 0.5 * noise), alpha=group["lr"])


class Averages(Plain):
    """Trains between the last point and the mean of all points. `eval()` moves to the mean."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.is_training = False

    def train(self) -> None:
        self._move(to_mean=False)

    def eval(self) -> None:
        self._move(to_mean=True)

    @torch.no_grad()
    def _move(self, *, to_mean: bool) -> None:
        if self.is_training is to_mean:
            self.is_training = not to_mean
            for parameter in (param for group in self.param_groups for param in group["params"]):
                if (last := self.state[parameter].get("last")) is not None:
                    parameter.lerp_(last, -1.0 if to_mean else 0.5)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        assert self.is_training, "`train()` comes before a step"
        state = self.state[parameter]
        last = state.setdefault("last", parameter.clone())
        mean = 2 * parameter - last
        last.sub_(gradient, alpha=group["lr"])
        parameter.copy_((0.9 * mean + 1.1 * last) / 2)


# With these, a run would not train like a plain loop.


class TensorsInAttribute(Plain):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.means = {id(param): torch.zeros_like(param) for group in self.param_groups for param in group["params"]}

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, self.means[id(parameter)].lerp_(gradient, 0.5), group)


class TensorsUnderOwnKey(Plain):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        means = self.state["means"]
        super().update(parameter, means.setdefault(parameter.ndim, torch.zeros_like(parameter)).lerp_(gradient, 0.5), group)


class LooksAtSizes(Plain):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(gradient, alpha=group["lr"] / parameter.shape[-1])


class LooksAtAll(Plain):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        norm = sum(float(param.grad.norm()) for group_ in self.param_groups for param in group_["params"])
        parameter.sub_(gradient, alpha=group["lr"] / (1 + norm))


class KeepsItsRate(Plain):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(gradient, alpha=self.defaults["lr"])


class CannotStep(Plain):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise ValueError("only sparse gradients")


class NeedsAllGradients(Plain):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter.detach(), parameter.grad, group)
