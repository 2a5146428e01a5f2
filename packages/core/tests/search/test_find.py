"""What a search of layouts does beside putting them in order."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from sley_core.search.best_first import Estimate
from sley_core.search.choices import Choice
from sley_core.search.find import find
from sley_core.search.layouts import Candidate, Shape, Sizes

SHAPE = Shape(Sizes(1, 1, 1, 1), Choice("core.keep", {}), None, None)
SPACE = SimpleNamespace(
    shapes=lambda: [SHAPE],
    within=lambda shape: [Candidate(shape, Choice("none", {"number": number}), None) for number in range(3)],
    num_within=lambda shape: 3,
    offloading=lambda shape: (),
)


@pytest.mark.parametrize("fails", [False, True])
def test_cycles_are_collected_before_and_after_a_glance_and_not_within(fails):
    """Also where an estimate fails, and while layouts are told, whose own steps make cycles."""
    within, told = [], []

    def seconds(layout):
        within.append(gc.isenabled())
        if fails:
            raise ZeroDivisionError
        return 1.0

    estimator = SimpleNamespace(
        least=lambda shape: Estimate(1.0, 8),
        bound=lambda layout: Estimate(1.0, 8),
        num_bytes=lambda layout: 8,
        seconds=seconds,
    )
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        find(SPACE, estimator, top=1, verify=not fails, tell=lambda layout: told.append(gc.isenabled()) or 1 / 0)
    assert gc.isenabled()
    assert within
    assert not any(within)
    assert told == ([] if fails else [True])
