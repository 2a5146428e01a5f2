"""Finds what one rank of a run holds, step by step, by taking its own steps on tensors without values.

fake world ──> assemble ──> first step ──> second ──> third: the curve
                             states are made, orders are learned
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from sley_core.assemble import assemble
from sley_core.comm.progress import BEGINNING
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.memory.state import PARTS
from sley_core.model.tensors import counted, standing_for
from sley_estimate.bytes.cuda_kernels import as_on_cuda
from sley_estimate.bytes.cycles import MemoryCycles, collected, only_new_objects
from sley_estimate.bytes.fake_copies import FakeCopies
from sley_estimate.bytes.fake_device import FakeDevice
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.ledger import Ledger, MemoryPiece, StepPlace
from sley_estimate.bytes.limited import limited
from sley_estimate.bytes.micros import fewest_micros, least_micros
from sley_estimate.bytes.recipes import Recipes
from sley_estimate.bytes.simulation import TakenSteps
from sley_estimate.bytes.standing import RunStanding
from sley_estimate.layers.fused import Notes
from train_cli.on_meta import micro_batch

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.assemble import Draft
    from sley_core.plan.plan import Plan
    from sley_core.run import Run

STEPS = 3
"""Optimizer states come in the first; buckets lie in the order that it showed from the second on. Both take as few
micro-batches as the schedule allows, the first only while its peak is below that of the third: states that come may be there
twice, and pools that more micro-batches fill are there beside them.
"""

KEPT = ("pools", "messages")
"""Parts that a long run has had from a step's start: the first steps of few micro-batches have not filled them."""

STEPPED = frozenset(("masters", "optimizer_states"))
"""What an optimizer has that steps on the host."""

BATCHES = 2
"""The one that is trained on, and the one that the feed has ready."""


@dataclass(frozen=True)
class Moment:
    """One entry of the step's list, and the most bytes that were there at once while it ran."""

    entry: str
    num_bytes: int


@dataclass(frozen=True)
class RankBytes:
    """What rank `rank` of stage `stage` holds, in bytes of its device.

    states: by part of the run, between two steps. batch: of samples, where they lie on the device. peak: the most at once;
    place: when that was. alive: what was there then, by whose it is. curve: the step with the peak, entry by entry: the
    first, or one as all that follow. num_micros: how many micro-batches were taken, of the plan's `of_micros`; more would not
    change the peak. cycles: what layers left in reference cycles, counted to the step's end: a run holds them until Python's
    collector comes, so less or more. None, as it should be, if they left nothing.
    """

    rank: int
    stage: int
    states: Mapping[str, int]
    batch: int
    peak: int
    place: StepPlace
    alive: Mapping[str, int]
    curve: Sequence[Moment]
    num_micros: int
    of_micros: int
    cycles: MemoryCycles | None = None


class LastStep(Notes, Protocol):
    """Writes down the last step of a fake run; what it is told to note before that it ignores."""

    def follow(self, run: Run, tensors: FakeTensors) -> None:
        """Hears from now on what `run`, which has taken no step yet, exchanges. May be called again, with another run."""

    def begin(self) -> None:
        """Writes from now on: the last step begins."""

    def end(self) -> None:
        """Stops to write: it is over."""


def rank_bytes(
    plan: Plan,
    rank: int,
    size: int,
    recipes: Recipes | None = None,
    draft: Draft | None = None,
    last_step: LastStep | None = None,
) -> RankBytes:
    """Returns the bytes that rank `rank` of `size` holds, from steps that it takes in a fake world: no devices, no peers.

    recipes: what operations made on ranks of this plan that were asked before, which saves time; what is learned is added to
    it. draft: the plan's model and stages, if they are known, which are used up; else they are made. last_step: writes down the
    last of the steps, which is as all that follow. Raises PlanError for all that the plan's checks find, RunError
    `estimate-layer` for a layer that needs values, `estimate-late` once `limits.estimate_timeout_s` has passed.
    """
    recipes = recipes or Recipes()
    found, is_exact = _looked_at(plan, rank, size, recipes, draft, last_step, is_first_whole=False)
    if found.place.step == 1 and not is_exact:
        found, _ = _looked_at(plan, rank, size, recipes, None, last_step, is_first_whole=True)
    return found


def _looked_at(
    plan: Plan, rank: int, size: int, recipes: Recipes, draft: Draft | None, last_step: LastStep | None, *, is_first_whole: bool
) -> tuple[RankBytes, bool]:
    """Takes `STEPS` steps in a fake run; returns what rank `rank` holds, and whether the first step took as many micro-batches
    as the last, which takes as many as show a step's peak.

    is_first_whole: let it; else it takes as few as the schedule allows, and what a long run keeps counts as there from its
    start: the peak is then not below the true one.
    """
    with fake_run(plan, rank, size, recipes, draft) as (run, ledger, tensors):
        if last_step is not None:
            last_step.follow(run, tensors)
        of_micros = plan.num_micros(run.topology)
        has_tree = run.store.reduction.fixed_order  # of sums, which grows with the number of micro-batches
        taken = of_micros if has_tree else fewest_micros(run.stepper.lists, of_micros)
        batch = micro_batch(plan, run.dataset)
        few = least_micros(run.stepper.lists, of_micros)
        first = taken if is_first_whole else few
        is_cuda = plan.run.device == "cuda"
        with counted(lambda: ledger.now), as_on_cuda(last_step) if is_cuda else nullcontext():
            starts = []
            for num_micros in (first, *[few] * (STEPS - 2), taken):
                starts.append(ledger.num_events)
                if last_step is not None and len(starts) == STEPS:
                    last_step.begin()
                take_step(run, [_again(batch) for _ in range(num_micros)])
                _own(run, ledger, _on_host(plan, run))
                cycles = collected(ledger, len(starts))
            if last_step is not None:
                last_step.end()
            long_since = starts[0] if first < taken else starts[-1]
            ledger.move_up(KEPT, long_since, StepPlace(STEPS, BEGINNING, ""))
        held = 0 if is_cuda else BATCHES * of_micros * sum(value.nbytes for value in batch.values())
        told = _told(run, ledger, held, taken, of_micros, _on_host(plan, run))
        return replace(told, cycles=cycles), first == taken


@contextmanager
def fake_run(
    plan: Plan,
    rank: int,
    size: int,
    recipes: Recipes | None = None,
    draft: Draft | None = None,
    *,
    runs_ahead: bool | None = None,
) -> Iterator[tuple[Run, Ledger, FakeTensors]]:
    """Yields the run of rank `rank` of `size`, assembled in a fake world, the ledger that counts its memory, and the mode that
    makes its tensors, which have no values. The run is closed after the block.

    recipes: what operations make, remembered; added to. draft: the plan's model and stages, if they are known. runs_ahead:
    whether copies to the host run beside the device's work, as on CUDA; None: as on the plan's device.

    Raises PlanError for all that the plan's checks find, and in the block RunError `estimate-late` once
    `limits.estimate_timeout_s` has passed.
    """
    standing = RunStanding()
    ledger = Ledger(standing.place)
    is_cuda = plan.run.device == "cuda"
    tensors = FakeTensors(ledger, recipes or Recipes(), has_scratch=not is_cuda)
    is_ahead = is_cuda if runs_ahead is None else runs_ahead
    copies = FakeCopies(tensors, runs_ahead=is_ahead)
    device = FakeDevice(torch.device("cpu"), tensors=tensors, copies=copies)
    limit = limited(plan.limits.estimate_timeout_s)
    on_device = standing_for("cuda") if is_ahead else nullcontext()
    world_of = World.fake(rank, size, device, TakenSteps(tensors, "cuda" if is_cuda else "cpu"))
    with only_new_objects(), limit, tensors.watched(), on_device, world_of as world, assemble(plan, world, draft=draft) as run:
        standing.follow(run)
        yield run, ledger, tensors


def take_step(run: Run, batch: Sequence[Mapping[str, Tensor]]) -> None:
    """Takes a step of a fake run on `batch`, a mapping for each micro-batch.

    Raises RunError `estimate-layer`, which names operator and place, where the step needs the values of a tensor.
    """
    try:
        run.step(batch)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        where = "; ".join(getattr(error, "__notes__", [])) or "in a step"
        raise RunError(
            "estimate-layer",
            f"without the values of its tensors the step cannot be taken: `{error.func}` asks for them, {where}",
            hint="what a layer makes must follow from the shapes of what it is given, and from the batch",
        ) from error


def _again(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the micro-batch in new tensors over the same memory: what layers keep of a tensor they keep of each."""
    return {name: value.detach() for name, value in batch.items()}


def _on_host(plan: Plan, run: Run) -> frozenset[str]:
    """Returns the parts of the run whose memory is the host's and not the device's: the optimizer's on CUDA if it steps on the
    host; else none, and on a CPU never any.
    """
    is_elsewhere = plan.run.device == "cuda" and run.stepper.update.masters.home is not None
    return STEPPED if is_elsewhere else frozenset()


def _told(run: Run, ledger: Ledger, batch: int, num_micros: int, of_micros: int, on_host: Collection[str]) -> RankBytes:
    """Returns what the ledger counted, as bytes of the run's rank at its peak.

    batch: bytes of samples on a CPU, which are added to the peak, to every moment and to what was alive. on_host: parts that
    count as 0 bytes.
    """
    peak, at = ledger.peak()
    place = ledger.place_at(at)
    alive = Counter({"batch": batch} if batch else {})
    for piece in ledger.alive_at(at):
        alive[piece.owner or _kind(piece)] += piece.num_bytes
    return RankBytes(
        run.world.rank,
        run.topology.coordinates(run.world.rank).stage,
        {part: 0 if part in on_host else num_bytes for part, num_bytes in run.memory.bytes.items()},
        batch,
        peak + batch,
        place,
        dict(alive.most_common()),
        [Moment(entry, num_bytes + batch) for entry, num_bytes in ledger.curve(place.step or STEPS)],
        num_micros,
        of_micros,
    )


def _own(run: Run, ledger: Ledger, on_host: Collection[str]) -> None:
    """Notes in each piece that is there between two steps which part of the run has it, unless it has an owner; takes the
    memory of parts `on_host` off all counts.
    """
    for part in PARTS:
        for _, tensor in run.memory.holdings.everything(part):
            if part in on_host:
                ledger.forgo(tensor)
            elif (piece := ledger.piece_of(tensor)) is not None:
                piece.owner = piece.owner or part


def _kind(piece: MemoryPiece) -> str:
    """Returns what a piece is that no part of the run keeps: "temporary buffers" if it ends in the step and entry that made it,
    else "activations".
    """
    if piece.ended is not None and piece.ended[:2] == piece.place[:2]:
        return "temporary buffers"
    return "activations"
