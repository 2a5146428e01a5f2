"""The search finds what looking at everything finds, and looks at less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sley_core.errors import PlanError
from sley_core.search.best_first import Estimate, search
from sley_core.search.choices import Choice
from sley_core.search.layouts import Candidate, Sizes


class Rows:
    """Estimates from a list; the bound of a layout is its seconds less a slack."""

    def __init__(self, rows, slack=0.0):
        self.rows = rows
        self.slack = slack
        self.asked = 0

    @property
    def layouts(self):
        policies = [Choice("core.keep", {"number": number}) for number in range(len(self.rows))]
        return [Candidate(Sizes(1, 1, 1, 1), None, policy, None, (), None, None) for policy in policies]

    def row(self, layout):
        found = self.rows[layout.activations.options["number"]]
        if found is None:
            raise PlanError("layout", "does not divide")
        return found

    def bound(self, layout):
        row = self.row(layout)
        return Estimate(row.seconds - self.slack, row.num_bytes)

    def seconds(self, layout):
        self.asked += 1
        return self.row(layout).seconds


rows = st.lists(st.none() | st.builds(Estimate, st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=30)


@given(rows, st.none() | st.integers(1, 30), st.integers(1, 4), st.sampled_from([0.0, 3.0]))
def test_it_finds_what_looking_at_all_of_them_finds(rows, memory, top, slack):
    known = Rows(rows, slack)
    found = search(known.layouts, known, memory=memory, top=top)

    everything = [row for row in rows if row is not None]
    fitting = [row for row in everything if memory is None or row.num_bytes <= memory]
    assert [seen.estimate.seconds for seen in found.fastest] == sorted(row.seconds for row in fitting)[:top]
    front = {
        (one.seconds, one.num_bytes)
        for one in fitting
        if not any(
            other.seconds <= one.seconds and other.num_bytes <= one.num_bytes and other != one for other in fitting
        )
    }
    assert {(seen.estimate.seconds, seen.estimate.num_bytes) for seen in found.front} == front
    assert found.too_large == len(everything) - len(fitting)
    if everything:
        assert found.smallest.estimate.num_bytes == min(row.num_bytes for row in everything)


def test_it_does_not_ask_for_what_cannot_be_better():
    known = Rows([Estimate(1.0, 5), *[Estimate(12.0, 10)] * 50])
    found = search(known.layouts, known, top=1)
    assert (known.asked, found.num_seen, found.num_layouts) == (1, 1, 51)


def test_a_layout_that_cannot_be_assembled_is_counted_by_its_code():
    known = Rows([None, Estimate(1.0, 1), None])
    found = search(known.layouts, known)
    assert found.refused == {"layout": 2}
    assert len(found.fastest) == 1


def test_where_nothing_fits_the_smallest_is_told():
    known = Rows([Estimate(1.0, 91), Estimate(2.0, 80)])
    found = search(known.layouts, known, memory=40)
    assert found.fastest == []
    assert found.smallest.estimate.num_bytes == 80
    assert known.asked == 0


@pytest.mark.parametrize("top", [1, 2])
def test_equal_layouts_do_not_push_one_another_out(top):
    known = Rows([Estimate(1.0, 1), Estimate(1.0, 1)])
    found = search(known.layouts, known, top=top)
    assert len(found.fastest) == top
    assert found.fastest[0].layout.activations.options["number"] == 0
