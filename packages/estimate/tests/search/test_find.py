"""What a search of layouts does beside putting them in order."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sley_estimate.search.best_first import Estimate
from sley_estimate.search.choices import Choice
from sley_estimate.search.find import find
from sley_estimate.search.layouts import Candidate, Shape, Sizes

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
        closer_s=lambda layout, look=False: 0.0,
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


def test_a_layout_that_does_not_fit_by_its_own_steps_is_tried_with_its_states_away(monkeypatch):
    """At a glance all fit: bytes are a lower figure there."""
    away = Choice("away", {})
    space = SimpleNamespace(**vars(SPACE) | {"offloading": lambda shape: [replace(shape, offload=away)]})
    estimator = SimpleNamespace(
        least=lambda shape: Estimate(1.0, 8),
        bound=lambda layout: Estimate(1.0 if layout.shape.offload is None else 2.0, 8),
        closer_s=lambda layout, look=False: 0.0,
        num_bytes=lambda layout: 8,
        seconds=lambda layout: 1.0 if layout.shape.offload is None else 2.0,
    )

    def exact(quick, layout, memory):
        return None if layout.shape.offload is None else SimpleNamespace(estimate=Estimate(2.5, 9))

    monkeypatch.setattr("sley_estimate.search.find.exact", exact)
    found = find(space, estimator, memory=10, top=2)
    assert [one.seen.layout.shape.offload for one in found.fastest] == [away, away]
    assert found.dropped == 3
