"""Checks a plan's learning rate without torch."""

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
    """Yields a problem if the parts of `core.warmup_stable_decay` do not fit into the run; core's other curves always do."""
    config = plan.learning_rate.config
    if isinstance(config, WarmupStableDecayConfig):
        try:
            warmup_stable_decay(config, plan.run.steps)
        except PlanError as error:
            for found in error.diagnostics:
                yield Problem(found.path, found.message, found.hint, found.code)
