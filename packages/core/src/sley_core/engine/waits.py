"""Callbacks to run before the weights of a layer are used: for another step's update, or weights that were offloaded."""

from __future__ import annotations

from collections.abc import Callable

Wait = Callable[[], None]
IsDue = Callable[[], bool]


class Waits:
    """Holds callbacks by the name of a layer, in the order in which they were registered."""

    def __init__(self) -> None:
        self._waits: dict[str, list[tuple[Wait, IsDue | None]]] = {}

    def before_layer(self, name: str, wait: Wait, is_due: IsDue | None = None) -> None:
        """Registers `wait`, to be called before every use of the weights of layer `name`; with `is_due`, only if that returns
        True.

        is_due: returns whether some of the weights are missing; must be cheap, change nothing, and return the same on all ranks
        that hold shards of the layer: between a step's begin and end these read each other's shards only while nothing is due.
        """
        self._waits.setdefault(name, []).append((wait, is_due))

    def wait_for(self, name: str) -> bool:
        """Calls the due callbacks of layer `name`; returns whether there were any."""
        found = False
        for wait, is_due in self._waits.get(name, ()):
            if is_due is None or is_due():
                wait()
                found = True
        return found

    def is_due(self, name: str) -> bool:
        """Returns whether the next use of the weights of layer `name` would call anything."""
        return any(is_due is None or is_due() for _, is_due in self._waits.get(name, ()))
