"""The three notifications of the hookspecs, sent to those plugins of the plan that listen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sley_core.loader import Plugin
    from sley_core.plan.plan import Plan

NOTIFICATIONS = ("sley_run_started", "sley_step_finished", "sley_run_finished")


class Notifier:
    """Who listens is known when the run is assembled: a step of a run that nobody watches makes no hook call."""

    def __init__(self, plan: Plan) -> None:
        self._listeners: dict[str, list[Plugin]] = {
            hook: [plugin for plugin in plan.plugins.values() if plugin.implements(hook)] for hook in NOTIFICATIONS
        }

    def __call__(self, hook: str, **arguments: Any) -> None:
        """Calls `hook` of every listener in the plan's order. Raises PluginError for whatever one raises."""
        for plugin in self._listeners[hook]:
            plugin.call(hook, **arguments)
