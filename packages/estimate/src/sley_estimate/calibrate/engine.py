"""Measures the host's seconds of a step beside its layers: runs of the engine itself, on weights of one element.

    a step = step_s + parameter_s x weights + micro-batches x (micro_s + gradient_s x weights)

Runs of few and of many weights, with one micro-batch and with several, give the four. Their device has next to nothing to do,
so a step takes as long as the host: batches, gradients that autograd hands over, norm, clipping, the optimizer, the totals.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.assemble import assemble
from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.data.dataset import DataInfo, Field
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.run import Run
from sley_estimate.machine import EngineTable

WEIGHTS = 8, 128  # of a run of few weights, and of one of many
MICROS = 1, 5  # micro-batches of a step

STEPS, TURNS = 4, 7
"""Steps of each run in a turn, and turns; medians of turns count, since hosts have other work at times."""

FIRST_STEPS = 3  # in which optimizer states and orders come


class Numbers:
    """A data set whose samples are their own numbers."""

    info = DataInfo({"number": Field("int64")})

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index)}


class Weights(nn.Module):
    """A layer of `count` weights of one element that computes nothing; each gets a gradient."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.ones(1)))

    def forward(self, number: Tensor) -> Tensor:
        zero: Tensor = _Zero.apply(*self._parameters.values())  # type: ignore[no-untyped-call]  # torch's
        return zero


def weights(count: int) -> list[nn.Module]:
    """Returns the layers of that model."""
    return [Weights(count)]


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.count, ctx.dtype = len(weights), weights[0].dtype
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        # a tensor of its own for each: autograd copies one that it is given twice
        return torch.unbind(gradients[0].to(ctx.dtype).expand(ctx.count, 1).contiguous())


class Identity:
    """A loss that is the output."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(len(batch["number"]))

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return output


def measure_engine(device: Device, plan: Plan | None = None) -> dict[str, float]:
    """Measures the table `[engine]`, a second or two. plan: gives the dtypes of weights and gradients; None: bf16."""
    precision = {"compute": plan.precision.compute, "gradients": plan.precision.gradients} if plan else {"compute": "bf16"}
    turns = []
    with ExitStack() as stack, device.random_state_kept():
        world = stack.enter_context(World.alone(device))
        kinds = product(WEIGHTS, MICROS)
        runs = {kind: stack.enter_context(assemble(_plan(device, precision, *kind), world)) for kind in kinds}
        for run in runs.values():
            for _ in range(FIRST_STEPS):
                run.step()
        for _ in range(TURNS):
            turns.append(solved({kind: seconds_of_steps(run, STEPS) for kind, run in runs.items()}))
    return {name: median(getattr(turn, name) for turn in turns) for name in EngineTable.model_fields}


def solved(seconds: Mapping[tuple[int, int], float]) -> EngineTable:
    """Returns the four figures, none negative, for seconds of a step of each kind (weights, micro-batches)."""
    few, many = MICROS
    micro_s, gradient_s = _line({n: (seconds[n, many] - seconds[n, few]) / (many - few) for n in WEIGHTS})
    step_s, parameter_s = _line({n: seconds[n, few] - few * (micro_s + n * gradient_s) for n in WEIGHTS})
    return EngineTable(step_s=step_s, parameter_s=parameter_s, micro_s=micro_s, gradient_s=gradient_s)


def _line(values: Mapping[int, float]) -> tuple[float, float]:
    """Returns the value at 0 of the line through two points, and its slope; neither negative."""
    (few, low), (many, high) = values.items()
    slope = max(0.0, (high - low) / (many - few))
    return max(0.0, low - few * slope), slope


def _plan(device: Device, precision: Mapping[str, str], count: int, micros: int) -> Plan:
    tables = {
        "run": {"name": "engine", "steps": 1 << 20, "device": device.type},
        "model": {"factory": f"{__name__}:weights", "options": {"count": count}},
        "data": {"factory": f"{__name__}:Numbers"},
        "loss": {"factory": f"{__name__}:Identity"},
        "batch": {"global_size": micros, "micro_size": 1},
        "optimizer": {"use": "core.adamw", "lr": 1e-4, "clip_norm": 1.0},
        "precision": dict(precision),
    }
    return plan_from_dict(tables)


def seconds_of_steps(run: Run, num_steps: int) -> float:
    """Returns the mean seconds of steps, each launched before the one before is read, as `Run.train` does."""
    device = run.world.device
    late = run.launch(None)
    device.wait_until(device.moment())
    began_s = time.perf_counter()
    for _ in range(num_steps):
        before, late = late, run.launch(None)
        assert before.totals.read().is_finite, f"step {before.number}"
    device.wait_until(device.moment())
    taken_s = time.perf_counter() - began_s
    assert late.totals.read().is_finite, f"step {late.number}"
    run.parts.weights.settle()
    return taken_s / num_steps
