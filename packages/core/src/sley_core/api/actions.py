"""The types of schedules: actions, transfers and placements of model chunks. Imports no torch."""

from sley_core.actions.action import Action as Action
from sley_core.actions.action import Delivery as Delivery
from sley_core.actions.action import Kind as Kind
from sley_core.actions.action import Placement as Placement
from sley_core.actions.action import Schedule as Schedule
from sley_core.actions.action import Transfer as Transfer
from sley_core.actions.action import direction_of as direction_of
from sley_core.actions.action import loop as loop
from sley_core.actions.action import v_placement as v_placement
