"""Says what a rank did in one step, in order: the notes from which a program for the simulator is made. No torch in here.

opening      what comes before the first action
F0.0         Worked, Began(gather of the next layer), Worked, Awaited(gather), Worked ...
B0.0         ... Worked, Began(reduction), Worked
closing      what handlers finish, norm, update, and the gathers that the next step waits for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sley_core.actions.action import Action
from sley_core.protocols import Collective
from sley_estimate.layers.operators import Operator
from sley_estimate.seconds.host_copies import CopyKind

HOST = "host"
"""The axis of copies between a device and its host: no group, the rank alone."""


@dataclass(frozen=True)
class Worked:
    """The rank ran `operators`, one after the other."""

    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class Began:
    """The rank began an exchange of `num_bytes` (of the whole tensors) over its group of `axis`, on a lane of that; or a copy
    between its device and the host, on the axis `HOST`, whose lanes are streams.

    number: counts the exchanges and copies of a run from 0. after: the number of a copy that has to be done before.
    """

    number: int
    kind: Collective | CopyKind
    axis: str
    lane: str
    num_bytes: int
    after: int | None = None

    @property
    def queue(self) -> tuple[str, str]:
        """Returns group and lane: exchanges of one queue come one after the other."""
        return self.axis, self.lane


@dataclass(frozen=True)
class Awaited:
    """The rank waited for the exchange `number`, the first time."""

    number: int


Word = Worked | Began | Awaited
Words = tuple[Word, ...]


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank. actions: the compute actions of its list, in order, each with what was done in it.

    carried: exchanges that the step before had begun and this one waited for, as that step noted them.
    """

    opening: Words
    actions: Sequence[tuple[Action, Words]]
    closing: Words
    carried: Sequence[Began] = ()

    @property
    def words(self) -> list[Word]:
        """Returns all words in order: of the opening, of every action, of the closing."""
        return [*self.opening, *(word for _, words in self.actions for word in words), *self.closing]
