"""Defines the records of this package. Imports no torch, since plan checks import it."""

from collections.abc import Iterable

from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord
from sley_narrow.config import NarrowConfig


@hookimpl
def sley_gradient_handlers() -> Iterable[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="reducer", config=NarrowConfig, build="sley_narrow.handler:Narrow", role="reducer", tolerance=2**-6
        )
    ]
