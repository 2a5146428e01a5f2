"""The types of schedules: actions, transfers and placements of model chunks. Imports no torch."""

from sley_core.actions.action import Action, Delivery, Kind, Placement, Schedule, Transfer, direction_of, loop, v_placement

__all__ = ["Action", "Delivery", "Kind", "Placement", "Schedule", "Transfer", "direction_of", "loop", "v_placement"]
