"""Times this rank's actions: each from the moment that its inputs have arrived to the end of what it computes.

On CUDA a moment is an event on the stream, read when the step is over; the host does not wait in between.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sley_core.actions.timeline import TimedAction

if TYPE_CHECKING:
    from sley_core.actions.action import Action
    from sley_core.comm.device import Device, Moment


class ActionClock:
    """Records when the actions of one step run: call `begin`, then `start` and `stop(action)` around each."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._noted: list[tuple[Action, Moment, Moment]] = []
        self.zero_s = time.perf_counter()
        """When it began: `time.perf_counter()` of the host."""
        self._zero = self._started = device.moment()

    def begin(self) -> None:
        """Sets time zero; the device must be idle."""
        self.zero_s = time.perf_counter()
        self._zero = self._device.moment()

    def start(self) -> None:
        """Records that the next action's inputs have arrived."""
        self._started = self._device.moment()

    def stop(self, action: Action) -> None:
        """Records that `action` is over; on CUDA it does not wait."""
        self._noted.append((action, self._started, self._device.moment()))

    def spans(self, stage: int) -> list[TimedAction]:
        """Returns the recorded actions in order, in seconds since `begin`; waits until the device has finished them."""
        seconds = self._device.seconds_between
        return [
            TimedAction(stage, action, seconds(self._zero, start), seconds(self._zero, stop))
            for action, start, stop in self._noted
        ]
