"""What moving memory has cost: in the counts of a run, and as numbers of each step's row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sley_core.memory.state import COPIED

if TYPE_CHECKING:
    from sley_core.engine.step_numbers import StepNumbers
    from sley_core.memory.protocols import OffloadManager
    from sley_core.memory.state import Part

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
    """Adds numbers to each row of a run that has `[[offload]]`, since the row before: three over all parts, and three for each
    of `parts` that has a copy on the host.

    offload/gb, offload/weights_gb, ...: copied either way, the sum over ranks. offload/s, offload/weights_s, ...: the mean over
    ranks, of copies whose end the host has seen; offload/gb_per_s, offload/weights_gb_per_s, ...: their mean rate. 0 if there
    was none.

    managers: those of the run, once they are attached.
    """

    def __init__(self, numbers: StepNumbers, num_ranks: int, parts: Iterable[str]) -> None:
        self.managers: Sequence[OffloadManager] = ()
        self._num_ranks = num_ranks
        self._before: dict[str, tuple[float, float, float]] = {}
        # a plan's parts, in the order of `COPIED`: the same names on all ranks
        for part in (None, *(part for part in COPIED if part in set(parts))):
            prefix = "offload/" if part is None else f"offload/{part}_"
            numbers.add(f"{prefix}gb", partial(self._gb, part))
            numbers.add(f"{prefix}s", partial(self._seconds, part))
            numbers.add(f"{prefix}gb_per_s", partial(self._rate, part))

    def _gb(self, part: Part | None) -> float:
        return self._since("gb", part)[0] / GB

    def _seconds(self, part: Part | None) -> float:
        return self._since("seconds", part)[2] / self._num_ranks

    def _rate(self, part: Part | None) -> float:
        _, num_timed, seconds = self._since("rate", part)
        return num_timed / GB / seconds / self._num_ranks if seconds else 0.0

    def _since(self, name: str, part: Part | None) -> tuple[float, float, float]:
        """Returns bytes of copies of `part`, or of all parts, bytes of those with a time, and that time, since the last call
        with this `name` and `part`.
        """
        found = [
            manager.moved(one) for manager in self.managers for one in manager.parts if part is None or one == part
        ]
        now = (
            float(sum(moved.copied_out + moved.copied_in for moved in found)),
            float(sum(moved.timed_out + moved.timed_in for moved in found)),
            sum(moved.seconds_out + moved.seconds_in for moved in found),
        )
        key = f"{name} {part}"
        before = self._before.get(key, (0.0, 0.0, 0.0))
        self._before[key] = now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]
