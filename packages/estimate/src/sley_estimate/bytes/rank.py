"""Estimates the memory of one rank of a run, step by step, by running its own steps on tensors without values.

fake world ──> assemble ──> first step ──> second ──> third: the curve, and the recording
                            creates states, learns orders
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

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
from sley_core.memory.inventory import PARTS
from sley_core.model.tensors import assume_device_type, estimate_bytes
from sley_core.plan.plan import Plan
from sley_core.run import Run
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.fake_world import FakeCopies, FakeDevice, StepSimulation
from sley_estimate.bytes.ledger import Allocation, Ledger, StepPosition, StepProgress
from sley_estimate.layers.operators import imitate_cuda
from sley_estimate.step.record import Recording
from train_cli.main import disable_gc
from train_cli.meta_model import micro_batch

STEPS = 3
"""The first step creates the optimizer states. The first two have as few microbatches as the schedule allows. The first step is
repeated with more if its peak is the highest: new states may exist twice while more microbatches fill the pools.
"""

OPTIMIZER_PARTS = frozenset(("masters", "optimizer_states"))  # parts of an optimizer that may step on the host
BATCHES = 2  # the batch of the step, and the next batch of the feed

MIN_MICRO_BATCHES = 3
"""The first microbatch, which allocates gradients, a middle one, and the last, which reduces them."""

MIN_MICRO_BATCHES_BETWEEN_STAGES = 12
"""A link may have eight pending messages without a wait, while one is written, one is used and one is expected."""


@dataclass(frozen=True)
class RankBytes:
    """The memory of rank `rank` of stage `stage`, in bytes of its device.

    states: bytes by part between two steps. batch: the bytes of samples on the device. peak: the peak bytes, reached at
    `position`. alive: the peak by owner. curve: (entry, peak bytes) of the step with the peak, which is the first or a later
    one.
    """

    rank: int
    stage: int
    states: Mapping[str, int]
    batch: int
    peak: int
    position: StepPosition
    alive: Mapping[str, int]
    curve: Sequence[tuple[str, int]]


def rank_bytes(plan: Plan, rank: int, size: int, draft: Draft | None = None, recording: Recording | None = None) -> RankBytes:
    """Returns the bytes of rank `rank` of `size` from steps in a fake world. Needs no devices and no peers.

    draft: the plan's model and stages, which the run consumes. recording: records the last step. Raises PlanError for each
    failed check of the plan, and RunError `estimate-layer` for a layer that needs values.
    """
    result, is_exact = _run_steps(plan, rank, size, draft, recording, is_first_full=False)
    if result.position.step == 1 and not is_exact:
        result, _ = _run_steps(plan, rank, size, None, recording, is_first_full=True)
    return result


def _run_steps(
    plan: Plan, rank: int, size: int, draft: Draft | None, recording: Recording | None, *, is_first_full: bool
) -> tuple[RankBytes, bool]:
    """Runs `STEPS` steps. Returns the bytes, and whether the first step had as many microbatches as the last.

    is_first_full: runs the first step with as many microbatches. Otherwise it has few, and pools count from its start, so that
    the peak is not underestimated.
    """
    with fake_run(plan, rank, size, draft) as (run, ledger, tensors):
        if recording is not None:
            recording.follow(run, tensors)
        num_plan_micro_batches = plan.num_micros(run.topology)
        has_reduction_tree = run.store.reduction.fixed_order  # the tree of sums grows with the number of microbatches
        num_last = (
            num_plan_micro_batches
            if has_reduction_tree
            else min_equivalent_micro_batches(run.stepper.lists, num_plan_micro_batches)
        )
        num_min = min_schedulable_micro_batches(run.stepper.lists, num_plan_micro_batches)
        num_first = num_last if is_first_full else num_min
        batch = micro_batch(plan, run.dataset)
        is_cuda = plan.run.device == "cuda"
        # Master weights and states of a host optimizer are on the host, except on a CPU, which is its own host.
        on_host = OPTIMIZER_PARTS if is_cuda and run.stepper.update.masters.device is not None else frozenset[str]()
        kernels = imitate_cuda(recording.record_kernel if recording else None) if is_cuda else nullcontext()
        starts = []
        with estimate_bytes(lambda: ledger.current_bytes), kernels:
            for num_micro_batches in (num_first, *[num_min] * (STEPS - 2), num_last):
                starts.append(ledger.num_events)
                if recording is not None and len(starts) == STEPS:
                    recording.begin()
                # New tensors over the same memory, since layers cache results by tensor.
                take_step(run, [{name: value.detach() for name, value in batch.items()} for _ in range(num_micro_batches)])
                _set_owners(run, ledger, on_host)
                gc.collect(0)  # reference cycles count until the end of the step
            if recording is not None:
                recording.end()
            # A long run has full pools at the start of a step; first steps with few microbatches do not fill them.
            ledger.backdate(["pools"], starts[0] if num_first < num_last else starts[-1], StepPosition(STEPS, BEGINNING, ""))
        batch_bytes = 0 if is_cuda else BATCHES * num_plan_micro_batches * sum(value.nbytes for value in batch.values())
        peak, position, allocations = ledger.peak()
        alive = Counter({"batch": batch_bytes} if batch_bytes else {})
        for allocation in allocations:
            alive[allocation.owner or classify_allocation(allocation)] += allocation.num_bytes
        result = RankBytes(
            rank=rank,
            stage=run.topology.coordinates(rank).stage,
            states={part: 0 if part in on_host else num_bytes for part, num_bytes in run.memory.bytes.items()},
            batch=batch_bytes,
            peak=peak + batch_bytes,
            position=position,
            alive=dict(alive.most_common()),
            curve=[(entry, num_bytes + batch_bytes) for entry, num_bytes in ledger.curve(position.step or STEPS)],
        )
        return result, num_first == num_last


@contextmanager
def fake_run(plan: Plan, rank: int, size: int, draft: Draft | None = None) -> Iterator[tuple[Run, Ledger, FakeTensors]]:
    """Yields the run of rank `rank` of `size` in a fake world, the ledger of its memory, and the mode that makes its tensors.

    Raises PlanError for each failed check of the plan.
    """
    evaluation = None if plan.evaluation is None else plan.evaluation.model_copy(update={"keep_best": None})
    plan = replace(plan, checkpoint=None, evaluation=evaluation)  # steps without values save nothing
    progress = StepProgress()
    ledger = Ledger(progress)
    is_cuda = plan.run.device == "cuda"
    tensors = FakeTensors(ledger, has_scratch=not is_cuda)
    device = FakeDevice(torch.device("cpu"), tensors=tensors, copies=FakeCopies(tensors, runs_ahead=is_cuda))
    device_type = assume_device_type("cuda") if is_cuda else nullcontext()
    world = World.fake(rank, size, device, StepSimulation(tensors, "cuda" if is_cuda else "cpu"))
    with disable_gc(), tensors.patch_torch(), device_type, world as joined, assemble(plan, joined, draft=draft) as run:
        progress.follow(run)
        yield run, ledger, tensors


def take_step(run: Run, batch: Sequence[Mapping[str, Tensor]]) -> None:
    """Runs a step of a fake run on `batch`. Raises RunError `estimate-layer` if the step needs the values of a tensor."""
    try:
        run.step(batch)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        location = "; ".join(getattr(error, "__notes__", [])) or "in a step"
        raise RunError(
            "estimate-layer",
            f"the step reads values of tensors, which the estimate does not have: `{error.func}`, {location}",
            hint="compute the output of a layer only from the shapes of its input and from the batch",
        ) from error


def _set_owners(run: Run, ledger: Ledger, on_host: Collection[str]) -> None:
    """Sets the owner of each allocation that exists between two steps, and excludes the memory of the parts `on_host`. Keeps no
    reference to a tensor, unlike a loop in the caller.
    """
    for part in PARTS:
        for _, tensor in run.memory.inventory.all_tensors(part):
            if part in on_host:
                ledger.exclude(tensor)
            elif (allocation := ledger.live_allocation(tensor)) is not None:
                allocation.owner = allocation.owner or part


def classify_allocation(allocation: Allocation) -> str:
    """Returns "temporary buffers" for memory that is freed in the entry that allocated it, else "activations". The allocation
    has no owner.
    """
    is_temporary = allocation.free_position is not None and allocation.free_position[:2] == allocation.position[:2]
    return "temporary buffers" if is_temporary else "activations"


def min_equivalent_micro_batches(lists: Lists, num_micro_batches: int) -> int:
    """Returns the smallest number of microbatches with the same peaks of this stage's list as `num_micro_batches`: of pending
    pairs, graphs and receives, and in total. Returns at least 3, or 12 between stages, and `num_micro_batches` if no
    smaller number has the same peaks.
    """
    peaks = _peaks(lists, num_micro_batches)
    min_count = MIN_MICRO_BATCHES if lists.placement.num_positions == 1 else MIN_MICRO_BATCHES_BETWEEN_STAGES
    for count in range(min_count, num_micro_batches):
        try:
            if _peaks(lists, count) == peaks:
                return count
        except SleyError:
            continue  # the schedule has no list for this number
    return num_micro_batches


def min_schedulable_micro_batches(lists: Lists, num_micro_batches: int) -> int:
    """Returns the smallest number of microbatches, up to `num_micro_batches`, for which the schedule has a list."""
    for count in range(1, num_micro_batches):
        try:
            lists.training(count)
        except SleyError:
            continue
        return count
    return num_micro_batches


def _peaks(lists: Lists, num_micro_batches: int) -> Peaks:
    positions = lists.placement.num_positions
    # Sizes of a graph, a deferred weight gradient and a message with distinct sums.
    costs = replace(
        Costs.even(positions),
        graph_bytes=(1009,) * positions,
        queued_bytes=(499,) * positions,
        boundary_bytes=(11,) * (positions - 1),
    )
    return compute_peaks(lists.training(num_micro_batches), lists.stage, lists.placement, costs)
