"""Determines where each value of a resolved plan came from."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from sley_core.errors import KeyPath, Place
from sley_core.plan.defaults import is_named_by
from sley_core.plan.document import Origin
from sley_core.plan.plan import Plan
from sley_core.plan.tables import ModelConfig
from sley_core.plan.write import leaves


def origins(plan: Plan, written_in: Set[KeyPath]) -> Mapping[KeyPath, Origin]:
    """Returns the origin of every value of the resolved plan. written_in: the paths of those that core wrote in."""

    def origin(path: KeyPath, value: Any) -> Origin:
        if path not in written_in:
            return plan.document.origin(path) or _beside(plan, path) or Origin("default")
        if plan.pipeline and path[-1] == "use" and is_named_by(plan.pipeline, value):
            return Origin("record", named_by=plan.pipeline.name)
        return Origin("core")

    return {path: origin(path, value) for path, value in leaves(plan.tables)}


def _beside(plan: Plan, path: KeyPath) -> Origin | None:
    """Returns the file, beside the plan, that decides the model's key `path`; None if there is none."""
    config = plan.model.config
    file = config.decided_by(str(path[1])) if path[0] == "model" and isinstance(config, ModelConfig) else None
    return None if file is None else Origin("file", Place(file))
