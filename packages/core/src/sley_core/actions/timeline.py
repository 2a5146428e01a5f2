"""When each stage ran which action: one form for simulated and measured steps, so that one drawing serves both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sley_core.actions.action import Action


class TimedAction(NamedTuple):
    """`action` of `stage` ran from `start_s` to `end_s`, in seconds after the step began."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step on `stages` stages, by stage and then by start. The spans of a stage do not overlap.

    end_s: when the step is over, if sums and an update follow the last action. computing_s: seconds for which each stage
    computes, if not all of its spans and nothing else.
    """

    stages: int
    spans: tuple[TimedAction, ...]
    end_s: float = 0.0
    computing_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, stages: int, spans: Iterable[TimedAction]) -> Timeline:
        """Returns a timeline of spans given in any order."""
        return cls(stages, tuple(sorted(spans, key=lambda span: (span.stage, span.start_s, span.end_s))))

    def of_stage(self, stage: int) -> tuple[TimedAction, ...]:
        """Returns the spans of one stage, by start."""
        return tuple(span for span in self.spans if span.stage == stage)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the step to its end, or to that of its last action, on whichever stage."""
        return max((self.end_s, *(span.end_s for span in self.spans)))

    def idle(self, stage: int) -> float:
        """Returns the bubble of a stage: the share of the step in which it computes nothing, from 0 to 1."""
        makespan = self.makespan_s
        spent = (span.end_s - span.start_s for span in self.of_stage(stage))
        busy = self.computing_s[stage] if self.computing_s else sum(spent)
        return 1.0 - busy / makespan if makespan > 0 else 0.0
