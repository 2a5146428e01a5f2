"""Measures the time that the host spends in a step outside the layers, with runs whose weights have one element each.

    seconds of a step = step_s + parameter_s x weights + microbatches x (micro_s + gradient_s x weights)

Four runs, with few or many weights and with one or several microbatches, determine the four figures. Their device is almost
idle, so a step takes as long as its host works: on batches, gradients from autograd, norm, clipping, optimizer and totals.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.data.dataset import DataInfo, Field
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.machine import EngineTable
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

WEIGHT_COUNTS = 8, 128  # the number of weights in runs with few and with many
MICRO_BATCH_COUNTS = 1, 5  # the number of microbatches in each step

STEPS_PER_TURN, NUM_TURNS = 4, 7
"""Each run takes STEPS_PER_TURN steps in each of NUM_TURNS turns. The result is the median over turns, since other work
sometimes slows a host."""

WARMUP_STEPS = 3  # the number of steps before the timed ones, in which optimizer states are created


class IndexDataset:
    """A dataset whose samples are their indices."""

    info = DataInfo({"number": Field("int64")})

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index)}


class Weights(nn.Module):
    """A layer with `count` one-element weights, which computes nothing but gives each weight a gradient."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.ones(1)))

    def forward(self, number: Tensor) -> Tensor:
        """Returns a zero whose graph contains all parameters. number: a field of the batch; a first layer must read one."""
        zero: Tensor = _Zero.apply(*self._parameters.values())  # type: ignore[no-untyped-call]
        return zero


def build_weights(count: int) -> list[nn.Module]:
    """Returns the layers of a model with `count` weights."""
    return [Weights(count)]


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.count, ctx.dtype = len(weights), weights[0].dtype
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        # Each weight gets a tensor of its own, since autograd would copy a tensor that is returned twice.
        return torch.unbind(gradients[0].to(ctx.dtype).expand(ctx.count, 1).contiguous())


class IdentityLoss:
    """A loss that returns the output of the model."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(len(batch["number"]))

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return output


def measure_engine(device: Device, plan: Plan | None = None) -> dict[str, float]:
    """Returns the table `[engine]` in about two seconds. plan: sets the dtypes; without a plan, weights are bf16."""
    precision = {"compute": plan.precision.compute, "gradients": plan.precision.gradients} if plan else {"compute": "bf16"}
    turns = []
    with ExitStack() as stack, device.preserve_random_state():
        world = stack.enter_context(World.alone(device))
        counts = product(WEIGHT_COUNTS, MICRO_BATCH_COUNTS)
        runs = {pair: stack.enter_context(assemble(_engine_plan(device, precision, *pair), world)) for pair in counts}
        for run in runs.values():
            for _ in range(WARMUP_STEPS):
                run.step()
        for _ in range(NUM_TURNS):
            turns.append(solve_engine_table({pair: mean_step_s(run, STEPS_PER_TURN) for pair, run in runs.items()}))
    return {name: median(getattr(turn, name) for turn in turns) for name in EngineTable.model_fields}


def solve_engine_table(seconds: Mapping[tuple[int, int], float]) -> EngineTable:
    """Returns the four figures, none of them negative. seconds: the seconds of a step by (weights, microbatches)."""
    min_count, max_count = MICRO_BATCH_COUNTS
    micro_s, gradient_s = _fit_line(
        {n: (seconds[n, max_count] - seconds[n, min_count]) / (max_count - min_count) for n in WEIGHT_COUNTS}
    )
    step_s, parameter_s = _fit_line({n: seconds[n, min_count] - min_count * (micro_s + n * gradient_s) for n in WEIGHT_COUNTS})
    return EngineTable(step_s=step_s, parameter_s=parameter_s, micro_s=micro_s, gradient_s=gradient_s)


def _fit_line(values: Mapping[int, float]) -> tuple[float, float]:
    """Returns the intercept and the slope of the line through two points, each raised to 0 if negative. values: y by x."""
    (first_x, first_y), (second_x, second_y) = values.items()
    slope = max(0.0, (second_y - first_y) / (second_x - first_x))
    return max(0.0, first_y - first_x * slope), slope


def _engine_plan(device: Device, precision: Mapping[str, str], num_weights: int, num_microbatches: int) -> Plan:
    tables = {
        "run": {"name": "engine", "steps": 1 << 20, "device": device.type},
        "model": {"factory": f"{__name__}:build_weights", "options": {"count": num_weights}},
        "data": {"factory": f"{__name__}:IndexDataset"},
        "loss": {"factory": f"{__name__}:IdentityLoss"},
        "batch": {"global_size": num_microbatches, "micro_size": 1},
        "optimizer": {"use": "core.adamw", "lr": 1e-4, "clip_norm": 1.0},
        "precision": dict(precision),
    }
    return plan_from_dict(tables)


def mean_step_s(run: Run, num_steps: int) -> float:
    """Returns the mean seconds of `num_steps` steps, each started before the totals of the previous one are read."""
    device = run.world.device
    current = run.launch(None)
    device.wait_until(device.moment())
    start_s = time.perf_counter()
    for _ in range(num_steps):
        previous, current = current, run.launch(None)
        assert previous.totals.read().is_finite, f"step {previous.number}"
    device.wait_until(device.moment())
    elapsed_s = time.perf_counter() - start_s
    assert current.totals.read().is_finite, f"step {current.number}"
    run.parts.weights.settle()
    return elapsed_s / num_steps
