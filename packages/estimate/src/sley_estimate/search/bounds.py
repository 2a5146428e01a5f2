"""Bounds all layouts of a shape at once: a row for each kind of reducer, a column for each way to cut the model.

table of layers ──> what layers of each stage take ───────────────┐
sizes, parts    ──> exchanges, update, states: a row for each kind ┴──> seconds and bytes of each way and kind

A search asks for a hundred thousand bounds. Each is of arrays with an entry per stage, for which calling numpy takes longer
than what it computes: so all are made together, and layouts take theirs from a list.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import MOST_FORWARDS
from sley_estimate.layers.once import once
from sley_estimate.search.best_first import Estimate
from sley_estimate.search.buckets import bucket_bytes
from sley_estimate.search.glance import check_reducer, check_shape, leaves_shards
from sley_estimate.search.parts_together import PartsTogether

if TYPE_CHECKING:
    from sley_estimate.search.choices import Choice
    from sley_estimate.search.layer_columns import LayerColumns
    from sley_estimate.search.layouts import Candidate, Shape
    from sley_estimate.search.quick import Quick
    from sley_estimate.search.stage_cut import Floats, ModelParts


class Rows(NamedTuple):
    """Holds what bounds take from `OfStages`, [kinds of reducers, ways to cut, stages] each."""

    sums: Floats
    gathers: Floats
    attended: Floats
    update_s: Floats
    states_bytes: Floats


class Passes(NamedTuple):
    """Holds what a shape takes wherever its optimizer states are. seconds: from the start of the step until each stage has
    computed and waited for exchanges, but for the update, [kinds of reducers, ways to cut, stages]. kept: bytes of a
    micro-batch that waits for its backward, [ways to cut, stages].
    """

    seconds: Floats
    kept: Floats


class Bounds:
    """Makes the bounds of layouts that `quick` estimates. Reducers of one kind have the same: those that leave ranks the same
    part of the sums, in buckets of the same size.
    """

    def __init__(self, quick: Quick) -> None:
        self._quick = quick
        self._known: dict[Hashable, list[list[Estimate] | SleyError] | SleyError] = {}
        self._rows: dict[Hashable, Rows | SleyError] = {}
        self._passes: tuple[Hashable, Passes] | None = None
        self._between: dict[Hashable, Floats] = {}
        self._together: dict[int, PartsTogether] = {}
        self._kinds: dict[Hashable, Choice | None] = {}  # with one reducer of each
        self._numbers: dict[str, int | SleyError] = {}

    def of(self, layout: Candidate) -> Estimate:
        """Returns the seconds of a step in which the fullest stage never waits once it has begun, and the bytes that it holds
        with one micro-batch under way.

        Raises PlanError for a layout that cannot be assembled, and "not-at-a-glance" for a part that does not say what it does.
        """
        shape, reducer = layout.shape, layout.reducer
        kind = once(self._numbers, str(reducer), lambda: self._number(reducer))
        parts = self._quick.cut(layout).parts
        together = self._together_with(parts, shape.sizes.pp)
        key = shape.key, len(together.number), len(self._kinds)  # those that were made before one was added lack it
        found = once(self._known, key, lambda: self._of_all(shape, together))[together.number[parts]]
        if isinstance(found, SleyError):
            raise found
        return found[kind]

    def _number(self, reducer: Choice | None) -> int:
        """Returns the number of a reducer's kind; adds a new one."""
        check_reducer(reducer)
        kind = leaves_shards(reducer), bucket_bytes(reducer)
        self._kinds.setdefault(kind, reducer)
        return list(self._kinds).index(kind)

    def _together_with(self, parts: ModelParts, pp: int) -> PartsTogether:
        """Returns all ways to cut the model into parts of `pp` stages that a layout had so far, `parts` among them."""
        known = self._together.get(pp)
        if known is None or parts not in known.number:
            known = self._together[pp] = PartsTogether([*(known.number if known else ()), parts])
        return known

    def _of_all(self, shape: Shape, together: PartsTogether) -> list[list[Estimate] | SleyError]:
        """Returns, for each way to cut the model, the bounds of the shape's layouts with each kind of reducer; the error where
        there would be more micro-batches than any plan may have.
        """
        if shape.offload is not None:  # as the only shapes of which `least` need not have been asked
            check_shape(shape)
        passes, rows = self._passes_of(shape, together), self._rows_of(shape, together)
        seconds = (passes.seconds + rows.update_s).max(axis=2) + self._quick.end_s(shape.sizes.pp)
        num_bytes = (rows.states_bytes + passes.kept).max(axis=2).astype(np.int64)
        found: list[list[Estimate] | SleyError] = [
            list(map(Estimate, *both)) for both in zip(seconds.T.tolist(), num_bytes.T.tolist(), strict=True)
        ]
        micros = self._micros(shape)
        if micros * together.most_positions > MOST_FORWARDS:
            for parts, number in together.number.items():
                if micros * parts.placement.num_positions > MOST_FORWARDS:
                    found[number] = PlanError("schedule-too-long", "the step has too many micro-batches")
        return found

    def _passes_of(self, shape: Shape, together: PartsTogether) -> Passes:
        """Returns what the shape takes wherever its optimizer states are; kept until another shape is asked for, since those
        that differ in nothing else come one after another.
        """
        key = shape.key[:-1], len(together.number), len(self._kinds)
        if self._passes is None or self._passes[0] != key:
            self._passes = key, self._made(shape, together)
        return self._passes[1]

    def _made(self, shape: Shape, together: PartsTogether) -> Passes:
        table, rows, micros = self._quick.tables.of(shape), self._rows_of(shape, together), self._micros(shape)
        # there, and back as far as the gradient of a stage's input: what is before a stage's first action, and behind its last
        # of these; gradients of weights may come later
        (before, behind), (there, through, back, kept) = together.by_stage(table.rows, self._one_way(table, together))
        # gathers begin with the step and come before the last layer's first forward, and sums after the first gradients of the
        # last backward; those of one chunk may run beside another chunk
        first = np.maximum(before, (rows.gathers - there) * together.is_one_chunk)
        exposed = np.maximum(rows.sums - back, 0.0) * together.is_one_chunk
        computes = (there + back) * micros
        seconds = first + np.maximum(computes + exposed, (there + through) * micros + behind)
        return Passes(np.maximum(seconds, before + computes + rows.attended), kept)

    def _rows_of(self, shape: Shape, together: PartsTogether) -> Rows:
        """Returns what stages take and hold, of which neither policy nor micro-batches change anything."""

        def rows() -> Rows:
            every = [
                [self._quick.shared.of(shape, parts, reducer) for parts in together.number]
                for reducer in self._kinds.values()
            ]
            return Rows(
                *(np.array([[getattr(one, name) for one in of_kind] for of_kind in every]) for name in Rows._fields)
            )

        sizes, number = shape.sizes, len(together.number)
        key = sizes.pp, sizes.wp, str(shape.weights), str(shape.offload), number, len(self._kinds)
        return once(self._rows, key, rows)

    def _one_way(self, table: LayerColumns, together: PartsTogether) -> Floats:
        """Returns the seconds of the messages from each position to the next, as `by_stage` takes them."""
        key = together, id(table.output)
        if key not in self._between:
            found = np.zeros(together.starts[-1])
            for start, parts in zip(together.starts, together.number, strict=False):
                costs = self._quick.messages(parts, table.output)
                found[start : start + len(costs)] = [sum(cost) for cost in costs]
            self._between[key] = found
        return self._between[key]

    def _micros(self, shape: Shape) -> int:
        return shape.sizes.micros(self._quick.plan, self._quick.world)
