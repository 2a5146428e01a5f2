"""What one rank of a run holds, step by step, by taking its own steps on tensors without values.

fake world ──> assemble ──> first step ──> second ──> third: the curve, and the recording
                            states are made, orders are learned
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from sley_core.actions.simulate import Costs, Peaks, compute_peaks
from sley_core.assemble import Draft, assemble
from sley_core.comm.progress import BEGINNING
from sley_core.comm.world import World
from sley_core.engine.stage import Lists
from sley_core.errors import RunError, SleyError
from sley_core.memory.state import PARTS
from sley_core.model.tensors import counted, standing_for
from sley_core.plan.plan import Plan
from sley_core.process import disable_gc
from sley_core.run import Run
from sley_estimate.bytes.fake_tensors import FakeTensors, Recipes
from sley_estimate.bytes.fake_world import FakeCopies, FakeDevice, TakenSteps
from sley_estimate.bytes.ledger import Ledger, MemoryPiece, StepPlace, StepProgress
from sley_estimate.layers.operators import as_on_cuda
from sley_estimate.step.record import Recording
from train_cli.on_meta import micro_batch

STEPS = 3
"""Optimizer states come in the first; buckets have their final order from the second on. Both take as few micro-batches as the
schedule allows, the first only while its peak is below that of the third: states that come may be there twice, beside pools
that more micro-batches fill.
"""

POOLED = ("pools", "messages")
"""Parts that a long run has from a step's start; first steps of few micro-batches do not fill them."""

STEPPED = frozenset(("masters", "optimizer_states"))  # parts of an optimizer that may step on the host
BATCHES = 2  # the one that is trained on, and the one that the feed has ready

LEAST_MICROS = 3
"""The first, those in between, the last: gradients come with the first, and are reduced with the last."""

LEAST_BETWEEN_STAGES = 12
"""A link may have eight messages under way that nothing waits for, while one is written, one is used and one is expected."""


@dataclass(frozen=True)
class RankBytes:
    """What rank `rank` of stage `stage` holds, in bytes of its device.

    states: by part, between two steps. batch: of samples on the device. peak: the most at once, at `place`; alive: its parts,
    by owner. curve: (entry, most bytes) of the step with the peak, the first or a later one. num_micros: micro-batches taken,
    of the plan's of_micros; more would not change the peak.
    """

    rank: int
    stage: int
    states: Mapping[str, int]
    batch: int
    peak: int
    place: StepPlace
    alive: Mapping[str, int]
    curve: Sequence[tuple[str, int]]
    num_micros: int
    of_micros: int


def rank_bytes(
    plan: Plan,
    rank: int,
    size: int,
    recipes: Recipes | None = None,
    draft: Draft | None = None,
    recording: Recording | None = None,
) -> RankBytes:
    """Returns the bytes of rank `rank` of `size`, from steps in a fake world; needs no devices and no peers.

    recipes: results of operations of other ranks of this plan; added to. draft: the plan's model and stages, which is used up.
    recording: records the last step. Raises PlanError for all that the plan's checks find, RunError `estimate-layer` for a
    layer that needs values, `estimate-late` after `limits.estimate_timeout_s`.
    """
    recipes = recipes or Recipes()
    result, is_exact = _steps_taken(plan, rank, size, recipes, draft, recording, is_first_whole=False)
    if result.place.step == 1 and not is_exact:
        result, _ = _steps_taken(plan, rank, size, recipes, None, recording, is_first_whole=True)
    return result


def _steps_taken(
    plan: Plan,
    rank: int,
    size: int,
    recipes: Recipes,
    draft: Draft | None,
    recording: Recording | None,
    *,
    is_first_whole: bool,
) -> tuple[RankBytes, bool]:
    """Takes `STEPS` steps; returns the bytes, and whether the first step had as many micro-batches as the last. is_first_whole:
    makes it so; else it has few, and pools count from its start, so that the peak is not below the true one.
    """
    with fake_run(plan, rank, size, recipes, draft) as (run, ledger, tensors):
        if recording is not None:
            recording.follow(run, tensors)
        of_micros = plan.num_micros(run.topology)
        has_tree = run.store.reduction.fixed_order  # of sums, which grows with the number of micro-batches
        micros = of_micros if has_tree else fewest_micros(run.stepper.lists, of_micros)
        few = least_micros(run.stepper.lists, of_micros)
        first = micros if is_first_whole else few
        batch = micro_batch(plan, run.dataset)
        is_cuda = plan.run.device == "cuda"
        # Masters and states of an optimizer that steps on the host are there, except on a CPU, which is its own host.
        on_host = STEPPED if is_cuda and run.stepper.update.masters.home is not None else frozenset[str]()
        kernels = as_on_cuda(recording.note if recording else None) if is_cuda else nullcontext()
        starts = []
        with counted(lambda: ledger.now), kernels:
            for num_micros in (first, *[few] * (STEPS - 2), micros):
                starts.append(ledger.num_events)
                if recording is not None and len(starts) == STEPS:
                    recording.begin()
                # New tensors over the same memory: layers keep results of each tensor.
                take_step(run, [{name: value.detach() for name, value in batch.items()} for _ in range(num_micros)])
                _set_owners(run, ledger, on_host)
                gc.collect(0)  # reference cycles count to the step's end
            if recording is not None:
                recording.end()
            ledger.date_back(POOLED, starts[0] if first < micros else starts[-1], StepPlace(STEPS, BEGINNING, ""))
        batch_bytes = 0 if is_cuda else BATCHES * of_micros * sum(value.nbytes for value in batch.values())
        peak, place, pieces = ledger.peak()
        alive = Counter({"batch": batch_bytes} if batch_bytes else {})
        for piece in pieces:
            alive[piece.owner or kind_of_piece(piece)] += piece.num_bytes
        result = RankBytes(
            rank=rank,
            stage=run.topology.coordinates(rank).stage,
            states={part: 0 if part in on_host else num_bytes for part, num_bytes in run.memory.bytes.items()},
            batch=batch_bytes,
            peak=peak + batch_bytes,
            place=place,
            alive=dict(alive.most_common()),
            curve=[(entry, num_bytes + batch_bytes) for entry, num_bytes in ledger.curve(place.step or STEPS)],
            num_micros=micros,
            of_micros=of_micros,
        )
        return result, first == micros


@contextmanager
def fake_run(
    plan: Plan, rank: int, size: int, recipes: Recipes | None = None, draft: Draft | None = None
) -> Iterator[tuple[Run, Ledger, FakeTensors]]:
    """Yields the run of rank `rank` of `size` in a fake world, the ledger of its memory, and the mode that makes its tensors.

    Raises PlanError for all that the plan's checks find, and in the block RunError `estimate-late` after
    `limits.estimate_timeout_s`.
    """
    progress = StepProgress()
    ledger = Ledger(progress)
    is_cuda = plan.run.device == "cuda"
    tensors = FakeTensors(ledger, recipes or Recipes(), has_scratch=not is_cuda)
    device = FakeDevice(torch.device("cpu"), tensors=tensors, copies=FakeCopies(tensors, runs_ahead=is_cuda))
    limit = limited(plan.limits.estimate_timeout_s)
    kind = standing_for("cuda") if is_cuda else nullcontext()
    world = World.fake(rank, size, device, TakenSteps(tensors, "cuda" if is_cuda else "cpu"))
    with disable_gc(), limit, tensors.watched(), kind, world as joined, assemble(plan, joined, draft=draft) as run:
        progress.follow(run)
        yield run, ledger, tensors


def take_step(run: Run, batch: Sequence[Mapping[str, Tensor]]) -> None:
    """Takes a step of a fake run on `batch`. Raises RunError `estimate-layer` where it needs the values of a tensor."""
    try:
        run.step(batch)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        where = "; ".join(getattr(error, "__notes__", [])) or "in a step"
        raise RunError(
            "estimate-layer",
            f"without the values of its tensors the step cannot be taken: `{error.func}` asks for them, {where}",
            hint="the output of a layer must follow from the shapes of its input, and from the batch",
        ) from error


def _set_owners(run: Run, ledger: Ledger, on_host: Collection[str]) -> None:
    """Sets the owner of each piece that exists between two steps; takes the memory of parts `on_host` off all counts. Keeps no
    tensor, as a loop in the caller would.
    """
    for part in PARTS:
        for _, tensor in run.memory.inventory.everything(part):
            if part in on_host:
                ledger.move_out(tensor)
            elif (piece := ledger.piece_of(tensor)) is not None:
                piece.owner = piece.owner or part


def kind_of_piece(piece: MemoryPiece) -> str:
    """Returns "temporary buffers" for a piece without owner that ends in the entry that allocated it, else "activations"."""
    is_temporary = piece.ended is not None and piece.ended[:2] == piece.place[:2]
    return "temporary buffers" if is_temporary else "activations"


def fewest_micros(lists: Lists, num_micros: int) -> int:
    """Returns the fewest micro-batches with which this stage's list has the same peaks as with `num_micros`: of pairs in
    flight, graphs, receives, and all together. At least 3, or 12 between stages; `num_micros` if no smaller number will do.
    """
    peaks = _peaks(lists, num_micros)
    least = LEAST_MICROS if lists.placement.num_positions == 1 else LEAST_BETWEEN_STAGES
    for fewer in range(least, num_micros):
        try:
            if _peaks(lists, fewer) == peaks:
                return fewer
        except SleyError:
            continue  # the schedule has no list for so many
    return num_micros


def least_micros(lists: Lists, num_micros: int) -> int:
    """Returns the fewest micro-batches, up to `num_micros`, for which the schedule has a list."""
    for fewer in range(1, num_micros):
        try:
            lists.training(fewer)
        except SleyError:
            continue
        return fewer
    return num_micros


def _peaks(lists: Lists, num_micros: int) -> Peaks:
    positions = lists.placement.num_positions
    # Sizes of a graph, a deferred weight gradient and a message whose sums differ.
    costs = replace(
        Costs.even(positions),
        graph_bytes=(1009,) * positions,
        queued_bytes=(499,) * positions,
        boundary_bytes=(11,) * (positions - 1),
    )
    return compute_peaks(lists.training(num_micros), lists.stage, lists.placement, costs)


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raises RunError `estimate-late` in the block after `limit_s` seconds.

    The system's timer interrupts Python code, and waits that a signal ends. There is no limit outside the main thread, on a
    system without such timers, and if somebody's timer is due before.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    other_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    if 0 < other_s <= limit_s:
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise late_error(limit_s)

    began_s = time.monotonic()
    handler = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if other_s:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, other_s - (time.monotonic() - began_s)), interval_s)


def late_error(limit_s: float) -> RunError:
    return RunError(
        "estimate-late",
        f"the steps of a stage, without values, were not done after {limit_s:g} s",
        hint="`train-cli run --dry-run` takes the same steps: does a layer wait for a lock, a file or a peer? "
        "If it only takes long, raise [limits] estimate_timeout_s",
    )
