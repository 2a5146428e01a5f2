"""Estimates the memory and the work of a run's ranks by running the steps of these ranks on tensors without values.

plan ──draft──> stages ──fork──> the first rank of a stage

fake world ──> assemble ──> first step ──> second ──> third: the curve, and the recording
                            creates optimizer states, learns the order of exchanges

All ranks of a stage need the same amount of memory. Stages with equal work share one recorded step.
"""

import gc
import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from sley_core.actions.action import Action, Kind, Step
from sley_core.actions.simulate import Costs, Peaks, compute_peaks
from sley_core.comm.exchanges import BEGINNING
from sley_core.comm.world import World
from sley_core.errors import RunError, SleyError
from sley_core.memory import PARTS
from sley_core.model.layers import Layer
from sley_core.model.tensors import assume_device_type, estimate_bytes
from sley_core.plan.check import require_valid
from sley_core.plan.plan import Plan, iterate_values
from sley_core.topology import Topology
from sley_estimate.bytes.fake_tensors import FakeTensors, Ledger, StageTooLargeError, StepPosition
from sley_estimate.bytes.fake_world import FakeDevice, StepSimulation, meta_outputs
from sley_estimate.layers.operators import imitate_cuda
from sley_estimate.layers.trace import layer_keys
from sley_estimate.step.record import RankRecord, Recording
from sley_trainer.assemble import Draft, assemble, build_draft, weight_dtypes
from sley_trainer.run import Run
from sley_trainer.stepper import ActionLists
from train_cli.main import disable_gc
from train_cli.meta_model import meta_micro_batch, micro_batch

STEPS = 3
"""The number of steps that an estimate runs. The first step creates the optimizer states. Steps before the last have as few
microbatches as possible. If the first step has the highest peak, all steps run again, and the first is as long as the last.
"""

OPTIMIZER_PARTS = frozenset(("masters", "optimizer_states"))  # memory that is on the host if the optimizer runs there
BATCHES = 2  # the number of batches in memory: the batch of the step, and the next one, which the feed has loaded

MIN_MICROBATCHES = 3
"""The minimum number of microbatches in the last step, which represents longer steps: the first microbatch allocates the
gradients, the last one reduces them, and one runs in between."""

MIN_MICROBATCHES_BETWEEN_STAGES = 12
"""The minimum number of microbatches in the last step if stages exchange messages. They suffice to fill a link, which allows
eight pending messages, while further messages are written and used."""


@dataclass(frozen=True)
class RankBytes:
    """The memory of rank `rank` on its device, in bytes. states: the memory of each part of the run between two steps. batch:
    the memory of the samples of two batches on a CPU, which are not in fake tensors; 0 on CUDA. peak: the peak, reached at
    `position`. alive: the memory at the peak by owner, in descending order. curve: (entry, peak bytes) for each entry of the
    step with the peak.
    """

    rank: int
    stage: int
    states: Mapping[str, int]
    batch: int
    peak: int
    position: StepPosition
    alive: Mapping[str, int]
    curve: Sequence[tuple[str, int]]


def run_rank(
    plan: Plan, rank: int, world_size: int, draft: Draft | None = None, max_bytes: float = math.inf
) -> tuple[RankBytes, RankRecord]:
    """Runs steps of rank `rank` in a fake world, without devices or peers. Returns the memory of the rank and the record of its
    last step. draft: the plan's model and stages, which the run consumes; if None, they are built. Raises PlanError for each
    failed check of the plan, RunError `estimate-layer` for a layer that needs values, and StageTooLargeError for a rank that
    needs more than `max_bytes` bytes.
    """
    memory, record, is_exact = _run_steps(plan, rank, world_size, draft, max_bytes, is_first_full=False)
    if memory.position.step == 1 and not is_exact:
        memory, record, _ = _run_steps(plan, rank, world_size, None, max_bytes, is_first_full=True)
    if memory.peak > max_bytes:
        raise StageTooLargeError(memory.peak)
    return memory, record


def _run_steps(
    plan: Plan, rank: int, world_size: int, draft: Draft | None, max_bytes: float, *, is_first_full: bool
) -> tuple[RankBytes, RankRecord, bool]:
    """Runs `STEPS` steps. Returns the memory, the last step's record, and whether the first step was full, that is, had as many
    microbatches as the last. If it was not full, pools are counted from the start of the first step, since in a long run they
    are already full at the start of a step. is_first_full: whether to make the first step full.
    """
    with fake_run(plan, rank, world_size, draft) as (run, ledger, recording):
        num_plan_microbatches = plan.num_microbatches(run.topology)
        lists, num_last = run.stepper.lists, num_plan_microbatches
        if not run.store.reduction.has_fixed_order:  # in a fixed order, memory for sums grows with the number of microbatches
            num_last = min_equivalent_microbatches(lists, num_plan_microbatches)
        schedulable = (count for count in range(1, num_plan_microbatches) if _schedule_peaks(lists, count) is not None)
        num_min = next(schedulable, num_plan_microbatches)
        num_first = num_last if is_first_full else num_min
        batch = micro_batch(plan, run.dataset)
        is_cuda = plan.run.device == "cuda"
        # An optimizer on the host keeps its master weights and states there. On a CPU, the host's memory is the device's.
        on_host = OPTIMIZER_PARTS if is_cuda and run.stepper.update.masters.device is not None else frozenset[str]()
        batch_bytes = 0 if is_cuda else BATCHES * num_plan_microbatches * sum(value.nbytes for value in batch.values())
        if not on_host:  # otherwise `_set_owners` excludes memory that the ledger has counted
            ledger.max_bytes = max_bytes - batch_bytes
        kernels = imitate_cuda(recording.record_kernel) if is_cuda else nullcontext()
        starts = []
        with estimate_bytes(lambda: ledger.current_bytes), kernels:
            for num_microbatches in (num_first, *[num_min] * (STEPS - 2), num_last):
                starts.append(ledger.num_events)
                if len(starts) == STEPS:
                    recording.begin(run)
                # Each microbatch has its own tensors over the same memory, since layers cache results by tensor.
                take_step(run, [{name: value.detach() for name, value in batch.items()} for _ in range(num_microbatches)])
                _set_owners(run, ledger, on_host)
                gc.collect(0)  # tensors in reference cycles count until the end of the step
            record = recording.end(run)
            # In a long run, pools are full at the start of a step, but first steps with few microbatches do not fill them.
            ledger.backdate(["pools"], starts[0] if num_first < num_last else starts[-1], StepPosition(STEPS, BEGINNING, ""))
        peak, position, allocations = ledger.peak()
        alive = Counter({"batch": batch_bytes} if batch_bytes else {})
        for allocation in allocations:
            # Memory that no part of the run holds is temporary if it is freed in the entry in which it is allocated.
            is_temporary = allocation.free_position is not None and allocation.free_position[:2] == allocation.position[:2]
            alive[allocation.owner or ("temporary buffers" if is_temporary else "activations")] += allocation.num_bytes
        memory = RankBytes(
            rank=rank,
            stage=run.topology.coordinates(rank).stage,
            states={part: 0 if part in on_host else num_bytes for part, num_bytes in run.memory.bytes.items()},
            batch=batch_bytes,
            peak=peak + batch_bytes,
            position=position._replace(entry=str(position.entry)),
            alive=dict(alive.most_common()),
            curve=[(entry, num_bytes + batch_bytes) for entry, num_bytes in ledger.curve(position.step or STEPS)],
        )
        return memory, record, num_first == num_last


@contextmanager
def fake_run(plan: Plan, rank: int, world_size: int, draft: Draft | None = None) -> Iterator[tuple[Run, Ledger, Recording]]:
    """Yields the run of rank `rank` in a fake world, the ledger of its memory, and the recording for a step. The run saves
    nothing. draft: the draft that the run consumes; None builds one. Raises PlanError for each failed check of the plan.
    """
    evaluation = None if plan.evaluation is None else plan.evaluation.model_copy(update={"keep_best": None})
    plan = replace(plan, checkpoint=None, evaluation=evaluation)
    ledger = Ledger()
    is_cuda = plan.run.device == "cuda"
    tensors = FakeTensors(ledger, has_scratch=not is_cuda)
    recording = Recording(tensors)
    device = FakeDevice(torch.device("cpu"), tensors=tensors, recording=recording, runs_ahead=is_cuda)
    device_type = assume_device_type("cuda") if is_cuda else nullcontext()
    world = World.fake(rank, world_size, device, StepSimulation(tensors, recording, "cuda" if is_cuda else "cpu"))
    with disable_gc(), tensors.patch_torch(), device_type, world as joined, assemble(plan, joined, draft=draft) as run:
        progress = run.groups.progress.step_progress
        ledger.locate = lambda: StepPosition(progress.step, progress.current_entry, progress.layer)
        yield run, ledger, recording


def take_step(run: Run, batch: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Runs a step of `run` on the microbatches in `batch`. Raises RunError `estimate-layer` if a layer needs tensor values."""
    try:
        run.step(batch)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        location = "; ".join(getattr(error, "__notes__", [])) or "in a step"
        raise RunError(
            "estimate-layer",
            f"the step reads values of tensors, which the estimate does not have: `{error.func}`, {location}",
            hint="make the shapes of a layer's output depend only on shapes and on the batch, not on values",
        ) from error


def _set_owners(run: Run, ledger: Ledger, on_host: Collection[str]) -> None:
    """Sets the owner of each allocation to the part of the run that holds it. Excludes the parts in `on_host`. This is a
    function so that no variable keeps a tensor alive.
    """
    for part in PARTS:
        for _, tensor in run.memory.inventory.all_tensors(part):
            if part in on_host:
                ledger.exclude(tensor)
            elif (allocation := ledger.live_allocation(tensor)) is not None:
                allocation.owner = allocation.owner or part


def min_equivalent_microbatches(lists: ActionLists, num_microbatches: int) -> int:
    """Returns the smallest number of microbatches, at least MIN_MICROBATCHES or MIN_MICROBATCHES_BETWEEN_STAGES, for which
    the memory peaks of this stage's action list are the same as for `num_microbatches`. Returns at most `num_microbatches`.
    """
    peaks = _schedule_peaks(lists, num_microbatches)
    min_count = MIN_MICROBATCHES if lists.placement.num_positions == 1 else MIN_MICROBATCHES_BETWEEN_STAGES
    return next(
        (count for count in range(min_count, num_microbatches) if _schedule_peaks(lists, count) == peaks), num_microbatches
    )


def _schedule_peaks(lists: ActionLists, num_microbatches: int) -> Peaks | None:
    """Returns the memory peaks of this stage, or None if the schedule does not support `num_microbatches`."""
    try:
        steps = lists.training_list(num_microbatches)
    except SleyError:
        return None
    positions = lists.placement.num_positions
    # Sizes of a graph, a deferred weight gradient and a message, such that different counts have different sums.
    costs = replace(
        Costs.uniform(positions),
        graph_bytes=(1009,) * positions,
        queued_bytes=(499,) * positions,
        boundary_bytes=(11,) * (positions - 1),
    )
    return compute_peaks(steps, lists.stage, lists.placement, costs)


T = TypeVar("T")

MAX_UNFORKED_STAGES = 2  # up to this number of stages run in this process, since forking takes longer


def build_rank0_draft(plan: Plan, world_size: int) -> Draft:
    """Returns rank 0's draft: model and stages. Raises PlanError for each failed check, and the errors of `build_draft`."""
    require_valid(plan, world_size)
    with World.fake(0, world_size) as world:
        return build_draft(plan, world)


def stage_bytes(plan: Plan, world_size: int, cores: int = 1) -> list[RankBytes]:
    """Returns the estimated memory of the first rank of each stage, computed in `cores` processes. Raises the errors of
    `run_stages`.
    """
    draft, stages = build_rank0_draft(plan, world_size), range(plan.topology(world_size).pp)
    return [memory for memory, _ in run_stages(plan, world_size, stages, draft, cores)]


def run_stages(
    plan: Plan, world_size: int, stages: Sequence[int], draft: Draft, cores: int, *, max_bytes: float = math.inf
) -> list[tuple[RankBytes, RankRecord]]:
    """Runs the steps of the first rank of each stage in `stages`. Returns the memory and the record of each rank, in order.
    draft: the draft of rank 0, which is not consumed. cores: the number of parallel processes. Raises the errors of `run_rank`
    and `run_calls`, and StageTooLargeError for a stage whose peak exceeds `max_bytes`.
    """
    ranks_per_stage = plan.topology(world_size).ranks_per_stage

    def estimate_stage(stage: int) -> tuple[RankBytes, RankRecord]:
        with World.fake(0, world_size) as world:
            stage_draft = build_draft(plan, world)  # a run consumes its draft, but the action lists are shared
        stage_draft = replace(stage_draft, stage=replace(stage_draft.stage, action_lists=draft.stage.action_lists))
        return run_rank(plan, stage * ranks_per_stage, world_size, stage_draft, max_bytes)

    calls = [partial(estimate_stage, stage) for stage in stages]
    results = dict(run_calls(calls, cores if len(calls) > MAX_UNFORKED_STAGES else 1))
    return [results[index] for index in range(len(calls))]


def stage_work_keys(plan: Plan, topology: Topology, draft: Draft) -> list[Hashable]:
    """Returns one key per stage. Stages with equal keys do equal work in an action: they have equal layers that no name or
    pattern in the plan tells apart, equal messages, and no tied weights. Raises RunError `estimate-layer` for a layer that
    cannot run on meta.
    """
    if topology.pp == 1:
        return [0]
    model, stage = draft.model, draft.stage
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, meta_micro_batch(plan, draft.dataset))
    patterns = _matching_patterns(plan, model.layers)
    layer_key = {layer.name: (key, patterns[layer.name]) for layer, key in zip(model.layers, keys, strict=True)}
    layers_by_position = [tuple(layer_key[layer.name] for layer in layers) for _, layers in stage.layers_by_position]
    outputs = [*map(repr, meta_outputs(plan, stage, draft.dataset, weight_dtypes(plan)[0])), None]
    tied = {number for stages in stage.tied_stages for number in stages}
    placement = stage.action_lists.placement
    stage_keys: list[Hashable] = []
    for number in range(topology.pp):
        positions = [placement.position(number, chunk) for chunk in range(placement.chunks)]
        chunks = tuple(
            (position and outputs[position - 1], layers_by_position[position], outputs[position]) for position in positions
        )
        stage_keys.append((chunks, number if number in tied else None))
    return stage_keys


def representative_stages(plan: Plan, topology: Topology, draft: Draft) -> list[int]:
    """Returns for each stage the stage that represents it. Of all stages with the same work, the one with the most pending
    forwards represents them, since it needs the most memory. Raises the errors of `stage_work_keys`.
    """
    lists, keys = draft.stage.action_lists, stage_work_keys(plan, topology, draft)
    num_microbatches = min_equivalent_microbatches(lists, plan.num_microbatches(topology))
    pending_forwards = [max_pending_forwards(steps) for steps in lists.lower_all_stages(num_microbatches)]
    by_key: dict[Hashable, int] = {}
    for stage in sorted(range(topology.pp), key=lambda stage: -pending_forwards[stage]):
        by_key.setdefault(keys[stage], stage)
    return [by_key[key] for key in keys]


def max_pending_forwards(steps: Sequence[Step]) -> int:
    """Returns the maximum number of pending forwards in `steps`. A forward is pending until all its gradients are computed."""
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRADIENT: -1}
    return max(accumulate((changes.get(step.kind, 0) for step in steps if isinstance(step, Action)), initial=0))


def _matching_patterns(plan: Plan, layers: Sequence[Layer]) -> dict[str, Hashable]:
    """Returns for each layer, by name, the pairs of a text in the plan and a name in the layer that matches this text."""
    values = (value if isinstance(value, list) else [value] for _, value in iterate_values(plan.tables))
    patterns = {text for texts in values for text in texts if isinstance(text, str)}
    return {
        layer.name: frozenset(
            (pattern, name.removeprefix(layer.name))
            for named in (layer.module.named_modules, layer.module.named_parameters)
            for name, _ in named(prefix=layer.name)
            for pattern in patterns
            if fnmatchcase(name, pattern)
        )
        for layer in layers
    }


def can_run_backward_in_fork() -> bool:
    """Returns whether a forked child of this process can run a backward. It cannot if this process has already run one."""
    try:
        list(_run_forked([lambda: torch.ones(1, requires_grad=True).sum().backward()], 1))  # type: ignore[no-untyped-call]
    except (RuntimeError, RunError):
        return False
    return True


def run_calls(calls: Sequence[Callable[[], T]], num_processes: int) -> Iterator[tuple[int, T]]:
    """Yields (index, result) of each call when it completes. Calls run in `num_processes` forked processes, so results must be
    picklable; they run in this process if `num_processes` is 1 or if forked processes could not run a backward. Raises the
    errors of the calls, and RunError `estimate-ended` if a process exits before its call is done.
    """
    if num_processes == 1 or not can_run_backward_in_fork():
        return ((index, call()) for index, call in enumerate(calls))
    return _run_forked(calls, num_processes)


def _run_forked(calls: Sequence[Callable[[], T]], num_processes: int) -> Iterator[tuple[int, T]]:
    """Yields (index, result) of each call when the call completes in one of `num_processes` forked processes."""
    with FakeTensors(Ledger()):
        torch.empty(2).add_(1)  # imports parts of torch once, instead of in every forked process
    pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork"), _start_worker, (calls,))
    try:
        indices = {pool.submit(_run_call, index): index for index in range(len(calls))}
        for future in as_completed(indices):
            yield indices[future], future.result()
    except BrokenProcessPool:
        message = "a process that simulated the steps of a stage ended unexpectedly"
        hint = "use a machine with more memory, since the operating system kills processes if memory runs out"
        raise RunError("estimate-ended", message, hint=hint) from None
    finally:
        pool.shutdown(cancel_futures=True)


_calls: Sequence[Callable[[], Any]] = ()
"""The calls that a forked process may run. The process inherits them, since they cannot be pickled."""


def _start_worker(calls: Sequence[Callable[[], Any]]) -> None:
    """Prepares a forked process to run `calls`, of which `_run_call` then runs one at a time."""
    global _calls
    _calls = calls
    gc.freeze()  # otherwise the garbage collector would write to inherited pages, and so copy them
    torch.set_num_threads(1)  # forked processes do not inherit OpenMP's threads


def _run_call(index: int) -> Any:
    return _calls[index]()
