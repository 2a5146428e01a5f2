"""Finds what an optimizer does with an element that a rank steps, and for what it makes the host wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sley_core.assemble import DTYPES, dtypes
from sley_core.errors import PlanError
from sley_core.optim.shared import in_training, skips_on_device
from sley_core.records import steps_on_host

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


def moved_by_update(plan: Plan, count: int) -> int:
    """Returns the bytes that norm, clipping and update move for each element that a rank steps: the gradient for the norm and
    for the update, there and back where it is clipped; weight and states there and back; a working copy, if there is one.

    count: how many tensors like the weight the optimizer keeps, which `num_states` returns.
    """
    config: Any = plan.optimizer.config
    times = 2 if config.clip_norm is None else 4
    working, stepped = dtypes(plan)
    copy = working.itemsize if stepped != working else 0
    gradients = DTYPES[plan.precision.gradients]
    widened = 2 * stepped.itemsize if gradients != stepped else 0
    return times * gradients.itemsize + widened + stepped.itemsize * (2 + 2 * count) + copy


def num_states(plan: Plan) -> int:
    """Returns how many tensors of the weight's shape the plan's optimizer keeps per weight, counted after a step of one 4 x 4
    weight on the CPU.

    Raises PlanError "estimate-seconds" for an optimizer that cannot be built or stepped so.
    """
    weight = nn.Parameter(torch.zeros(4, 4))
    try:
        optimizer: Any = in_training(plan.optimizer.build([{"params": [weight]}], torch.device("cpu")))
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    except Exception as error:
        message = f"`{plan.optimizer.name}` cannot be tried on one small weight: {type(error).__name__}: {error}"
        raise PlanError("estimate-seconds", message, path=("optimizer",)) from error
    kept = (value for value in optimizer.state[weight].values() if torch.is_tensor(value))
    return sum(1 for value in kept if value.shape == weight.shape)


def waits_before_updates(plan: Plan) -> bool:
    """Returns whether the host waits for its device before each update, and the device then for that: the host steps the
    weights itself, the loss is scaled, or the optimizer cannot skip a step on the device.
    """
    if plan.precision.loss_scale is not None or any(steps_on_host(manager.record) for manager in plan.offload):
        return True
    some = [{"params": [nn.Parameter(torch.zeros(4, 4))]}]
    return not skips_on_device(plan.optimizer.build(some, torch.device("cpu")))
