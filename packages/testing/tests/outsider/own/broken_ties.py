"""Handlers of ties that are wrong in one way each; plugin `torn`."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord
from sley_wave.config import TiesConfig
from sley_wave.ties import Ties


class Twice(Ties):
    """Sums what it has summed."""

    def finish_step(self, step):
        super().finish_step(step)
        super().finish_step(step)


class Unsummed(Ties):
    """Leaves each stage its own."""

    def finish_step(self, step):
        pass


@hookimpl
def sley_gradient_handlers():
    return [
        GradientHandlerRecord(name=name, config=TiesConfig, build=f"broken_ties:{kind}", role="tie", after=("reducer",))
        for name, kind in (("twice", "Twice"), ("unsummed", "Unsummed"))
    ]
