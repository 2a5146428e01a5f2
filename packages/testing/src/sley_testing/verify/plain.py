"""Takes the steps of `train-cli verify --plain` in a plain torch loop over the plan's layers, and saves their results.

The loop uses the first values, samples, learning rates and seeds of a one-process run, which takes no step itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from sley_core.engine.call import LayerCaller
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.errors import RunError, UsageError
from sley_core.generators import GENERATOR_LOCK
from sley_core.model.buffers import train
from sley_core.model.layers import as_model
from sley_core.optim.build import scale_learning_rate
from sley_core.plan.plan import Plan
from sley_core.run import Run
from sley_testing.plain import NothingToTrainError
from sley_testing.runs import weights
from sley_testing.verify.findings import Habit
from sley_testing.verify.habits import HabitLoop
from sley_testing.verify.measure import full_weights, save_plain_step, tensor_file


class _NamedParameter(NamedTuple):
    """Holds a parameter in the form that the plan's parameter groups need."""

    name: str
    parameter: nn.Parameter
    decays: bool


def check_plain_support(plan: Plan) -> None:
    """Raises UsageError if a plain loop would compute different results than the one-process `plan`."""
    if plan.precision.compute == "fp16":
        message = "a plain loop has no loss scale, which fp16 needs"
        raise UsageError("verify-plain", message, hint='use `--set precision.compute="fp32"`, or remove `--plain`')
    if plan.gradient_handlers:
        message = f"a plain loop does not have `{plan.gradient_handlers[0].name}`, which changes gradients"
        raise UsageError("verify-plain", message, hint="remove `--plain`")


def save_plain_steps(run: Run, num_steps: int, folder: Path, habits: list[Habit]) -> None:
    """Takes `num_steps` of the loop, saves their results in `folder` as `measure.save_reference` does, and adds to the model's
    `habits`. run: a one-process run that has taken no step. Raises RunError "plain-loop" if the loop fails.
    """
    loop, device = _build_loop(run, habits), run.world.device
    assert run.samples.feed is not None, "a run of one process reads its samples"
    save_file(full_weights(run), tensor_file(folder, 0, "weights"))
    for number in range(1, num_steps + 1):
        try:
            loop.begin(number)
            scale_learning_rate(loop.optimizer, run.stepper.update.factor(number - 1))
            batch = run.samples.splitter.split_feed(run.samples.feed.next())
            step = loop.step([{name: device.move(value) for name, value in fields.items()} for fields in batch.micros])
        except NothingToTrainError:
            raise RunError("plain-loop", "the loss of a micro-batch depends on no trained parameter") from None
        except Exception as error:
            message = f"{loop.location} also fails in step {number} of a plain loop: {type(error).__name__}: {error}"
            raise RunError("plain-loop", message) from error
        save_plain_step(folder, number, step, run.plan.optimizer.config.clip_norm)


def _build_loop(run: Run, habits: list[Habit]) -> HabitLoop:
    """Builds new layers with the plan's factory, and returns a loop with the values, precision and optimizer of `run`."""
    plan, update = run.plan, run.stepper.update
    with run.world.device.preserve_random_state():
        model = as_model(plan.model.build(run.samples.dataset.info)).build(plan.run.seed)
    for layer in model.layers:
        layer.module.to(run.world.device.torch_device)
    values = weights(run)
    for layer in model.layers:  # parameters get the dtypes and flags of the run, and buffers its values
        for path, parameter in layer.module.named_parameters(layer.name):
            param = next(param for param in run.registry if path == param.name or path in param.aliases)
            parameter.data = parameter.data.to(param.parameter.dtype)
            parameter.requires_grad_(param.trainable)
        for path, buffer in layer.module.named_buffers(layer.name):
            buffer.copy_(values[path])
    modules = [named for layer in model.layers for named in layer.module.named_modules(prefix=layer.name)]
    evaluated = {name for name, module in modules if not module.training}
    train(model)
    config: Any = plan.optimizer.config

    def make_optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        grouped = [_NamedParameter(name, parameter, run.registry[name].decays) for name, parameter in trained]
        groups = update.parameter_groups(grouped)  # type: ignore[arg-type]  # it has a name, a parameter and `decays`
        optimizer: torch.optim.Optimizer = plan.optimizer.build(groups, run.world.device.torch_device)
        return optimizer

    seeds = LayerCaller(run.world.device, plan.run.seed, run.stepper.executor.caller.policy)
    layers = {layer.name: layer for layer in model.layers}

    @contextmanager
    def seeded(name: str, step: int, micro: int) -> Iterator[None]:
        with GENERATOR_LOCK:
            seeds.seed_layer(layers[name], MicroStep(0, micro, Phase.TRAIN, step - 1, micro))
            yield

    loop = HabitLoop(
        model,
        run.stepper.executor.loss,
        optimizer=make_optimizer,
        clip_norm=config.clip_norm,
        clip_kind=math.inf if config.clip_kind == "inf" else config.clip_kind,
    )
    loop.prepare(seeded, update.seeded, evaluated, habits)
    master_weights = {stepped.param.name: stepped.parameter.detach() for stepped in update.masters.stepped}
    loop.load(weights(run) | master_weights)
    return loop
