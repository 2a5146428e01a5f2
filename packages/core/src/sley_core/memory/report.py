"""What moving memory has cost: in the counts of a run, and as numbers of each step's row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sley_core.engine.step_numbers import StepNumbers
    from sley_core.memory.protocols import OffloadManager

GB = 10**9


class CountsOf:
    """Reports what a manager has moved, as `protocols.Counts`."""

    def __init__(self, manager: OffloadManager) -> None:
        self._manager = manager

    def counts(self) -> Mapping[str, float]:
        """Returns, by `<part>_<number>`, what moving each part has cost, without zeros; GB/s where seconds are known."""
        found: dict[str, float] = {}
        for part in self._manager.parts:
            found |= {f"{part}_{name}": value for name, value in self._manager.moved(part).numbers().items() if value}
        return found


class MoveNumbers:
    """Adds three numbers to each row of a run that has `[[offload]]`, over all parts and since the row before.

    offload/gb: copied either way, the sum over ranks. offload/s, offload/gb_per_s: the mean over ranks, of copies whose end
    the host has seen; 0 if there was none.

    managers: those of the run, once they are attached.
    """

    def __init__(self, numbers: StepNumbers, num_ranks: int) -> None:
        self.managers: Sequence[OffloadManager] = ()
        self._num_ranks = num_ranks
        self._before: dict[str, tuple[float, float, float]] = {}
        numbers.add("offload/gb", self._gb)
        numbers.add("offload/s", self._seconds)
        numbers.add("offload/gb_per_s", self._rate)

    def _gb(self) -> float:
        """Returns the gigabytes copied either way since the row before."""
        return self._since("gb")[0] / GB

    def _seconds(self) -> float:
        """Returns the mean over ranks of the seconds of copies whose end the host has seen since the row before."""
        return self._since("seconds")[2] / self._num_ranks

    def _rate(self) -> float:
        """Returns the GB/s of copies whose end the host has seen since the row before, divided by the number of ranks; 0
        without any.
        """
        _, num_timed, seconds = self._since("rate")
        return num_timed / GB / seconds / self._num_ranks if seconds else 0.0

    def _since(self, name: str) -> tuple[float, float, float]:
        """Returns bytes of all copies, bytes of those with a time, and that time, since the last call with `name`."""
        found = [manager.moved(part) for manager in self.managers for part in manager.parts]
        now = (
            float(sum(moved.copied_out + moved.copied_in for moved in found)),
            float(sum(moved.timed_out + moved.timed_in for moved in found)),
            sum(moved.seconds_out + moved.seconds_in for moved in found),
        )
        before = self._before.get(name, (0.0, 0.0, 0.0))
        self._before[name] = now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]
