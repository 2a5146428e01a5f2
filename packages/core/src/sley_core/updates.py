"""Builds the end of a run's steps: masters and optimizer, as the plan has them."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from sley_core.draft import dtypes
from sley_core.engine.loss_scale import LossScale
from sley_core.engine.masters import HOST, Masters
from sley_core.engine.skips import Skips
from sley_core.engine.update import Update
from sley_core.optim.groups import EVERYWHERE_ALIKE, parameter_groups
from sley_core.records import steps_on_host

if TYPE_CHECKING:
    from sley_core.engine.parts import Parts
    from sley_core.plan.plan import Plan


def make_update(plan: Plan, parts: Parts) -> Update:
    """Builds masters and optimizer for the trainable parameters, and rounds the frozen ones to the working dtype; returns the
    update.
    """
    config: Any = plan.optimizer.config
    device = parts.world.device
    host = HOST if device.is_real else device.torch_device  # what has no memory has no host either
    home = host if any(steps_on_host(manager.record) for manager in plan.offload) else None
    masters = Masters(parts.weights, parts.store, dtypes(plan)[1], home)
    masters.add(parts.book.trainable)
    for entry in parts.book:
        if not entry.trainable:
            parts.weights.adopt(entry)
    place = home or device.torch_device
    # Canonical sums on a CPU: a shard ends elsewhere than its tensor, so kernels must round all elements alike.
    is_alike = parts.store.canonical is not None and plan.optimizer.record is not None and place.type == "cpu"
    groups_of = partial(parameter_groups, config=config, more=EVERYWHERE_ALIKE if is_alike else None)
    optimizer = plan.optimizer.build(groups_of(masters.stepped), place)
    return Update(
        parts.store,
        masters,
        optimizer,
        groups_of,
        plan.learning_rate.build(plan.run.steps),
        parts.groups,
        parts.world.device,
        parts.numbers,
        clip_norm=config.clip_norm,
        norm_kind=math.inf if config.clip_kind == "inf" else config.clip_kind,
        scale=None if plan.precision.loss_scale is None else LossScale(plan.precision.loss_scale),
        events=parts.events,
        skips=None if plan.run.max_skips is None else Skips(plan.run.max_skips),
    )
