"""Lists to lower: the plainest pipeline, and any that can run."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from sley_core.actions.action import Action, Kind, Placement
from sley_testing import runs

Lists = list[list[Action]]


@pytest.fixture(scope="session")
def breadth_first() -> Callable[[Placement, int], Lists]:
    """All forwards, chunk by chunk, then all backwards."""

    def made(placement: Placement, micros: int) -> Lists:
        chunks = range(placement.chunks)
        forwards = [Action(Kind.FORWARD, chunk, micro) for chunk in chunks for micro in range(micros)]
        backwards = [Action(Kind.BACKWARD, chunk, micro) for chunk in reversed(chunks) for micro in range(micros)]
        return [forwards + backwards for _ in range(placement.stages)]

    return made


@pytest.fixture(scope="session")
def any_lists() -> Callable[[Placement, int, Random], Lists]:
    return runs.any_lists
