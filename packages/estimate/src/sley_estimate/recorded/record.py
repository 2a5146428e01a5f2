"""Takes steps on tensors without values and writes the last of them down: operators, exchanges, waits, action by action."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from sley_core.actions.action import Action, Kind, Transfer
from sley_core.comm.copies import storage_id
from sley_estimate.bytes.cuda_kernels import CudaKernels
from sley_estimate.bytes.fake_device import FakeDevice
from sley_estimate.bytes.micros import fewest_micros, least_micros
from sley_estimate.bytes.rank import fake_run, take_step
from sley_estimate.bytes.simulation import TakenSteps
from sley_estimate.hookspecs import hint_of
from sley_estimate.layers.fused import FusedKernels
from sley_estimate.layers.operators import Operator
from sley_estimate.layers.recorder import operator_of
from sley_estimate.recorded.words import HOST, Awaited, Began, RecordedStep, Word, Worked
from train_cli.on_meta import micro_batch

if TYPE_CHECKING:
    from sley_core.assemble import Draft
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Collective
    from sley_core.run import Run
    from sley_core.topology import Topology
    from sley_estimate.bytes.fake_tensors import FakeTensors
    from sley_estimate.bytes.recipes import Recipes
    from sley_estimate.seconds.host_copies import CopyKind

STEPS = 3
"""Optimizer states come in the first; orders of gradients and of gathers are those that it showed from the second on. All but
the last take as few micro-batches as the schedule allows.
"""

MESSAGES = "pp"
"""The axis whose messages the lists have already."""


@dataclass(frozen=True)
class RankRecord:
    """Holds a recorded step, and what of the run it takes to read it.

    groups: the global ranks of each of this rank's groups, by axis. messages: bytes of what each position of the model but the
    last hands on. layers: names of those of each chunk. num_trained: parameters. more: steps of alike stages with other lists.
    """

    step: RecordedStep
    topology: Topology
    groups: Mapping[str, tuple[int, ...]]
    messages: Sequence[int]
    layers: Sequence[Sequence[str]]
    num_trained: int
    more: Sequence[RecordedStep] = ()

    def on_stage(self, stage: int, layers: Sequence[Sequence[str]], more: Sequence[RecordedStep]) -> RankRecord:
        """Returns the record as the first rank of an alike stage would have it. layers: names of those of its chunks. more:
        steps of other alike stages.
        """
        size = self.topology.ranks_per_stage
        here = min(self.groups["stage"])
        own, shift = range(here, here + size), stage * size - here
        shifted = {
            axis: tuple(rank + shift for rank in ranks) if set(ranks) <= set(own) else ranks
            for axis, ranks in self.groups.items()
        }
        return replace(self, groups=shifted, layers=layers, more=more)


def record(
    plan: Plan, rank: int, size: int, *, runs_ahead: bool = False, recipes: Recipes | None = None, draft: Draft | None = None
) -> RankRecord:
    """Takes steps in a fake run of rank `rank` of `size` and returns the last of them, in which buckets and gathers have their
    order: of as few micro-batches as show all that a longer one does. Needs neither devices nor peers.

    runs_ahead: whether copies to the host run beside the device's work, as on CUDA. recipes, draft: as `rank_bytes` takes them.
    Raises PlanError for all that the plan's checks find, RunError `estimate-layer` for a layer that needs values,
    `estimate-late` after `limits.estimate_timeout_s`.
    """
    with fake_run(plan, rank, size, recipes, draft, runs_ahead=runs_ahead) as (run, _, tensors):
        of_micros = plan.num_micros(run.topology)
        taken, few = fewest_micros(run.stepper.lists, of_micros), least_micros(run.stepper.lists, of_micros)
        batch = micro_batch(plan, run.dataset)
        recording = Recording()
        recording.follow(run, tensors)
        for _ in range(STEPS - 1):
            take_step(run, [batch] * few)
        recording.begin()
        with _kernels(plan, recording, runs_ahead=runs_ahead):
            take_step(run, [batch] * taken)
        recording.end()
        return recording.found


def _kernels(plan: Plan, recording: Recording, *, runs_ahead: bool) -> AbstractContextManager[object]:
    """Returns the mode in which a step of `plan` runs the kernels of its device, which `recording` notes."""
    if plan.run.device == "cuda":
        return CudaKernels(recording)
    # A CPU copies to its host what its plain kernels save.
    is_plain = hint_of(plan.loader, plan.activations.name).copies and not runs_ahead
    return nullcontext() if is_plain else FusedKernels(recording)


class Recording:
    """Records the last step of a fake run. found: the record, once that is over."""

    found: RankRecord

    def follow(self, run: Run, tensors: FakeTensors) -> None:
        """Hears from now on what `run`, which has taken no step yet, exchanges and copies to the host."""
        self._run, self._tensors, self._recorder = run, tensors, StepRecorder()
        device, simulation = run.world.device, run.world.simulation
        assert isinstance(device, FakeDevice), device
        assert isinstance(simulation, TakenSteps), simulation
        simulation.listener = self._recorder.began
        device.copies.listener = self._recorder

    def begin(self) -> None:
        """Begins to write the last step down."""
        self._recorder.start(self._run)
        self._tensors.listener = self._recorder.ran

    def note(self, operator: Operator) -> None:
        """Notes an operator that torch does not see as one; not before the last step."""
        self._recorder.note(operator)

    def end(self) -> None:
        """Stops to write, and keeps the record in `found`."""
        run, self._tensors.listener = self._run, None
        layers = [[layer.name for layer in chunk] for chunk in run.stepper.executor.chunks]
        groups = {axis: group.ranks for axis, group in run.groups.items()}
        trained = len(run.parts.registry.trainable)
        self.found = RankRecord(self._recorder.step(), run.topology, groups, _messages(run), layers, trained)
        del self._run


def _messages(run: Run) -> list[int]:
    """Returns the bytes that each position of the model but the last hands to the next one; [] where nothing is handed on."""
    placement, foretold = run.stepper.lists.placement, run.parts.foretold
    if foretold is None:
        return []
    holders = [placement.holder(position) for position in range(placement.num_positions - 1)]
    leaves = [[leaf for leaf in foretold(*holder).leaves if leaf.same_as is None] for holder in holders]
    return [sum(leaf.num_bytes for leaf in some) for some in leaves]


class StepRecorder:
    """Writes down what a rank does, from `start` on. It hears exchanges before that too, since a step may wait for such of the
    one before.
    """

    def __init__(self) -> None:
        self._all: dict[int, Began] = {}
        self._awaited: set[int] = set()
        self._first = 0
        self._is_writing = False
        self._of_host: set[int] = set()
        self._known: dict[Hashable, Operator | None] = {}
        self._entry: object = None
        self._operators: list[Operator] = []
        self._opening: list[Word] = []
        self._closing: list[Word] = []
        self._actions: list[tuple[Action, list[Word]]] = []
        self._words = self._opening

    def start(self, run: Run) -> None:
        """Begins to write: from now on operators, exchanges, copies and waits become words, under the entry of the step that
        runs.
        """
        masters = run.stepper.update.masters
        if masters.home is not None:
            self._of_host = {storage_id(one.parameter) for one in masters.stepped}
        self._first = len(self._all)
        self._is_writing = True
        run.groups.progress.standing.follow = self.entered

    def entered(self, entry: object) -> None:
        """Notes that another entry of the step begins: an action, a transfer, or words for what comes after the list."""
        self._end_work()
        self._entry = entry
        if isinstance(entry, Action):
            if entry.kind is not Kind.CHUNK_DONE:  # what starts there belongs to the action that was the chunk's last
                self._actions.append((entry, []))
            self._words = self._actions[-1][1]
        elif not isinstance(entry, Transfer) and self._actions:
            self._words = self._closing

    def ran(self, key: Hashable | None, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes one call of torch's operator `func`, unless it computes and moves nothing, or belongs to a transfer. key: equal
        for calls that do the same with tensors of the same shapes; None for a call like no other.
        """
        if isinstance(self._entry, Transfer):
            return
        try:
            found = self._known[key]
        except KeyError:
            found = operator_of(func, args, kwargs, result)
            if key is not None:
                self._known[key] = found
        if found is not None:
            self.note(replace(found, is_on_host=True) if self._is_on_host(args) else found)

    def note(self, operator: Operator) -> None:
        """Notes an operator that torch does not see as one; does nothing before `start`."""
        if self._is_writing:
            self._operators.append(operator)

    def began(self, kind: Collective, axis: str, lane: str, num_bytes: int) -> Callable[[], None]:
        """Notes an exchange of `num_bytes` over the group of `axis` on `lane`; returns a function to call where the rank waits
        for it. Messages between stages are not noted: lists have them.
        """
        if axis == MESSAGES:
            return lambda: None
        began = self._begin(Began(len(self._all), kind, axis, lane, num_bytes))
        return lambda: self.awaited(began.number)

    def copied(self, kind: CopyKind, stream: int, num_bytes: int, after: int | None) -> int:
        """Notes a copy on stream number `stream`, which comes after copy number `after`, if that is one; returns the copy's
        number.
        """
        return self._begin(Began(len(self._all), kind, HOST, str(stream), num_bytes, after)).number

    def step(self) -> RecordedStep:
        """Ends the writing and returns the recorded step, with the exchanges of the step before that it waited for."""
        self._end_work()
        self._is_writing = False
        words = [*self._opening, *(word for _, some in self._actions for word in some), *self._closing]
        carried = [word.number for word in words if isinstance(word, Awaited) and word.number < self._first]
        return RecordedStep(
            tuple(self._opening),
            [(action, tuple(some)) for action, some in self._actions],
            tuple(self._closing),
            [self._all[number] for number in carried],
        )

    def _begin(self, began: Began) -> Began:
        """Keeps an exchange or copy under its number, before the writing too, and returns it. While writing, adds it to the
        present words.
        """
        self._all[began.number] = began
        if self._is_writing:
            self._end_work()
            self._words.append(began)
        return began

    def _is_on_host(self, values: Any) -> bool:
        """Returns whether one of the tensors in `values` is a weight that an optimizer steps on the host."""
        if not self._of_host:
            return False
        return any(isinstance(leaf, Tensor) and storage_id(leaf) in self._of_host for leaf in tree_leaves(values))

    def awaited(self, number: int) -> None:
        """Notes that the rank waits for exchange or copy `number`; only the first wait counts."""
        if number in self._awaited:
            return
        self._awaited.add(number)
        if self._is_writing:
            self._end_work()
            self._words.append(Awaited(number))

    def _end_work(self) -> None:
        """Adds the operators since the last word as one word, if there are any."""
        if self._operators:
            self._words.append(Worked(tuple(self._operators)))
            self._operators = []
