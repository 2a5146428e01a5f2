"""Sums the gradients of weights that several stages hold, so that they stay one weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.protocols import GradientHandler
from sley_wave.config import TiesConfig

if TYPE_CHECKING:
    from sley_core.api.parts import Parts, StepState


class Ties(GradientHandler):
    def __init__(self, config: TiesConfig) -> None:
        pass

    def attach(self, parts: Parts) -> None:
        self._parts = parts
        self._ties = sorted(param.name for param in parts.registry if param.tie_group is not None)

    def finish_step(self, step: StepState) -> None:
        for name in self._ties:
            param = self._parts.registry[name]
            if param in self._parts.store and param.tie_group is not None:
                # The tie's own group; its ranks walk the ties by name.
                group = self._parts.groups[param.tie_group]
                group.all_reduce(self._parts.store.gradient(param), label=f"the tied gradient of {name}").wait()
