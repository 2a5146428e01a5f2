"""Provides a plain PyTorch training loop as the reference of runs: torch's autograd and optimizer without an engine.

loop = PlainLoop(layers, CrossEntropy(config), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
loop.load(initial_weights)                       # the run's initial weights, by name
step = loop.step(microbatches)                  # the microbatches of the global batch, in order
assert_step(step, run.step(local_batch), gradients(run), weights(run))

This module does not import Sley's engine, so that an engine bug cannot be on both sides of a comparison.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sley_core.model.layers import Layers, Model, as_model
from sley_core.protocols import Loss
from sley_testing.parity import assert_close_gradients, noise_floor

Tensors: TypeAlias = dict[str, Tensor]
Batch: TypeAlias = Mapping[str, Tensor]
NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
MakeOptimizer: TypeAlias = Callable[[NamedParameters], torch.optim.Optimizer]

MIN_WEIGHT_NORM = 1e-3
"""Errors of weights are relative to at least this norm, since weights near zero may consist of AdamW's steps on noise."""


@dataclass(frozen=True)
class PlainStep:
    """Holds the results of one step. loss: the mean loss. grad_norm: the gradient norm before clipping. gradients: the clipped
    gradients by name. weights: the updated weights by name.
    """

    loss: float
    grad_norm: float
    gradients: Tensors
    weights: Tensors


class NamedParameter(NamedTuple):
    """Describes a parameter for `sley_core.optim.optimizers.parameter_groups`. decays: whether weight decay applies to it."""

    name: str
    parameter: nn.Parameter
    decays: bool


class PlainLoop:
    """Trains `layers`. Each layer is called with the output of the previous layer and the batch fields that its forward names.

    layers: the result of a model factory, not on meta. All modules that share a tied parameter must register it. loss: a loss
    as in a plan, with the sum `loss(output, batch)` and its `weight(batch)`. optimizer: a function that takes the list of all
    (name, parameter) pairs and returns a torch optimizer. clip_norm, clip_kind: the maximum norm (None does not clip) and the
    norm type of torch.nn.utils.clip_grad_norm_.

    A trained parameter that no microbatch uses gets a zero gradient, as in a run, so that momentum and decay continue. For a
    trained parameter in bf16 or fp16, the optimizer updates an fp32 copy, whose gradient is the fp32 sum over microbatches.
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
        self.parameters: dict[str, nn.Parameter] = {}  # a tied parameter occurs once, under its first name
        for name, module in self.layers:
            known_ids = {id(parameter) for parameter in self.parameters.values()}
            self.parameters |= {path: value for path, value in module.named_parameters(name) if id(value) not in known_ids}
        self.optimizer_params = {name: _make_optimizer_param(parameter) for name, parameter in self.parameters.items()}
        self.optimizer = optimizer(list(self.optimizer_params.items()))
        self.clip_norm = math.inf if clip_norm is None else clip_norm
        self.clip_kind = clip_kind

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copies `values` into the parameters by name. Raises KeyError if the value of a parameter is missing."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])
                self.optimizer_params[name].copy_(values[name])

    @property
    def weights(self) -> Tensors:
        """Copies of all parameters by name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def step(self, microbatches: Sequence[Batch]) -> PlainStep:
        """Takes one optimizer step on the microbatches of a global batch, and returns its results."""
        total = sum(self.loss.weight(microbatch) for microbatch in microbatches)
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for microbatch in microbatches:
            loss = self.loss.loss(self.forward(microbatch), microbatch)
            self._accumulate(loss / total if total > 0 else loss * 0.0)
            loss_sum += loss.item()
        trained = {name: parameter for name, parameter in self.optimizer_params.items() if parameter.requires_grad}
        for parameter in trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = nn.utils.clip_grad_norm_(list(trained.values()), self.clip_norm, self.clip_kind)
        gradients = {name: parameter.grad.clone() for name, parameter in trained.items() if parameter.grad is not None}
        self.optimizer.step()
        with torch.no_grad():
            for name, master in trained.items():
                if master is not self.parameters[name]:
                    self.parameters[name].copy_(master)
        return PlainStep(loss_sum / total if total > 0 else 0.0, norm.item(), gradients, self.weights)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Batch]) -> float:
        """Returns the mean loss of the microbatches, or 0 if their total weight is 0."""
        total = sum(self.loss.weight(microbatch) for microbatch in microbatches)
        loss = sum(self.loss.loss(self.forward(microbatch), microbatch).item() for microbatch in microbatches)
        return loss / total if total > 0 else 0.0

    def forward(self, batch: Batch) -> Any:
        """Returns the output of the last layer for a microbatch."""
        args: tuple[Any, ...] = ()
        for _, module in self.layers:
            args = (module(*args, **_select_fields(module, batch, len(args))),)
        return args[0]

    def _accumulate(self, loss: Tensor) -> None:
        """Runs the backward of `loss`, and adds the gradients of bf16 and fp16 parameters to those of their fp32 copies."""
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.parameters.items():
            master = self.optimizer_params[name]
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None


def _make_optimizer_param(parameter: nn.Parameter) -> nn.Parameter:
    """Returns the parameter that the optimizer updates: `parameter`, or its fp32 copy if it is trained in a narrower dtype."""
    wide_dtype = torch.promote_types(parameter.dtype, torch.float32)
    if wide_dtype == parameter.dtype or not parameter.requires_grad:
        return parameter
    return nn.Parameter(parameter.detach().to(wide_dtype))


def decay_groups(named: NamedParameters, weight_decay: float) -> list[dict[str, Any]]:
    """Returns parameter groups for torch.optim. As in a plan, weight decay applies to parameters with at least two dims."""
    matrices = [parameter for _, parameter in named if parameter.ndim >= 2]
    vectors = [parameter for _, parameter in named if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def assert_step(
    expected: PlainStep, row: Mapping[str, float], gradients: Tensors, weights: Tensors, tolerance: float = 1e-9
) -> None:
    """Asserts that a run's step equals the loop's step: loss, gradient norm, gradients and weights. row: the run's metrics.
    gradients, weights: the tensors of this rank, for example of its pipeline stage. Buffers among the weights are not compared.
    tolerance: the relative tolerance.
    """
    for key, value in (("loss", expected.loss), ("grad_norm", expected.grad_norm)):
        assert math.isclose(row[key], value, rel_tol=tolerance, abs_tol=1e-12), f"{key} is {row[key]}, not {value}"
    local_gradients = {name: expected.gradients[name] for name in gradients if name in expected.gradients}
    assert_close_gradients(local_gradients, gradients, tolerance, floor=noise_floor(expected.gradients))
    parameters = {name: value for name, value in weights.items() if name in expected.weights}
    assert_close_gradients({name: expected.weights[name] for name in parameters}, parameters, tolerance, floor=MIN_WEIGHT_NORM)


def split_batch(batch: Batch, size: int) -> list[dict[str, Tensor]]:
    """Splits all fields of a batch along dim 0 into microbatches of `size` samples. The last microbatch may be smaller."""
    parts = zip(*(torch.split(value, size) for value in batch.values()), strict=True)
    return [dict(zip(batch, values, strict=True)) for values in parts]


def _select_fields(module: nn.Module, batch: Batch, num_skipped: int) -> dict[str, Tensor]:
    """Returns the batch fields that the forward of `module` accepts, except for its first `num_skipped` parameters."""
    # the forward of a module that torch.compile wraps accepts any argument
    parameters = list(inspect.signature(getattr(module, "_orig_mod", module).forward).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        skipped_names = {parameter.name for parameter in parameters[:num_skipped]}
        return {name: value for name, value in batch.items() if name not in skipped_names}
    return {parameter.name: batch[parameter.name] for parameter in parameters[num_skipped:] if parameter.name in batch}
