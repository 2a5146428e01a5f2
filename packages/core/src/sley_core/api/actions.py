"""Gives schedules their words: actions, transfers, and where a chunk of layers is placed; imports no torch."""

from sley_core.actions.action import (
    GRADIENT_KINDS,
    Action,
    Direction,
    Kind,
    Placement,
    Schedule,
    Transfer,
    direction_of,
    loop,
    v,
)
from sley_core.actions.simulate import Delivery, given, taken
from sley_core.topology import DEFAULT_LANE

__all__ = [
    "DEFAULT_LANE",
    "GRADIENT_KINDS",
    "Action",
    "Delivery",
    "Direction",
    "Kind",
    "Placement",
    "Schedule",
    "Transfer",
    "direction_of",
    "given",
    "loop",
    "taken",
    "v",
]
