"""The search gives what looking at everything finds, and looks at less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sley_core.errors import PlanError
from sley_estimate.search.best_first import LESS, SLOWEST, Estimate, InOrder, smallest
from sley_estimate.search.choices import Choice
from sley_estimate.search.layouts import Candidate, Shape, Sizes

WITHIN = 3
"""Layouts of each shape."""


AWAY = Choice("away", {})


class Rows:
    """Layouts and their estimates from a list, a few to a shape; bounds are the seconds less a slack, and half of it once one
    was looked at. away: seconds more and bytes less of the same layouts when their states leave the device.
    """

    def __init__(self, rows, slack=0.0, away=None):
        self.rows = rows
        self.slack = slack
        self.away = away
        self.asked = 0
        self.looked = False

    def offloading(self, shape):
        if self.away is not None:
            yield replace(shape, offload=AWAY)

    @property
    def everything(self):
        moved = [] if self.away is None else [self.moved(row) for row in self.rows if row is not None]
        return [row for row in self.rows if row is not None] + moved

    def moved(self, row):
        more_s, less_bytes = self.away
        return Estimate(row.seconds + more_s, max(1, row.num_bytes - less_bytes))

    def shapes(self):
        for number in range(0, len(self.rows), WITHIN):
            yield Shape(Sizes(1, 1, 1, 1), Choice("core.keep", {"number": number}), None, None)

    def within(self, shape):
        first = shape.activations.options["number"]
        for number in range(first, min(first + WITHIN, len(self.rows))):
            yield Candidate(shape, Choice("none", {"number": number}), None)

    def num_within(self, shape):
        return len(list(self.within(shape)))

    def row(self, layout):
        found = self.rows[layout.schedule.options["number"]]
        if found is None:
            raise PlanError("layout", "does not divide")
        return found if layout.shape.offload is None else self.moved(found)

    def least(self, shape):
        first = shape.activations.options["number"]
        some = [row for row in self.rows[first : first + WITHIN] if row is not None]
        some = some if shape.offload is None else [self.moved(row) for row in some]
        if not some:
            raise PlanError("layout", "none divides")
        return Estimate(min(row.seconds for row in some) - 2 * self.slack, min(row.num_bytes for row in some))

    def bound(self, layout):
        row = self.row(layout)
        return Estimate(row.seconds - self.slack, row.num_bytes - round(self.slack))

    def closer_s(self, layout, look=False):
        self.looked = self.looked or look
        return self.row(layout).seconds - self.slack / 2 if self.looked else 0.0

    def num_bytes(self, layout):
        return self.row(layout).num_bytes

    def seconds(self, layout):
        self.asked += 1
        return self.row(layout).seconds


rows = st.lists(st.none() | st.builds(Estimate, st.integers(5, 30), st.integers(1, 30)), min_size=1, max_size=30)


away = st.none() | st.tuples(st.integers(0, 5), st.integers(0, 10))


@given(rows, st.none() | st.integers(1, 30), st.integers(1, 4), st.sampled_from([0.0, 2.0]), away)
def test_it_gives_what_looking_at_all_of_them_finds(rows, memory, top, slack, away):
    known = Rows(rows, slack, away)
    order = InOrder(known, known, memory)
    given = [found for _ in range(top) if (found := order.next())]

    everything = known.everything

    def fits(row):
        return memory is None or row.num_bytes <= memory

    rows = [row for row in rows if row is not None]
    moved = [] if away is None else [known.moved(row) for row in rows if not fits(row)]  # states stay where they can
    fitting = sorted(row.seconds for row in (*rows, *moved) if fits(row))
    assert [seen.estimate.seconds for seen in given] == fitting[:top]
    assert order.tally.num_layouts == len(known.rows) * (1 if away is None else 2)
    front = [seen.estimate for seen in order.front(given)]
    before = [seen.estimate for seen in given]
    for one in front:
        assert one.num_bytes < LESS * min(other.num_bytes for other in before)
        assert before[0].seconds <= one.seconds <= SLOWEST * before[0].seconds
        better = [row for row in everything if row.seconds < one.seconds and row.num_bytes <= one.num_bytes]
        assert not better, "the fastest of those that need so little"
        before.append(one)
    if before:
        least = min(one.num_bytes for one in before)
        slow = SLOWEST * before[0].seconds
        assert not [row for row in everything if row.num_bytes < int(LESS * least) and row.seconds <= slow]
    if everything:
        assert smallest(known, known).estimate.num_bytes == min(row.num_bytes for row in everything)


def test_it_does_not_ask_for_what_cannot_be_better():
    known = Rows([Estimate(1.0, 5), *[Estimate(12.0, 10)] * 50])
    order = InOrder(known, known)
    assert order.next().estimate.seconds == 1.0
    assert (known.asked, order.tally.simulated, order.tally.num_layouts) == (1, 1, 51)


def test_what_others_show_to_take_longer_is_not_simulated():
    known = Rows([Estimate(10.0, 5), Estimate(12.0, 5), Estimate(12.5, 5)], slack=3.0)
    order = InOrder(known, known)
    assert order.next().estimate.seconds == 10.0
    assert known.asked == 1, "their bounds are below 10, and half as much slack is not"
    assert [order.next().estimate.seconds for _ in range(2)] == [12.0, 12.5]


def test_a_layout_that_cannot_be_assembled_is_counted_by_its_reason():
    known = Rows([None, Estimate(1.0, 1), None])
    order = InOrder(known, known)
    assert order.next() is not None
    assert order.tally.refused == {"layout: does not divide": 2}


@pytest.mark.parametrize("refuses", ["bound", "num_bytes", "seconds"])
def test_where_a_layout_is_refused_the_same_with_less_on_the_device_is_asked_for(refuses):
    """It was neither given nor counted."""
    known = Rows([None, Estimate(7, 10)], away=(2, 5))
    asked = getattr(known, refuses)

    def only_away(layout):
        if layout.shape.offload is None:
            raise PlanError("layout", "not so")
        return asked(layout)

    setattr(known, refuses, only_away)
    order = InOrder(known, known)
    assert order.next().estimate == Estimate(9, 5)
    assert order.next() is None
    assert order.tally.num_layouts == 4
    assert sum(order.tally.refused.values()) == 3, "of the first both"


def test_what_does_not_fit_is_not_simulated():
    known = Rows([Estimate(1.0, 91), Estimate(2.0, 80)])
    order = InOrder(known, known, 40)
    assert order.next() is None
    assert order.tally.too_large == 2
    assert known.asked == 0


@pytest.mark.parametrize("top", [1, 2])
def test_equal_layouts_do_not_push_one_another_out(top):
    known = Rows([Estimate(1.0, 1), Estimate(1.0, 1)])
    order = InOrder(known, known)
    found = [order.next() for _ in range(top)]
    assert [seen.layout.schedule.options["number"] for seen in found] == list(range(top))
