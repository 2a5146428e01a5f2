"""Sends the three notifications of the hookspecs to those plugins of the plan that implement them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sley_core.comm.groups import Groups
    from sley_core.comm.world import World
    from sley_core.engine.registry import ParameterRegistry
    from sley_core.model.layers import Layer
    from sley_core.plan.loader import Plugin
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology

NOTIFICATIONS = ("sley_run_started", "sley_step_finished", "sley_run_finished")


class Notified(Protocol):
    """Describes the run of a notification: what a listener may read, and `stop`."""

    plan: Plan
    world: World
    topology: Topology
    groups: Groups
    layers: Sequence[Layer]
    registry: ParameterRegistry
    num_steps_done: int

    def stop(self) -> None:
        """Asks all ranks to stop after the step in progress."""


class Notifier:
    """Calls listeners, which are determined when the run is assembled: without listeners a step makes no hook call."""

    def __init__(self, plan: Plan) -> None:
        self._listeners: dict[str, list[Plugin]] = {
            hook: [plugin for plugin in plan.plugins.values() if plugin.implements(hook)] for hook in NOTIFICATIONS
        }

    def is_heard(self, hook: str) -> bool:
        """Returns whether any plugin of the plan implements `hook`."""
        return bool(self._listeners[hook])

    def __call__(self, hook: str, **arguments: Any) -> None:
        """Calls `hook` of every listener in the plan's order. Raises PluginError for whatever one raises."""
        for plugin in self._listeners[hook]:
            plugin.call(hook, **arguments)
