"""The lowered lists of actions of this stage, for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from sley_core.actions.action import Action, Kind, Lowered, forward_only, sequential
from sley_core.actions.lower import lower
from sley_core.actions.placement import Placement, loop

Generate = Callable[[int], Sequence[Sequence[Action]]]
"""From a number of micro-batches to every stage's compute actions."""


class Lists:
    """Generates, lowers and caches the lists. Every stage lowers the lists of all stages, so that each detects a wrong schedule
    itself.
    """

    def __init__(self, generate: Generate, placement: Placement, stage: int) -> None:
        self.placement = placement
        self.stage = stage
        self._generate = generate
        self.of_all_stages = lru_cache(maxsize=64)(self._of_all_stages)
        self.evaluation = lru_cache(maxsize=64)(self._evaluation)

    @classmethod
    def alone(cls) -> Lists:
        """Returns the lists of a run without a pipeline: forward and backward of one micro-batch after the other."""
        return cls(lambda micros: [sequential(micros)], loop(1), 0)

    def at(self, stage: int) -> Lists:
        """Returns the lists of another stage, sharing this one's cache."""
        found = Lists(self._generate, self.placement, stage)
        found.of_all_stages = self.of_all_stages
        return found

    def computing(self, micros: int) -> Sequence[Sequence[Action]]:
        """Returns the compute actions of all stages, which are not lowered: much cheaper, and not kept."""
        return self._generate(micros)

    def splits_backward(self, micros: int) -> bool:
        """Returns whether this stage's training list has split backwards (D and W)."""
        return any(isinstance(s, Action) and s.kind is Kind.WEIGHT_GRADIENT for s in self.training(micros))

    def training(self, micros: int) -> Lowered:
        """Returns this stage's lowered list of a training step."""
        return self.of_all_stages(micros)[self.stage]

    def _of_all_stages(self, micros: int) -> list[Lowered]:
        return lower(self._generate(micros), self.placement, micros)

    def _evaluation(self, micros: int) -> Lowered:
        lists = [forward_only(actions) for actions in self._generate(micros)]
        return lower(lists, self.placement, micros, training=False)[self.stage]
