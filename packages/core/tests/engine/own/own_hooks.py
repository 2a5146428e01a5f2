"""A plugin that writes down what it is called with, and what it is told of the run."""

from __future__ import annotations

from typing import Any

from sley_core.hookspecs import hookimpl
from sley_core.records import SchedulerHookRecord
from sley_core.table import Table

CALLS = ("before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward")


class SpyConfig(Table):
    """Nothing to set."""


class Spy:
    """Keeps (name of the call, MicroStep, what it concerns) in `seen`, of the latest run."""

    latest: Spy

    def __init__(self, config: SpyConfig, parts: Any) -> None:
        self.parts = parts
        self.seen: list[tuple[str, Any, Any]] = []
        Spy.latest = self

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)
        return lambda micro, what: self.seen.append((name, micro, what))


@hookimpl
def sley_scheduler_hooks() -> list[SchedulerHookRecord]:
    return [SchedulerHookRecord(name="spy", config=SpyConfig, build="own_hooks:Spy")]
