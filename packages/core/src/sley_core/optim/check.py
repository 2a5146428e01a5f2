"""What is wrong with a plan's learning rate, found without torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.errors import PlanError
from sley_core.optim.config import WarmupStableDecayConfig
from sley_core.optim.learning_rate import warmup_stable_decay
from sley_core.records import Problem

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


def check_learning_rate(plan: Plan) -> Iterable[Problem]:
    """The parts of `core.warmup_stable_decay` must fit into the run's steps; every other curve of core's always does."""
    config = plan.learning_rate.config
    if isinstance(config, WarmupStableDecayConfig):
        try:
            warmup_stable_decay(config, plan.run.steps)
        except PlanError as error:
            for found in error.diagnostics:
                yield Problem(found.path, found.message, found.hint, found.code)
