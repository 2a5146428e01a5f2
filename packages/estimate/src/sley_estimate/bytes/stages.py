"""Estimates the memory and the work of the stages of a run, from one rank per distinct stage, in parallel processes if useful.

plan ──draft──> distinct stages ──fork──> first rank of a stage: bytes, and its recorded step
                                ──fork──> the next stage, with the cached results of operations

All ranks of a stage need equal memory.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import accumulate, islice
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

import torch

from sley_core.actions.action import Action, Kind, Step
from sley_core.assemble import Draft, build_draft, weight_dtypes
from sley_core.comm.world import World
from sley_core.engine.stage import Lists, Stage
from sley_core.errors import PlanError, RunError
from sley_core.model.layers import Layer
from sley_core.plan.check import check_plan
from sley_core.plan.plan import Plan
from sley_core.plan.write import iterate_values
from sley_core.topology import Topology
from sley_estimate.bytes.fake_tensors import FakeTensors, OpResultCache
from sley_estimate.bytes.fake_world import meta_outputs
from sley_estimate.bytes.ledger import Ledger, StepPosition
from sley_estimate.bytes.rank import RankBytes, min_equivalent_micro_batches, min_schedulable_micro_batches, rank_bytes
from sley_estimate.layers.variants import layer_keys
from sley_estimate.step.record import RankRecord, Recording
from train_cli.meta_model import meta_micro_batch

T = TypeVar("T")

MAX_UNFORKED_RANKS = 2  # up to this number, ranks run in this process, since a fork does not pay off


def build_first_draft(plan: Plan, size: int) -> Draft:
    """Returns the draft of the first of `size` ranks. Raises PlanError for each failed check of the plan, and the errors of
    `build_draft`.
    """
    if problems := check_plan(plan, size):
        raise PlanError.from_diagnostics(problems)
    with World.fake(0, size) as world:
        return build_draft(plan, world)


def stage_bytes(plan: Plan, size: int, cores: int = 1) -> list[RankBytes]:
    """Returns the bytes of the first rank of each stage, the largest of its stage. Raises the errors of `build_first_draft` and
    `rank_bytes`.
    """
    return [memory for memory, _ in estimate_stages(plan, size, cores, build_first_draft(plan, size), records=False)]


def estimate_stages(
    plan: Plan, size: int, cores: int, draft: Draft, *, records: bool
) -> list[tuple[RankBytes, RankRecord | None]]:
    """Returns the bytes of the first rank of each stage. With `records` also returns the recorded step of the first stage with
    equal work.
    """
    topology = plan.topology(size)
    keys = stage_memory_keys(plan, topology, draft)
    first_stages = sorted({keys.index(key) for key in keys})
    first_results = dict(zip(first_stages, take_steps(plan, size, first_stages, cores, draft, records=records), strict=True))
    stages = ((number, *first_results[keys.index(key)]) for number, key in enumerate(keys))
    return [(_relabel_stage(memory, draft.stage.for_stage(number), topology), record) for number, memory, record in stages]


def take_steps(
    plan: Plan,
    size: int,
    stages: Sequence[int],
    cores: int,
    draft: Draft,
    *,
    records: bool,
    result_cache: OpResultCache | None = None,
    max_bytes: int | None = None,
) -> list[tuple[RankBytes, RankRecord | None]]:
    """Runs the steps of the first rank of each of `stages`. Returns their bytes, and with `records` their recorded steps, in
    order.

    cores: the number of parallel processes. Processes are forked if there are more than `MAX_UNFORKED_RANKS` cores and stages.
    draft: is not consumed. result_cache: new results are added. max_bytes: in this process, stops after a stage that needs more
    bytes. Raises the errors of `rank_bytes` and `run_forked`.
    """
    ranks = [stage * plan.topology(size).ranks_per_stage for stage in stages]
    result_cache = result_cache or OpResultCache()

    def estimate_rank(rank: int, rank_draft: Draft) -> tuple[RankBytes, RankRecord | None, OpResultCache]:
        recording = Recording() if records else None
        memory = rank_bytes(plan, rank, size, result_cache, rank_draft, recording)
        return memory, recording.record if recording else None, result_cache

    if min(len(ranks), cores + 1) <= MAX_UNFORKED_RANKS or not can_fork():
        result = []
        for rank in ranks:
            rank_draft = build_first_draft(plan, size)  # a run consumes its draft; the slower lowered lists are shared
            result.append(
                estimate_rank(rank, replace(rank_draft, stage=replace(rank_draft.stage, lists=draft.stage.lists)))[:2]
            )
            if max_bytes is not None and result[-1][0].peak > max_bytes:
                break
        return result
    by_number: dict[int, tuple[RankBytes, RankRecord | None]] = {}
    calls = [partial(estimate_rank, rank, draft) for rank in ranks]
    for number, (memory, record, rank_cache) in run_forked(calls, cores):
        result_cache.merge(rank_cache)
        by_number[number] = memory, record
    return [by_number[number] for number in range(len(ranks))]


def _relabel_stage(memory: RankBytes, stage: Stage, topology: Topology) -> RankBytes:
    """Returns the bytes of a rank as those of `stage`, which needs equal memory. Only numbers and names change."""
    number, estimated_stage = stage.lists.stage, stage.for_stage(memory.stage)
    layers = {estimated.name: relabeled.name for estimated, relabeled in zip(estimated_stage.layers, stage.layers, strict=True)}
    lists = (estimated_stage.lists.training(memory.num_micro_batches), stage.lists.training(memory.num_micro_batches))
    entries = {str(estimated): str(relabeled) for estimated, relabeled in zip(*lists, strict=True)}
    step, entry, layer = memory.position
    return replace(
        memory,
        stage=number,
        rank=number * topology.ranks_per_stage,
        position=StepPosition(step, entries.get(entry, entry), layers.get(layer, layer)),
        curve=[(entries.get(entry, entry), num_bytes) for entry, num_bytes in memory.curve],
    )


def stage_memory_keys(plan: Plan, topology: Topology, draft: Draft) -> list[Hashable]:
    """Returns one key per stage; stages with equal keys need equal memory. Raises the errors of `stage_work_keys`."""
    lists, num_plan_micro_batches = draft.stage.lists, plan.num_micros(topology)
    work_keys = stage_work_keys(plan, topology, draft)
    return (
        [(work_key, _list_key(lists.for_stage(number), num_plan_micro_batches)) for number, work_key in enumerate(work_keys)]
        if topology.pp > 1
        else work_keys
    )


def stage_work_keys(plan: Plan, topology: Topology, draft: Draft) -> list[Hashable]:
    """Returns one key per stage; stages with equal keys do equal work in an action. They have equal layers that no name or
    pattern in the plan distinguishes, equal messages, and no tie. Raises RunError `estimate-layer` for a layer that cannot run
    on meta.
    """
    if topology.pp == 1:
        return [0]
    model, stage = draft.model, draft.stage
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, meta_micro_batch(plan, draft.dataset))
    patterns = _matching_patterns(plan, model.layers)
    layer_key = {layer.name: (key, patterns[layer.name]) for layer, key in zip(model.layers, keys, strict=True)}
    layers_by_position = [tuple(layer_key[layer.name] for layer in layers) for _, layers in stage.stages]
    outputs = [*map(repr, meta_outputs(plan, stage, draft.dataset, weight_dtypes(plan)[0])), None]
    tied = {number for stages in stage.ties for number in stages}
    placement = stage.lists.placement
    stage_keys: list[Hashable] = []
    for number in range(topology.pp):
        positions = [placement.position(number, chunk) for chunk in range(placement.chunks)]
        chunks = tuple(
            (position and outputs[position - 1], layers_by_position[position], outputs[position]) for position in positions
        )
        stage_keys.append((chunks, number if number in tied else None))
    return stage_keys


def representative_stages(plan: Plan, topology: Topology, draft: Draft) -> list[tuple[int, ...]]:
    """Returns, for every stage, the stages whose recorded steps give its seconds, nearest first. Raises the errors of
    `stage_work_keys`.

    Among stages with equal work, the representative has the most pending forwards and so the most bytes. With sharded weights
    there is a second representative with the fewest pending forwards: a prefetched gather depends on the next action, and these
    two have nearly all pairs of actions.
    """
    lists = draft.stage.lists
    work_keys, num_micro_batches = (
        stage_work_keys(plan, topology, draft),
        min_equivalent_micro_batches(lists, plan.num_micros(topology)),
    )
    pending_forwards = [max_pending_forwards(steps) for steps in lists.of_all_stages(num_micro_batches)]
    by_key: dict[Hashable, tuple[int, ...]] = {}
    for number in sorted(range(topology.pp), key=lambda stage: (-pending_forwards[stage], stage)):
        representatives = by_key.get(work_keys[number], ())
        by_key[work_keys[number]] = (*representatives[:1], number) if plan.parallel.wp > 1 else representatives or (number,)
    return [tuple(sorted(by_key[key], key=lambda stage: abs(stage - number))) for number, key in enumerate(work_keys)]


def max_pending_forwards(steps: Sequence[Step]) -> int:
    """Returns the largest number of forwards in a stage's list, lowered or not, that wait for their (whole) backward at the
    same time.
    """
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRADIENT: -1}
    return max(accumulate((changes.get(step.kind, 0) for step in steps if isinstance(step, Action)), initial=0))


def _list_key(lists: Lists, num_plan_micro_batches: int) -> Hashable:
    """Returns the action lists of the steps that estimate this stage. A transfer's peer is relative to the stage."""
    counts = {
        min_schedulable_micro_batches(lists, num_plan_micro_batches),
        min_equivalent_micro_batches(lists, num_plan_micro_batches),
    }
    return tuple(
        tuple(step if isinstance(step, Action) else step._replace(peer=step.peer - lists.stage) for step in steps)
        for steps in map(lists.training, sorted(counts))
    )


def _matching_patterns(plan: Plan, layers: Sequence[Layer]) -> dict[str, Hashable]:
    """Returns, for each layer, the strings in the plan that match its modules or parameters, with the name relative to the
    layer.
    """

    def texts(value: object) -> list[str]:
        if isinstance(value, list):
            return [text for item in value for text in texts(item)]
        return [value] if isinstance(value, str) else []

    patterns = {text for _, value in iterate_values(plan.tables) for text in texts(value)}
    return {
        layer.name: frozenset(
            (pattern, name.removeprefix(layer.name))
            for name in [
                *(name for name, _ in layer.module.named_modules(prefix=layer.name)),
                *(name for name, _ in layer.module.named_parameters(prefix=layer.name)),
            ]
            for pattern in patterns
            if fnmatchcase(name, pattern)
        )
        for layer in layers
    }


def can_fork() -> bool:
    """Returns whether a forked process can run a backward. torch refuses this if this process has run a backward."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    try:
        return all(is_done for _, is_done in run_forked([_run_backward], 1))
    except (RuntimeError, RunError):
        return False


@cache
def _import_fake_tensors() -> None:
    """Runs an operation on fake tensors. The first operation imports much of torch, which every forked process would repeat."""
    with FakeTensors(Ledger(lambda: StepPosition(0, "", ""))):
        torch.empty(2).add_(1)


def run_forked(calls: Iterable[Callable[[], T]], num_processes: int) -> Iterator[tuple[int, T]]:
    """Yields the number of each call and its result on completion. Each call runs in a forked process, `num_processes` at a
    time, and is read from `calls` when its process starts.

    Results are pickled. Raises the errors of the calls, and RunError `estimate-ended` if a process exits before its call is
    done. On an error the remaining processes are killed.
    """
    _import_fake_tensors()
    context = multiprocessing.get_context("fork")
    remaining = enumerate(calls)
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while True:
            for number, call in islice(remaining, num_processes - len(running)):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_call, args=(call, sender), daemon=True)
                process.start()
                sender.close()
                running[receiver] = number, process
            if not running:
                return
            for connection in wait(list(running)):
                assert isinstance(connection, Connection), connection
                number, process = running[connection]
                try:
                    is_done, result = cast("tuple[bool, Any]", connection.recv())
                except EOFError:
                    process.join()
                    message = f"a process that simulated the steps of a stage exited with code {process.exitcode}"
                    raise RunError(
                        "estimate-ended",
                        message,
                        hint="use a machine with more memory if the code is -9, since the system then killed the process",
                    ) from None
                process.join()
                if not is_done:
                    raise result
                del running[connection]
                yield number, result
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _run_call(call: Callable[[], Any], sender: Connection) -> None:
    """Runs the call in a forked process with one thread, and sends (True, result) or (False, exception)."""
    gc.freeze()  # otherwise the collector would copy inherited pages
    torch.set_num_threads(1)  # OpenMP's threads are not inherited
    try:
        sender.send((True, call()))
    except Exception as error:
        sender.send((False, error))


def _run_backward() -> bool:
    torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    return True
