"""Defines the tests that every pipeline schedule must pass, for a plugin's tests to inherit.

    class TestHanayo(ScheduleContract):
        pipeline = {"use": "mine.hanayo", "waves": 2}

        def max_micro_batches(self, stage, num_stages, num_microbatches):
            return 4 * min(num_stages, num_microbatches)

Most tests start no process. They draw numbers of stages and microbatches at random; then they generate, lower and simulate the
action lists. The last test trains a small decoder on two stages and compares it with one process.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest

from sley_core.actions.action import Action, Kind, Placement, forward_only
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, simulate
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Component
from sley_testing.plans import Tables, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import assert_parity_of_parts, record, record_reference

NUM_STEPS = 2
NUM_MICRO_BATCHES = 5  # of the runs on two stages


class ScheduleContract:
    """Tests a pipeline schedule. Subclass it, set `pipeline` to the table `[pipeline]`, and implement `max_micro_batches`.

    tables: additional tables of the plan, such as `link` and `partition` if the schedule's record names none. stages, micros:
    the supported numbers of stages and microbatches. num_draws: how many pairs of these numbers to test.
    """

    pipeline: ClassVar[Tables]
    tables: ClassVar[Tables] = {}
    stages: ClassVar[Sequence[int]] = range(1, 9)
    micros: ClassVar[Sequence[int]] = range(1, 25)
    num_draws: ClassVar[int] = 24

    def max_micro_batches(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Returns the maximum number of microbatches that `stage` holds at a time, each counted once per chunk. A stage holds
        a microbatch from its forward until all its gradients, including weight gradients, are complete.
        """
        raise NotImplementedError(
            "implement `max_micro_batches`: the number of held microbatches, which determines activation memory"
        )

    def test_lists_complete_at_any_size(self) -> None:
        """Simulates steps and evaluations with random durations, and expects no deadlock."""
        for num_stages, num_microbatches, generator in self._sizes():
            placement, lists = self._placement_and_lists(num_stages, num_microbatches)
            # Draw durations: 0.1 to 3 units for the actions at each position, 0 to 3 units for transfers.
            seconds = {kind: tuple(generator.uniform(0.1, 3) for _ in range(placement.num_positions)) for kind in Kind}
            zeros = (0,) * placement.num_positions
            costs = Costs(seconds, tuple(generator.uniform(0, 3) for _ in zeros[1:]), zeros, zeros, zeros[1:])
            simulate(lower(lists, placement, num_microbatches), placement, costs)
            forwards = [forward_only(actions) for actions in lists]
            simulate(lower(forwards, placement, num_microbatches, training=False), placement, costs)

    def test_each_micro_batch_visits_each_chunk_once(self) -> None:
        """Expects a forward, then a full backward, or an input-gradient and a weight-gradient action, in this order."""
        for num_stages, num_microbatches, _ in self._sizes():
            placement, lists = self._placement_and_lists(num_stages, num_microbatches)
            chunks = placement.num_positions // num_stages
            assert len(lists) == num_stages, f"{len(lists)} lists for {num_stages} stages"
            for stage, actions in enumerate(lists):
                _assert_once_in_order(actions, chunks, num_microbatches, f"stage {stage} of {num_stages}")

    def test_peak_equals_max_micro_batches(self) -> None:
        """Expects that no stage holds more than `max_micro_batches` microbatches, and that a stage at some size holds exactly
        that many.
        """
        is_reached = False
        for num_stages, num_microbatches, _ in self._sizes():
            placement, lists = self._placement_and_lists(num_stages, num_microbatches)
            costs = Costs.even(placement.num_positions)
            peaks = simulate(lower(lists, placement, num_microbatches), placement, costs).peaks
            for stage, peak in enumerate(peaks):
                limit = self.max_micro_batches(stage, num_stages, num_microbatches)
                label = f"stage {stage} of {num_stages}, {num_microbatches} microbatches"
                assert peak.pairs <= limit, f"{label}: holds {peak.pairs}, but `max_micro_batches` is {limit}"
                is_reached |= peak.pairs == limit
        assert is_reached, "`max_micro_batches` is larger than the peak of every stage at every size"

    def test_lists_are_deterministic(self) -> None:
        """Expects lists that depend neither on earlier calls nor on chance, since every rank generates all lists."""
        for num_stages, num_microbatches, _ in self._sizes():
            schedule = self._component.build()
            first = schedule.lists(num_stages, num_microbatches)
            _, second = self._placement_and_lists(num_stages, num_microbatches)
            assert first == schedule.lists(num_stages, num_microbatches) == second, (
                f"{num_stages} stages, {num_microbatches} microbatches: two calls return different lists, so ranks would differ"
            )

    def test_two_stages_match_one_process(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """Compares losses, norms, gradients, weights and the held-out loss of two stages with one process."""
        if 2 not in self.stages or NUM_MICRO_BATCHES not in self.micros:
            pytest.skip(f"the schedule has no lists for 2 stages and {NUM_MICRO_BATCHES} microbatches")
        plan = _decoder_plan(2 * self._component.build().chunks, NUM_MICRO_BATCHES)
        _assert_parity(ranks, texts, plan, {"pipeline": self.pipeline, **self.tables})

    def _sizes(self) -> Iterator[tuple[int, int, Random]]:
        """Yields pairs of numbers of stages and microbatches, each with a random generator. The first pair is the smallest."""
        yield min(self.stages), min(self.micros), Random(0)
        for seed in range(1, self.num_draws):
            generator = Random(seed)
            yield generator.choice(self.stages), generator.choice(self.micros), generator

    @cached_property
    def _component(self) -> Component:
        """The schedule's component in a plan."""
        plan = plan_from_dict(small_plan(parallel={"dp": 1, "pp": 2}, pipeline=self.pipeline, **self.tables))
        assert plan.pipeline is not None
        return plan.pipeline

    def _placement_and_lists(self, num_stages: int, num_microbatches: int) -> tuple[Placement, list[list[Action]]]:
        """Builds a schedule and returns its placement and action lists."""
        schedule = self._component.build()
        return schedule.placement(num_stages), schedule.lists(num_stages, num_microbatches)


class TieContract:
    """Tests a handler of tied weights. Subclass it, set `pipeline` to the table `[pipeline]`, and set `tables` to the other
    tables, including that of the handler. The schedule must have one chunk per stage, so that two stages share the tied weight.
    """

    pipeline: ClassVar[Tables]
    tables: ClassVar[Tables] = {}

    def test_tied_weight_matches_one_process(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """Compares with one process, without clipping, which would hide a common factor of all gradients."""
        plan = _decoder_plan(2, 2, model__tie_embeddings=True, optimizer__clip_norm=None)
        _assert_parity(ranks, texts, plan, {"pipeline": self.pipeline, **self.tables})


def _decoder_plan(num_layers: int, num_microbatches: int, **changes: Any) -> Tables:
    """Returns the one-process plan of a small decoder with a held-out loss."""
    batch = {"global_size": 2 * num_microbatches, "micro_size": 2}
    return small_plan(model__num_layers=num_layers, batch=batch, evaluation={"every": 9, "steps": 2}, **changes)


def _assert_parity(ranks: Callable[..., Ranks], folder: Path, plan: Tables, extra_tables: Tables) -> None:
    """Asserts that the plan on two stages with `extra_tables` matches the plan on one process."""
    records = ranks(2)(record, plan | {"parallel": {"dp": 1, "pp": 2}, **extra_tables}, NUM_STEPS, folder=folder)
    assert_parity_of_parts(record_reference(plan, NUM_STEPS, folder=folder), records, "fp64")


def _assert_once_in_order(actions: Sequence[Action], chunks: int, num_microbatches: int, label: str) -> None:
    """Asserts that the actions of each microbatch in each chunk are F, B or F, I, W, in this order."""
    sequences: dict[tuple[int, int], str] = {}
    for action in actions:
        key = action.chunk, action.micro
        sequences[key] = sequences.get(key, "") + action.kind.value
    expected = {(chunk, micro_batch) for chunk in range(chunks) for micro_batch in range(num_microbatches)}
    assert sequences.keys() == expected, (
        f"{label}: {sorted(sequences.keys() ^ expected)[:3]} (chunk, microbatch) missing or too many"
    )
    for (chunk, micro_batch), sequence in sequences.items():
        assert sequence in ("FB", "FIW"), f"{label}: chunk {chunk} of microbatch {micro_batch} has {sequence}, not FB or FIW"
