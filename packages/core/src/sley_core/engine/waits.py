"""What must have come before the weights of a layer are used: another step's update, weights that were offloaded."""

from __future__ import annotations

from collections.abc import Callable

Wait = Callable[[], None]
IsDue = Callable[[], bool]


class Waits:
    """Waits by the name of a layer, in the order in which they were registered."""

    def __init__(self) -> None:
        self._waits: dict[str, list[tuple[Wait, IsDue | None]]] = {}

    def before_layer(self, name: str, wait: Wait, is_due: IsDue | None = None) -> None:
        """From now on `wait` is called before every use of the weights of layer `name`; with `is_due`, where that is true.

        is_due: whether the weights are not all there; it costs little, changes nothing, and says the same on all ranks that
        hold shards of the layer: between a step's begin and end these read each other's only while nothing is due.
        """
        self._waits.setdefault(name, []).append((wait, is_due))

    def wait_for(self, name: str) -> bool:
        """Calls what is due of layer `name`; whether there was anything."""
        found = False
        for wait, is_due in self._waits.get(name, ()):
            if is_due is None or is_due():
                wait()
                found = True
        return found

    def is_due(self, name: str) -> bool:
        """Whether the next use of the weights of layer `name` would call anything."""
        return any(is_due is None or is_due() for _, is_due in self._waits.get(name, ()))
