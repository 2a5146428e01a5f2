"""Checks a plan's prefetch launch point, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sley_core.records import Problem
from sley_isp.config import ANYWHERE, CommunicatorConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


def check_launch(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if `launch` is set with `unit = "module"`, where each module starts the next one's gather anyway.

    Whether the name matches a module is checked when the model is built.
    """
    weights = plan.weights
    if weights is None or not isinstance(weights.config, CommunicatorConfig):
        return
    config = weights.config
    if config.unit == "module" and config.launch != ANYWHERE:
        message = (
            f'`launch = "{config.launch}"` says where in a layer gathers start; with `unit = "module"` each module does'
        )
        yield Problem(("weights", "launch"), message, 'leave it out, or use `unit = "layer"`', "launch-unit")
