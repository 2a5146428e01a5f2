"""The search finds what looking at everything finds, and looks at less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sley_core.errors import PlanError
from sley_core.search.best_first import Bound, Estimate, search
from sley_core.search.choices import Choice
from sley_core.search.layouts import Layout, Sizes


def layout_of(sizes, number):
    return Layout(sizes, None, Choice("core.keep", {"number": number}), None, (), None, None)


class Table:
    """Estimates from a table; the bound of sizes is the best of theirs, less a slack."""

    def __init__(self, rows, slack=0.0):
        self.rows = rows
        self.slack = slack
        self.asked = 0

    def bound(self, sizes):
        known = [row for row in self.rows[sizes] if row is not None]
        if not known:
            return Bound(0.0, 0)
        return Bound(min(row.seconds for row in known) - self.slack, min(row.num_bytes for row in known))

    def layouts(self, sizes):
        return [layout_of(sizes, number) for number in range(len(self.rows[sizes]))]

    def estimate(self, layout):
        self.asked += 1
        row = self.rows[layout.sizes][layout.activations.options["number"]]
        if row is None:
            raise PlanError("layout", "does not divide")
        return row


rows = st.lists(
    st.lists(st.none() | st.builds(Estimate, st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=4),
    min_size=1,
    max_size=12,
)


@given(rows, st.none() | st.integers(1, 30), st.integers(1, 4), st.sampled_from([0.0, 3.0]))
def test_it_finds_what_looking_at_all_of_them_finds(rows, memory, top, slack):
    table = Table({Sizes(1, 1, 1, number + 1): row for number, row in enumerate(rows)}, slack)
    found = search(table.rows, table.layouts, table, memory=memory, top=top)

    everything = [row for of_sizes in rows for row in of_sizes if row is not None]
    fitting = sorted(row.seconds for row in everything if memory is None or row.num_bytes <= memory)
    assert [seen.estimate.seconds for seen in found.fastest] == fitting[:top]
    front = {
        (one.seconds, one.num_bytes)
        for one in everything
        if not any(
            other.seconds <= one.seconds and other.num_bytes <= one.num_bytes and other != one for other in everything
        )
    }
    assert {(seen.estimate.seconds, seen.estimate.num_bytes) for seen in found.front} == front
    if everything:
        assert found.smallest.estimate.num_bytes == min(row.num_bytes for row in everything)


def test_it_passes_over_sizes_that_cannot_be_better():
    slow = {Sizes(1, 1, 1, micro): [Estimate(10.0 + micro, 10)] * 50 for micro in (2, 4, 8)}
    table = Table({Sizes(1, 1, 1, 1): [Estimate(1.0, 5)], **slow})
    found = search(table.rows, table.layouts, table, top=1)
    assert (table.asked, found.num_seen, found.passed_over) == (1, 1, 3)


def test_a_layout_that_cannot_be_assembled_is_counted_by_its_code():
    table = Table({Sizes(1, 1, 1, 1): [None, Estimate(1.0, 1), None]})
    found = search(table.rows, table.layouts, table)
    assert found.refused == {"layout": 2}
    assert len(found.fastest) == 1


def test_where_nothing_fits_the_smallest_is_told():
    table = Table({Sizes(1, 1, 1, 1): [Estimate(1.0, 91), Estimate(2.0, 80)]})
    found = search(table.rows, table.layouts, table, memory=40)
    assert found.fastest == []
    assert found.smallest.estimate.num_bytes == 80


@pytest.mark.parametrize("top", [1, 2])
def test_equal_layouts_do_not_push_one_another_out(top):
    table = Table({Sizes(1, 1, 1, 1): [Estimate(1.0, 1), Estimate(1.0, 1)]})
    found = search(table.rows, table.layouts, table, top=top)
    assert len(found.fastest) == top
    assert found.fastest[0].layout.activations.options["number"] == 0
