"""The parity matrix's other side: the same model and batch with torch.distributed.pipelining, DDP and FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matrix_parts import layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

SCHEDULES = {
    "pp.gpipe": schedules.ScheduleGPipe,
    "pp.one_f_one_b": schedules.Schedule1F1B,
    "pp.interleaved": schedules.ScheduleInterleaved1F1B,
    "pp.zero_bubble_h1": schedules.ScheduleInterleavedZeroBubble,
    "pp.zero_bubble_v": schedules.ScheduleZBVZeroBubble,
}
"""Ours, and what comes closest to it."""

POSITIONS = {
    schedules.ScheduleGPipe: ([0], [1]),
    schedules.Schedule1F1B: ([0], [1]),
    schedules.ScheduleInterleaved1F1B: ([0, 2], [1, 3]),
    schedules.ScheduleInterleavedZeroBubble: ([0, 2], [1, 3]),
    schedules.ScheduleZBVZeroBubble: ([0, 3], [1, 2]),
}
"""The parts of the model on each of two stages."""

Tensors = dict[str, Tensor]


def gradients(cells: list[tuple[str, str, bool]], values: dict[bool, Tensors], batch: Tensors) -> list[Tensors]:
    """This rank's gradients for each (schedule, wrapper, tied): by name, zero where torch leaves none.

    values: the first weights, tied or not. batch: the global one.
    """
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    return [_gradients(mesh, *cell, values[cell[2]], batch) for cell in cells]


def _gradients(mesh: Any, schedule: str, wrapper: str, tied: bool, values: Tensors, batch: Tensors) -> Tensors:
    stage, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    named = layers(tied)
    for name, layer in named:
        layer.load_state_dict({key: values.get(f"{name}.{key}", values["embed.weight"]) for key in layer.state_dict()})
    kind = SCHEDULES[schedule]
    positions = POSITIONS[kind][stage]
    parts = len(positions) * 2
    size = len(named) // parts
    stages = []
    for at in positions:
        part = _wrapped(nn.Sequential(*(layer for _, layer in named[at * size : (at + 1) * size])), wrapper, mesh["dp"])
        stages.append(PipelineStage(part, at, parts, torch.device("cpu"), group=mesh.get_group("pp")))
    made = kind(stages if parts > 2 else stages[0], 4, loss_fn=_loss)
    tokens, labels = (batch[name].chunk(mesh["dp"].size())[replica] for name in ("tokens", "labels"))
    inputs = (tokens,) if 0 in positions else ()
    made.step(*inputs, target=labels if parts - 1 in positions else None)
    found = {}
    for at in positions:
        for name, layer in named[at * size : (at + 1) * size]:
            for key, parameter in layer.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                found[f"{name}.{key}"] = whole.detach().clone()
    return found


def _loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def _wrapped(part: nn.Module, wrapper: str, mesh: Any) -> nn.Module:
    if wrapper == "DDP":
        return DistributedDataParallel(part, process_group=mesh.get_group())
    if wrapper.startswith("FSDP2"):
        reshards = {"reshard_after_forward": False} if wrapper == "FSDP2 whole" else {}
        for layer in part.children():
            fully_shard(layer, mesh=mesh, **reshards)
        fully_shard(part, mesh=mesh, **reshards)
    return part
