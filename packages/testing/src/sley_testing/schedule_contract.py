"""Tests what every pipeline schedule must pass; the tests of a plugin inherit them.

    class TestHanayo(ScheduleContract):
        pipeline = {"use": "mine.hanayo", "waves": 2}

        def most_held(self, stage, stages, micros):
            return 4 * min(stages, micros)

Lists are pure integers, so most tests start no process: numbers of stages and micro-batches are drawn at random, and their
lists are generated, lowered, and simulated with random times of actions and transfers. Then a small decoder is trained on two
stages and compared with one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest

from sley_core.actions.action import Action, Kind, forward_only
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, simulate
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Component
from sley_testing.plans import small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import alone, assert_parity_of_parts, record

Table = dict[str, Any]

NUM_STEPS = 2


class ScheduleContract:
    """Tests a pipeline schedule: inherit, set `pipeline` to its table, write `most_held`, and pytest does the rest.

    tables: further tables of the plan, such as `link` and `partition` if the schedule's record names none. stages, micros:
    numbers that the schedule supports, from which sizes are drawn. num_draws: how many sizes.
    """

    pipeline: ClassVar[Table]
    tables: ClassVar[Table] = {}
    stages: ClassVar[Sequence[int]] = range(1, 9)
    micros: ClassVar[Sequence[int]] = range(1, 25)
    num_draws: ClassVar[int] = 24

    def most_held(self, stage: int, stages: int, micros: int) -> int:
        """Returns the most micro-batches that `stage` holds at a time, each counted once per chunk: those whose forward has run
        and whose gradients, weight gradients included, are not complete.
        """
        raise NotImplementedError("say how many micro-batches a stage holds: it decides the memory of activations")

    def test_lists_complete_at_any_size(self) -> None:
        """Whatever time actions and transfers take, in a step and in an evaluation: no stage waits forever for another."""
        for stages, micros, chance in self._sizes():
            schedule = self._schedule()
            placement = schedule.placement(stages)
            lists = schedule.lists(stages, micros)
            # Times of every action at each position, and of each transfer, from nearly none to three units.
            seconds = {kind: tuple(chance.uniform(0.1, 3) for _ in range(placement.num_positions)) for kind in Kind}
            nothing = (0,) * placement.num_positions
            costs = Costs(seconds, tuple(chance.uniform(0, 3) for _ in nothing[1:]), nothing, nothing, nothing[1:])
            simulate(lower(lists, placement, micros), placement, costs)
            forwards = [forward_only(actions) for actions in lists]
            simulate(lower(forwards, placement, micros, training=False), placement, costs)

    def test_each_micro_batch_visits_each_chunk_once(self) -> None:
        """One forward, then one backward, or the two halves of one in their order."""
        for stages, micros, _ in self._sizes():
            schedule = self._schedule()
            lists = schedule.lists(stages, micros)
            assert len(lists) == stages, f"{len(lists)} lists for {stages} stages"
            for stage, actions in enumerate(lists):
                _assert_once_in_order(actions, schedule.chunks, micros, f"stage {stage} of {stages}")

    def test_peak_micro_batches_equal_most_held(self) -> None:
        """No more micro-batches than `most_held` at any size, and as many at one of them."""
        reached = False
        for stages, micros, _ in self._sizes():
            schedule = self._schedule()
            placement = schedule.placement(stages)
            lowered = lower(schedule.lists(stages, micros), placement, micros)
            peaks = simulate(lowered, placement, Costs.even(placement.num_positions)).peaks
            for stage, held in enumerate(peaks):
                most = self.most_held(stage, stages, micros)
                where = f"stage {stage} of {stages}, {micros} micro-batches"
                assert held.pairs <= most, f"{where}: holds {held.pairs}, and says {most}"
                reached |= held.pairs == most
        assert reached, "`most_held` says more than any stage of any size holds"

    def test_lists_are_deterministic(self) -> None:
        """Every rank generates all lists itself: they must depend neither on earlier calls nor on chance."""
        for stages, micros, _ in self._sizes():
            schedule = self._schedule()
            first = schedule.lists(stages, micros)
            same = first == schedule.lists(stages, micros) == self._schedule().lists(stages, micros)
            assert same, f"{stages} stages, {micros} micro-batches: two calls give other lists, so ranks would not agree"

    @pytest.mark.parametrize("num_micros", [1, 5])
    def test_two_stages_match_one_process(self, ranks: Callable[..., Ranks], texts: Path, num_micros: int) -> None:
        """Loss, norm, gradients and weights of NUM_STEPS steps, and the held-out loss."""
        if 2 not in self.stages or num_micros not in self.micros:
            pytest.skip(f"the schedule has no lists for 2 stages and {num_micros} micro-batches")
        plan = _decoder(2 * self._schedule().chunks, num_micros)
        _assert_parity(ranks, texts, plan, {"pipeline": self.pipeline, **self.tables})

    def _sizes(self) -> Iterator[tuple[int, int, Random]]:
        """Yields drawn numbers of stages and micro-batches, the least first, each with a source of further chance."""
        yield min(self.stages), min(self.micros), Random(0)
        for seed in range(1, self.num_draws):
            chance = Random(seed)
            yield chance.choice(self.stages), chance.choice(self.micros), chance

    @cached_property
    def _component(self) -> Component:
        """Returns what a plan with the schedule's table has of it."""
        plan = plan_from_dict(small_plan(parallel={"dp": 1, "pp": 2}, pipeline=self.pipeline, **self.tables))
        assert plan.pipeline is not None
        return plan.pipeline

    def _schedule(self) -> Any:
        """Returns the schedule, made anew."""
        return self._component.build()


class TieContract:
    """Tests a handler of ties: inherit, set `pipeline`, and `tables` to those that name the handler and what the schedule
    lacks. The schedule has one chunk per stage, so that the decoder's embedding and its head, one weight, are on two stages.
    """

    pipeline: ClassVar[Table]
    tables: ClassVar[Table] = {}

    def test_tied_weight_matches_one_process(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """Gradients of both are summed, once; without clipping, which hides one in all."""
        plan = _decoder(2, 2, model__tie_embeddings=True, optimizer__clip_norm=None)
        _assert_parity(ranks, texts, plan, {"pipeline": self.pipeline, **self.tables})


def _decoder(num_layers: int, num_micros: int, **changes: Any) -> Table:
    """Returns the plan of a small decoder in one process, with a held-out loss."""
    batch = {"global_size": 2 * num_micros, "micro_size": 2}
    return small_plan(model__num_layers=num_layers, batch=batch, evaluation={"every": 9, "steps": 2}, **changes)


def _assert_parity(ranks: Callable[..., Ranks], texts: Path, plan: Table, tables: Table) -> None:
    """Asserts that two stages, with these further tables, train as one process does."""
    layouts = ranks(2)(record, plan | {"parallel": {"dp": 1, "pp": 2}, **tables}, NUM_STEPS, folder=texts)
    assert_parity_of_parts(alone(plan, NUM_STEPS, folder=texts), layouts, "fp64")


def _assert_once_in_order(actions: Sequence[Action], chunks: int, micros: int, where: str) -> None:
    """Asserts that each chunk has F then B, or F, I and W in this order, once for each micro-batch, and nothing else."""
    kinds: dict[tuple[int, int], str] = {}
    for action in actions:
        place = action.chunk, action.micro
        kinds[place] = kinds.get(place, "") + action.kind.value
    due = {(chunk, micro) for chunk in range(chunks) for micro in range(micros)}
    assert kinds.keys() == due, f"{where}: {sorted(kinds.keys() ^ due)[:3]} (chunk, micro-batch) missing or too many"
    wrong = {place: found for place, found in kinds.items() if found not in ("FB", "FIW")}
    counted = Counter(wrong.values()).most_common(3)
    assert not wrong, f"{where}: actions of a micro-batch are {counted}, not FB or FIW; as at {min(wrong, default=None)}"
