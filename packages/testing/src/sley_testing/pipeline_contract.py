"""Defines the tests that every pipeline schedule, tie handler and stage link must pass, for a plugin's tests to inherit.

    class TestHanayo(ScheduleContract):
        pipeline = {"use": "mine.hanayo", "waves": 2}

        def max_micro_batches(self, stage, num_stages, num_microbatches):
            return 4 * min(num_stages, num_microbatches)

    class TestMine(StageLinkContract):
        link = {"use": "mine.link"}

Most tests of schedules start no process. They draw numbers of stages and microbatches at random; then they generate, lower and
simulate the action lists. The last test trains a small decoder on two stages and compares it with one process.

In the tests of links, each rank is a stage that exchanges known messages instead of the outputs of layers (`Walker`). A walk
executes a random action list per stage. Stages have several chunks, whose neighbours are on either side or on the same stage.
Messages have tensors of several dtypes, an empty tensor, a repeated tensor, and two tensors that overlap in memory. Some
tensors have gradients.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from sley_core.actions.action import INPUT_GRADIENT_KINDS, Action, Flow, Kind, Placement, Transfer, select_forwards
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, simulate
from sley_core.comm.world import World
from sley_core.engine.boundary import Description, Leaf
from sley_core.engine.registry import ParameterRegistry
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import PluginLoader
from sley_core.plan.plan import Component
from sley_core.protocols import StageLink
from sley_core.records import StageLinkRecord
from sley_core.topology import Topology
from sley_testing.plans import Tables, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import assert_parity_of_parts, random_action_lists, record, record_reference
from sley_trainer.assemble import build_parts
from sley_trainer.execute import StageBoundaries

NUM_STEPS = 2  # optimizer steps of the runs on two stages
NUM_MICROBATCHES = 5  # microbatches per step of the runs on two stages


class ScheduleContract:
    """Tests a pipeline schedule. Subclass it, set `pipeline` to the `[pipeline]` table, and implement `max_micro_batches`.
    tables: additional tables of the plan, such as `link` and `partition` if the schedule's record names none. stages, micros:
    the supported numbers of stages and microbatches. num_draws: the number of random pairs of these numbers to test.
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
            "implement `max_micro_batches`, which returns the number of microbatches whose activations a stage holds"
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
            forwards = [select_forwards(actions) for actions in lists]
            simulate(lower(forwards, placement, num_microbatches, training=False), placement, costs)

    def test_each_micro_batch_visits_each_chunk_once(self) -> None:
        """Expects for each microbatch and chunk a forward, then either a backward or an input and a weight gradient."""
        for num_stages, num_microbatches, _ in self._sizes():
            placement, lists = self._placement_and_lists(num_stages, num_microbatches)
            chunks = placement.num_positions // num_stages
            assert len(lists) == num_stages, f"{len(lists)} lists for {num_stages} stages"
            for stage, actions in enumerate(lists):
                _assert_once_in_order(actions, chunks, num_microbatches, f"stage {stage} of {num_stages}")

    def test_peak_equals_max_micro_batches(self) -> None:
        """Expects each stage to hold at most `max_micro_batches` microbatches, and one stage to hold that number."""
        is_reached = False
        for num_stages, num_microbatches, _ in self._sizes():
            placement, lists = self._placement_and_lists(num_stages, num_microbatches)
            costs = Costs.uniform(placement.num_positions)
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
        if 2 not in self.stages or NUM_MICROBATCHES not in self.micros:
            pytest.skip(f"the schedule has no lists for 2 stages and {NUM_MICROBATCHES} microbatches")
        plan = _decoder_plan(2 * self._component.build().chunks, NUM_MICROBATCHES)
        _assert_parity(ranks, texts, plan, {"pipeline": self.pipeline, **self.tables})

    def _sizes(self) -> Iterator[tuple[int, int, Random]]:
        """Yields numbers of stages and microbatches, each pair with a random generator. The first pair is the smallest."""
        yield min(self.stages), min(self.micros), Random(0)
        for seed in range(1, self.num_draws):
            generator = Random(seed)
            yield generator.choice(self.stages), generator.choice(self.micros), generator

    @cached_property
    def _component(self) -> Component:
        plan = plan_from_dict(small_plan(parallel={"dp": 1, "pp": 2}, pipeline=self.pipeline, **self.tables))
        assert plan.pipeline is not None
        return plan.pipeline

    def _placement_and_lists(self, num_stages: int, num_microbatches: int) -> tuple[Placement, list[list[Action]]]:
        schedule = self._component.build()
        return schedule.placement(num_stages), schedule.lists(num_stages, num_microbatches)


class TieContract:
    """Tests a handler of tied weights. Subclass it, set `pipeline` to the `[pipeline]` table, and set `tables` to the other
    tables, including the handler's table. The schedule must have one chunk per stage, so that two stages share the tied weight.
    """

    pipeline: ClassVar[Tables]
    tables: ClassVar[Tables] = {}

    def test_tied_weight_matches_one_process(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """Compares two stages with one process, without clipping, which would hide a common factor of all gradients."""
        plan = _decoder_plan(2, 2, model__tie_embeddings=True, optimizer__clip_norm=None)
        _assert_parity(ranks, texts, plan, {"pipeline": self.pipeline, **self.tables})


def _decoder_plan(num_layers: int, num_microbatches: int, **changes: Any) -> Tables:
    """Returns the one-process plan of a small decoder with a held-out loss."""
    batch = {"global_size": 2 * num_microbatches, "micro_size": 2}
    return small_plan(model__num_layers=num_layers, batch=batch, evaluation={"every": 9, "steps": 2}, **changes)


def _assert_parity(ranks: Callable[..., Ranks], folder: Path, plan: Tables, extra_tables: Tables) -> None:
    records = ranks(2)(record, plan | {"parallel": {"dp": 1, "pp": 2}, **extra_tables}, NUM_STEPS, folder=folder)
    assert_parity_of_parts(record_reference(plan, NUM_STEPS, folder=folder), records, "fp64")


def _assert_once_in_order(actions: Sequence[Action], chunks: int, num_microbatches: int, label: str) -> None:
    """Asserts that each chunk of each microbatch has the actions F, B or F, I, W in this order, each once."""
    sequences: dict[tuple[int, int], str] = {}
    for action in actions:
        key = action.chunk, action.micro
        sequences[key] = sequences.get(key, "") + action.kind.value
    expected = {(chunk, microbatch) for chunk in range(chunks) for microbatch in range(num_microbatches)}
    assert sequences.keys() == expected, (
        f"{label}: {sorted(sequences.keys() ^ expected)[:3]} (chunk, microbatch) are missing or not expected"
    )
    for (chunk, microbatch), sequence in sequences.items():
        assert sequence in ("FB", "FIW"), f"{label}: chunk {chunk} of microbatch {microbatch} has {sequence}, not FB or FIW"


ROUTES = {"two stages": (0, 1), "a wave": (0, 1, 1, 0, 0, 1, 1, 0), "three stages in random order": (2, 0, 1, 1, 0, 2)}
"""The tested placements, by name. Element i of a tuple is the stage that holds position i of the pipeline."""

LENGTHS = ((3, 5, 1, 3), (5,), (1, 1, 8), (3, 3, 3, 3))
"""The lengths of microbatches: walk number i uses the tuple i, modulo the number of tuples."""

MISMATCHES = (((3, 3), (3, 3, 3)), ((3, 3), (3, 4)), ((3, 4), (4, 3)))
"""Pairs of microbatch lengths that differ: the lengths on the first stage, and the lengths on the second stage."""

WAIT_S = 10.0  # the time limit of a collective in seconds


def run_walks(link: Tables, route: tuple[int, ...], lengths_by_walk: Sequence[Sequence[int]]) -> None:
    """Executes this rank's part of a walk, a random action list, per element of `lengths_by_walk`: the microbatch lengths of
    the walk. Repeats every second walk with its forwards only. Raises AssertionError if a received tensor is wrong, or changes
    in a later walk. route: the stage of each position.
    """
    placement = Placement(route)
    with open_link(link) as (stage_link, stage):
        walker = Walker(stage_link, placement, stage)
        for index, lengths in enumerate(lengths_by_walk):
            lists = random_action_lists(placement, len(lengths), Random(index))
            walker.walk(lists, lengths)
            if index % 2:
                walker.walk([select_forwards(actions) for actions in lists], lengths, training=False)
            walker.check_kept_tensors()


def run_mismatched_walks(link: Tables) -> list[str]:
    """Executes a walk on this rank for each of MISMATCHES. Returns the code of each RunError, or "" if none is raised."""
    placement, codes = Placement((0, 1)), []
    for lengths_by_stage in MISMATCHES:
        with open_link(link) as (stage_link, stage):
            lengths, code = lengths_by_stage[stage], ""
            try:
                Walker(stage_link, placement, stage).walk(random_action_lists(placement, len(lengths), Random(1)), lengths)
            except RunError as error:
                code = error.diagnostics[0].code
            codes.append(code)
    return codes


def time_aborts(link: Tables, timeout_s: float) -> float:
    """Begins and aborts two walks on the first stage. Returns the time in seconds. timeout_s: the limit of a collective."""
    placement, key = Placement((0, 1, 1, 0)), ("tokens", (2, 3))
    steps = lower(random_action_lists(placement, 2, Random(1)), placement, 2)[0]
    with open_link(link, timeout_s) as (stage_link, stage):
        start = time.monotonic()
        for _ in range(2 if stage == 0 else 0):
            stage_link.begin([key] * 2, [1])
            for step in steps:
                if isinstance(step, Transfer) and step.op == "post":
                    stage_link.post_receive(step, key)
            stage_link.abort("the contract's failing step")
        return time.monotonic() - start


class StageLinkContract:
    """Tests a stage link. Subclass it, and set `link` to the `[link]` table. A walk executes a random action list.
    num_walks: the number of walks per placement. abort_timeout_s: the time limit in seconds of a collective in the abort test.
    """

    link: ClassVar[Tables]
    num_walks: ClassVar[int] = 4
    abort_timeout_s: ClassVar[float] = 10.0

    @pytest.mark.parametrize("name", ROUTES)
    def test_received_tensors_equal_sent(self, ranks: Callable[..., Ranks], name: str) -> None:
        """Executes walks whose lengths change, while senders overwrite tensors that they have sent. Received tensors, their
        views and arrays must not change in later walks, and a write to one tensor must not change another.
        """
        route, lengths_by_walk = ROUTES[name], [LENGTHS[index % len(LENGTHS)] for index in range(self.num_walks)]
        ranks(max(route) + 1)(run_walks, self.link, route, lengths_by_walk)

    def test_differing_walks_are_reported_on_both_stages(self, ranks: Callable[..., Ranks]) -> None:
        """Expects RunError `stages-differ` if two stages have different numbers, shapes or orders of microbatches."""
        assert ranks(2)(run_mismatched_walks, self.link) == [["stages-differ"] * len(MISMATCHES)] * 2

    def test_abort_does_not_wait(self, ranks: Callable[..., Ranks]) -> None:
        """Expects a stage to abort a walk that its neighbours never join, and to begin another, without waiting."""
        assert max(ranks(2)(time_aborts, self.link, self.abort_timeout_s)) < self.abort_timeout_s / 2


@contextmanager
def open_link(table: dict[str, Any], timeout_s: float = WAIT_S) -> Iterator[tuple[StageLink, int]]:
    """Yields the prepared link of `table` and this rank's stage. A stage has one rank. timeout_s: the limit of a wait."""
    loader = PluginLoader()
    record = loader.record(StageLinkRecord, table["use"])
    config = record.config.model_validate({key: value for key, value in table.items() if key != "use"})
    link: StageLink = loader.load(table["use"].partition(".")[0]).load_builder(record)(config)
    plan = plan_from_dict(small_plan())  # a plan without a link, for the other parts
    with World.join("cpu", timeout_s=timeout_s) as world:
        topology = Topology.from_sizes(world.size, pp=world.size)
        groups, registry = world.make_groups(topology, timeout_s), ParameterRegistry([[]])
        link.prepare(build_parts(plan, world, topology, groups, (), registry))
        yield link, groups["pp"].coord


class Walker:
    """Executes a stage's actions in walks over `link`. Keeps all tensors from other stages, and writes to some of them."""

    def __init__(self, link: StageLink, placement: Placement, stage: int) -> None:
        self.placement = placement
        self.stage = stage
        self._boundaries = StageBoundaries(placement, stage, link)
        self._walk_number = 0
        self._lengths: Sequence[int] = ()
        self._sent: dict[tuple[Flow, int, int], list[torch.Tensor]] = {}
        self._received: dict[tuple[int, int], Description] = {}
        self._kept_tensors: list[tuple[Any, torch.Tensor]] = []  # each with its expected value

    def walk(self, lists: Sequence[Sequence[Action]], lengths: Sequence[int], *, training: bool = True) -> None:
        """Executes the list of this stage in `lists`, one per stage. Raises AssertionError if a received message differs from
        the sent one. lengths: the length of each microbatch, which determines the shapes of its messages. training: whether the
        lists contain backward actions.
        """
        self._walk_number += 1
        self._lengths = lengths
        steps = lower(lists, self.placement, len(lengths), training=training)[self.stage]
        self._boundaries.begin([("tokens", (2, length)) for length in lengths])
        for step in steps:
            if isinstance(step, Transfer):
                self._boundaries.transfer(step)
                if step.op == "send":
                    # Overwrite the sent tensors at once, which must not change the received ones.
                    for tensor in self._sent.pop((step.flow, step.chunk, step.micro)):
                        tensor.fill_(77)
            elif step.kind is Kind.FORWARD:
                self._forward(step)
            elif step.kind in INPUT_GRADIENT_KINDS:
                self._backward(step)
        self._boundaries.wait_for_sends()
        self._sent.clear()

    def check_kept_tensors(self) -> None:
        """Raises AssertionError if a kept tensor, view or array has changed."""
        for value, expected in self._kept_tensors:
            actual = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            assert torch.equal(actual, expected), f"a received and kept tensor changed from {expected} to {actual}"

    def _forward(self, action: Action) -> None:
        """Receives the input of the action's chunk and sends its output, except at the ends of the pipeline."""
        position, microbatch = self.placement.position(self.stage, action.chunk), action.micro
        if position > 0:
            self._received[action.chunk, microbatch] = self._receive("forward", action, position - 1)
        if position + 1 < self.placement.num_positions:
            self._send("forward", action, *self._output(position, microbatch))

    def _backward(self, action: Action) -> None:
        """Receives the gradients of the chunk's output and sends the gradients of its input, except at the ends."""
        position, microbatch = self.placement.position(self.stage, action.chunk), action.micro
        if position + 1 < self.placement.num_positions:
            self._receive("backward", action, position + 1)
        if position > 0:
            description = self._received.pop((action.chunk, microbatch)).gradients
            self._send("backward", action, description, self._gradients(position, microbatch, description))

    def _receive(self, flow: Flow, action: Action, origin: int) -> Description:
        """Receives the message that the chunk at position `origin` sent, checks its content, and returns its description."""
        description, tensors = self._boundaries.receive(flow, action.chunk, action.micro)
        is_sent = self.placement.holder(origin).stage != self.stage
        label = f"stage {self.stage}, walk {self._walk_number}, {flow} of {action}"
        if flow == "forward":
            sent_description, sent = self._output(origin, action.micro)
            sent_description = sent_description.with_overlaps(sent) if is_sent else sent_description
            assert description == sent_description, f"{label}: received {description.leaves}, not {sent_description.leaves}"
        else:
            sent = self._gradients(origin, action.micro, self._output(origin - 1, action.micro)[0].gradients)
        assert len(tensors) == len(sent), f"{label}: received {len(tensors)} tensors, not {len(sent)}"
        for index, (actual, expected) in enumerate(zip(tensors, sent, strict=True)):
            assert torch.equal(actual, expected), f"{label}: tensor {index} was received as {actual}, not {expected}"
        if is_sent:
            self._keep(tensors, sent, action.micro)
        return description

    def _send(self, flow: Flow, action: Action, description: Description, tensors: list[torch.Tensor]) -> None:
        self._sent[flow, action.chunk, action.micro] = tensors
        self._boundaries.send(flow, action.chunk, action.micro, (description, tensors))

    def _keep(self, tensors: list[torch.Tensor], expected: list[torch.Tensor], microbatch: int) -> None:
        """Keeps the received tensors for later checks. If `microbatch` is odd, overwrites the first tensor beforehand."""
        versions = [tensor._version for tensor in tensors[1:]]
        if tensors and microbatch % 2:
            tensors[0].fill_(7)
            expected = [torch.full_like(expected[0], 7), *expected[1:]]
        assert versions == [tensor._version for tensor in tensors[1:]], "a write to a tensor changes the version of another"
        self._kept_tensors += [
            ((tensor, tensor.view_as(tensor), tensor.numpy())[(index + microbatch) % 3], value.clone())
            for index, (tensor, value) in enumerate(zip(tensors, expected, strict=True))
        ]

    def _output(self, position: int, microbatch: int) -> tuple[Description, list[torch.Tensor]]:
        """Returns the output of the chunk at `position`: tensors of several dtypes, some empty, repeated or overlapping."""
        generator, length = self._generator(position, microbatch, 0), self._lengths[microbatch]
        hidden = torch.randn(length + 2, 3, generator=generator)
        counts = torch.randint(0, 99, (2,), generator=generator)
        scalar = torch.randn((), generator=generator, dtype=torch.float64)
        tensors = [hidden, counts, scalar, torch.empty(0, length), hidden[1:3], counts]
        has_gradient = [microbatch % 3 != 2, False, microbatch % 2 == 0, False, False, False]
        leaves = [Leaf(tensor.dtype, tuple(tensor.shape), has) for tensor, has in zip(tensors, has_gradient, strict=True)]
        leaves[5] = Leaf(counts.dtype, (2,), has_gradient=False, same_as=1)
        return Description(tuple(leaves), {"tuple": list(range(6))}), tensors

    def _gradients(self, position: int, microbatch: int, description: Description) -> list[torch.Tensor]:
        """Returns random input gradients for the chunk at `position`, with the dtypes and shapes in `description`."""
        generator = self._generator(position, microbatch, 1)
        return [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in description.leaves]

    def _generator(self, position: int, microbatch: int, stream: int) -> torch.Generator:
        """Returns a generator whose seed differs between walks and arguments. stream: 0 for outputs, 1 for gradients."""
        return torch.Generator().manual_seed(((self._walk_number * 64 + position) * 64 + microbatch) * 2 + stream)
