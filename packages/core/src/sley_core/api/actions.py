"""Gives schedules their words: actions, transfers, and where a chunk of layers is placed; imports no torch."""

from sley_core.actions.action import GRADIENT_KINDS, Action, Kind, Transfer, Way, way_of
from sley_core.actions.machine import Parcel, given, taken
from sley_core.actions.placement import Placement, loop, v
from sley_core.actions.schedule import Schedule
from sley_core.topology import DEFAULT_LANE

__all__ = [
    "DEFAULT_LANE",
    "GRADIENT_KINDS",
    "Action",
    "Kind",
    "Parcel",
    "Placement",
    "Schedule",
    "Transfer",
    "Way",
    "given",
    "loop",
    "taken",
    "v",
    "way_of",
]
