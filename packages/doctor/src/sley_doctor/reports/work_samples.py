"""The samples of one window: seconds of each step by place, layer and queue, and their quartiles when the window ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_doctor.reports.work_record import NOTHING, Queue, SeenMessage, Spread, roundness

if TYPE_CHECKING:
    from sley_core.comm.guard import Turn

MOST_STEPS = 64
"""Of a window are kept; quartiles of more steps are hardly others, and take longer to find."""

MOST_MESSAGES = 64
"""Of a window are kept by queue."""


class _Waits:
    """Holds what a rank has waited for in one queue."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.now_s = 0.0
        self.steps_s: list[float] = []
        self.number = turn.number - 1
        self.exchanges = self.num_bytes = 0


class WorkSamples:
    """Collects the samples of a window. spent: seconds of the step so far, by the number of a place; a separate list for each
    step.

    num_steps: in the window. sent, taken: messages by queue.
    """

    def __init__(self) -> None:
        self.spent: list[float] = []
        self.num_steps = 0
        self.sent: dict[str, list[SeenMessage]] = {}
        self.taken: dict[str, list[SeenMessage]] = {}
        self._places: dict[str, int] = {}
        self._layers: dict[tuple[int, str], int] = {}
        self._steps: list[list[float]] = []
        self._seconds: list[float] = []
        self._waits: dict[str, _Waits] = {}

    def place(self, name: str) -> int:
        """Returns the number of a place."""
        if name not in self._places:
            self._places[name] = self._one_more()
        return self._places[name]

    def layer(self, base: int, name: str) -> int:
        """Returns the number of the place for the work of layer `name` within place `base`."""
        try:
            return self._layers[base, name]
        except KeyError:
            self._layers[base, name] = self._one_more()
            return self._layers[base, name]

    def waited(self, turn: Turn, seconds: float) -> None:
        """Counts a wait."""
        found = self._waits.get(turn.queue)
        if found is None:
            found = self._waits[turn.queue] = _Waits(turn)
        found.now_s += seconds
        if turn.number > found.number:  # an exchange may be waited for at its start and at its end
            found.number = turn.number
            found.exchanges += 1
            found.num_bytes += turn.num_bytes

    def handed_over(self, step: int, queue: str, number: int, time_s: float) -> None:
        """Records the last message that an entry has sent."""
        keep_roundest(self.sent, queue, SeenMessage(step, number, round(time_s, 6)))

    def took(self, step: int, turn: Turn, time_s: float, waited_s: float) -> None:
        """Records a message that has arrived."""
        keep_roundest(self.taken, turn.queue, SeenMessage(step, turn.number, round(time_s, 6), round(waited_s, 6)))

    def end_step(self, seconds: float) -> None:
        """Keeps the step as a sample, which took `seconds`."""
        self.num_steps += 1
        if self.num_steps <= MOST_STEPS:
            self._steps.append(self.spent)
            self._seconds.append(seconds)
            for found in self._waits.values():
                found.steps_s.append(found.now_s)
        self.forget_step()

    def forget_step(self) -> None:
        """Begins a new step, discarding the present one."""
        self.spent = [0.0] * len(self.spent)
        for found in self._waits.values():
            found.now_s = 0.0

    def clear(self) -> None:
        """Begins a new window; places keep their numbers."""
        self.num_steps = 0
        self.sent, self.taken = {}, {}
        self._steps, self._seconds = [], []
        for found in self._waits.values():
            found.steps_s, found.exchanges, found.num_bytes = [], 0, 0

    def seconds(self) -> Spread:
        """Returns how long steps took."""
        return spread(self._seconds)

    def work(self) -> dict[str, Spread]:
        """Returns the work by place, its layers' included."""
        inside: dict[int, list[int]] = {}
        for (base, _), number in self._layers.items():
            inside.setdefault(base, []).append(number)
        return {
            name: spread([sum(_at(step, number) for number in (place, *inside.get(place, ()))) for step in self._steps])
            for name, place in self._places.items()
        }

    def layers(self) -> dict[str, dict[str, Spread]]:
        """Returns the work by place and layer, of the steps that have it."""
        names = {number: name for name, number in self._places.items()}
        found: dict[str, dict[str, Spread]] = {}
        for (base, layer), number in self._layers.items():
            if some := [step[number] for step in self._steps if _at(step, number)]:
                found.setdefault(names[base], {})[layer] = spread(some)
        return found

    def waits(self) -> dict[str, Spread]:
        """Returns the waits of a step by queue; 0 in steps before a queue first occurred."""
        missing = len(self._steps)
        return {
            queue: spread([0.0] * (missing - len(found.steps_s)) + found.steps_s)
            for queue, found in self._waits.items()
        }

    def queues(self) -> dict[str, Queue]:
        """Returns the queues, with the exchanges and bytes in which this rank waited."""
        steps = max(1, self.num_steps)
        return {
            queue: Queue(
                str(found.turn.members),
                found.turn.members.ranks,
                found.turn.peer,
                found.exchanges / steps,
                found.num_bytes / steps,
            )
            for queue, found in self._waits.items()
        }

    def _one_more(self) -> int:
        self.spent.append(0.0)
        return len(self.spent) - 1


def spread(values: Iterable[float]) -> Spread:
    """Returns the quartiles of `values`; each is one of them."""
    some = sorted(values)
    last = len(some) - 1
    if last < 0:
        return NOTHING
    return Spread(*(round(some[round(last * share)], 7) for share in (0.25, 0.5, 0.75)))


def _at(step: list[float], number: int) -> float:
    """Returns the seconds at place `number`; 0 in a step from before that place was known."""
    return step[number] if number < len(step) else 0.0


def keep_roundest(messages: dict[str, list[SeenMessage]], queue: str, one: SeenMessage) -> None:
    """Adds `one` to the messages of `queue`. If there are too many, keeps those of the roundest steps in binary, the same at
    both ends of a queue, wherever their windows begin.
    """
    kept = messages.setdefault(queue, [])
    if len(kept) >= MOST_MESSAGES:
        if roundness(one.step) < min(roundness(other.step) for other in kept):
            return
        kept.append(one)
        while len(kept) > MOST_MESSAGES and len({roundness(other.step) for other in kept}) > 1:
            least = min(roundness(other.step) for other in kept)
            kept[:] = [other for other in kept if roundness(other.step) > least]
        del kept[MOST_MESSAGES:]
    else:
        kept.append(one)
