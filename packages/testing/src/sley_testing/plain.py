"""Trains with a plain PyTorch loop as the reference of runs: torch's autograd and optimizer, no engine.

loop = PlainLoop(layers, CrossEntropy(config), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
loop.load(first)                                 # the run's first weights, by name
step = loop.step(micro_batches)                  # those of the global batch, in order
assert_step(step, run.step(own), gradients(run), weights(run))

This module does not import Sley's engine, so that an engine bug cannot be on both sides of a comparison.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sley_core.model.layers import Layers, Model, as_model
from sley_core.protocols import Loss
from sley_testing.parity import assert_close_gradients

Tensors: TypeAlias = dict[str, Tensor]
Batch: TypeAlias = Mapping[str, Tensor]
Named: TypeAlias = "list[tuple[str, nn.Parameter]]"
MakeOptimizer: TypeAlias = "Callable[[Named], torch.optim.Optimizer]"

NEGLIGIBLE = 1e-6
"""A gradient below this share of the model's largest is rounding noise; its error is relative to that share."""

SMALL = 1e-3
"""The same for a weight's norm below this: weights that start at zero hold only AdamW's steps on rounding errors."""


@dataclass(frozen=True)
class PlainStep:
    """Holds the results of one step. loss: the mean; grad_norm: before clipping. gradients: by name, as the optimizer gets
    them; weights: by name, after its step.
    """

    loss: float
    grad_norm: float
    gradients: Tensors
    weights: Tensors


class NothingToTrainError(Exception):
    """The loss of a micro-batch depends on no parameter that is trained."""


class PlainLoop:
    """Trains `layers`, each called with the output of the layer before it and the batch fields that its forward names.

    layers: a model factory's result, with real parameters; each module of a tied parameter registers it, and builders are
        called. loss: as a plan's, `weight(batch)` and the sum `loss(output, batch)`. optimizer: makes torch's from (name,
        parameter) of all parameters; `decay_groups` may help. clip_norm, clip_kind: as for torch.nn.utils.clip_grad_norm_.
    A trained parameter that no micro-batch uses has a gradient of zeros, as in a run: momentum and decay continue. For a
    trained parameter of a narrow dtype (bf16) the optimizer steps a copy in fp32, in which its gradients are summed too.
    """

    def __init__(
        self,
        layers: Layers | Model,
        loss: Loss,
        *,
        optimizer: MakeOptimizer,
        clip_norm: float | None = None,
        clip_kind: float = 2.0,
    ) -> None:
        self.layers = [(layer.name, layer.module) for layer in as_model(layers).build()]
        self.loss = loss
        self.parameters = dict(named_parameters(self.layers))
        self.stepped = {name: _stepped(parameter) for name, parameter in self.parameters.items()}
        self.optimizer = optimizer(list(self.stepped.items()))
        self.clip_norm = math.inf if clip_norm is None else clip_norm
        self.clip_kind = clip_kind

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Loads every parameter by name; raises KeyError if one is missing."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])
                self.stepped[name].copy_(values[name])

    @property
    def weights(self) -> Tensors:
        """Returns copies of all parameters by name; a tied parameter has its first name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def step(self, micros: Sequence[Batch]) -> PlainStep:
        """Takes one optimizer step on the micro-batches of a global batch, and returns its results. Raises NothingToTrainError
        if a micro-batch's loss has no gradient.
        """
        total = sum(self.loss.weight(micro) for micro in micros)
        self.optimizer.zero_grad(set_to_none=True)
        sum_of_losses = 0.0
        for micro in micros:
            loss = self.loss.loss(self.forward(micro), micro)
            if not loss.requires_grad:
                raise NothingToTrainError
            self.backward(loss / total if total > 0 else loss * 0.0)
            sum_of_losses += loss.item()
        trained = {name: parameter for name, parameter in self.stepped.items() if parameter.requires_grad}
        for parameter in trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = nn.utils.clip_grad_norm_(list(trained.values()), self.clip_norm, self.clip_kind)
        gradients = {name: parameter.grad.clone() for name, parameter in trained.items() if parameter.grad is not None}
        self.update()
        with torch.no_grad():
            for name, master in trained.items():
                if master is not self.parameters[name]:
                    self.parameters[name].copy_(master)
        return PlainStep(sum_of_losses / total if total > 0 else 0.0, norm.item(), gradients, self.weights)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[Batch]) -> float:
        """Returns the mean loss of these micro-batches; changes nothing."""
        total = sum(self.loss.weight(micro) for micro in micros)
        loss = sum(self.loss.loss(self.forward(micro), micro).item() for micro in micros)
        return loss / total if total > 0 else 0.0

    def forward(self, micro: Batch) -> Any:
        """Returns the last layer's output."""
        args: tuple[Any, ...] = ()
        for name, module in self.layers:
            args = (self.call(name, module, args, _fields(module, micro, len(args))),)
        return args[0]

    def call(self, name: str, module: nn.Module, args: tuple[Any, ...], fields: Mapping[str, Tensor]) -> Any:
        """Returns the output of one layer. name: the layer's name."""
        del name
        return module(*args, **fields)

    def update(self) -> None:
        self.optimizer.step()

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradients of one micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        for name, parameter in self.parameters.items():
            master = self.stepped[name]
            if master is not parameter and parameter.grad is not None:
                wide = parameter.grad.to(master.dtype)
                master.grad = wide if master.grad is None else master.grad + wide
                parameter.grad = None


def _stepped(parameter: nn.Parameter) -> nn.Parameter:
    """Returns the parameter that the optimizer steps: an fp32 copy of a narrow trained parameter, else `parameter`."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    if wide == parameter.dtype or not parameter.requires_grad:
        return parameter
    return nn.Parameter(parameter.detach().to(wide))


def named_parameters(layers: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields every parameter once, under its name in the first layer that holds it."""
    seen: set[int] = set()
    for name, module in layers:
        for path, parameter in module.named_parameters(name):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield path, parameter


def decay_groups(named: Named, weight_decay: float) -> list[dict[str, Any]]:
    """Returns torch.optim's groups by the rule of plans: matrices decay, vectors do not."""
    matrices = [parameter for _, parameter in named if parameter.ndim >= 2]
    vectors = [parameter for _, parameter in named if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def assert_step(
    wanted: PlainStep, row: Mapping[str, float], gradients: Tensors, weights: Tensors, relative: float = 1e-9
) -> None:
    """Asserts that a run's step equals the loop's: loss, gradient norm, and the given gradients and weights.

    A rank of a pipeline gives those of its stage; buffers among the weights are left out. The message has the largest
    difference and its size.
    """
    for key, value in (("loss", wanted.loss), ("grad_norm", wanted.grad_norm)):
        assert math.isclose(row[key], value, rel_tol=relative, abs_tol=1e-12), f"{key} is {row[key]}, not {value}"
    floor = NEGLIGIBLE * max((float(one.double().norm()) for one in wanted.gradients.values()), default=0.0)
    own = {name: wanted.gradients[name] for name in gradients if name in wanted.gradients}
    assert_close_gradients(own, gradients, relative, floor=floor)
    found = {name: value for name, value in weights.items() if name in wanted.weights}
    assert_close_gradients({name: wanted.weights[name] for name in found}, found, relative, floor=SMALL)


def _fields(module: nn.Module, micro: Batch, skipped: int) -> dict[str, Tensor]:
    """Returns the fields that a layer's forward names. skipped: the number of leading parameters that are not fields."""
    # a module wrapped by torch.compile accepts and passes on any argument
    parameters = list(inspect.signature(getattr(module, "_orig_mod", module).forward).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        taken = {parameter.name for parameter in parameters[:skipped]}
        return {name: value for name, value in micro.items() if name not in taken}
    return {parameter.name: micro[parameter.name] for parameter in parameters[skipped:] if parameter.name in micro}
