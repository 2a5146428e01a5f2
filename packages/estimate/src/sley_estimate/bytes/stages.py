"""Estimates the memory and the work of the stages of a run, from the first rank of each, in parallel processes if useful.

plan ──draft──> stages ──fork──> first rank of a stage: bytes, and its recorded step

All ranks of a stage need equal memory, and stages with equal work have one recorded step.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch

from sley_core.actions.action import Action, Kind, Step
from sley_core.assemble import Draft, build_draft, weight_dtypes
from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError
from sley_core.model.layers import Layer
from sley_core.plan.check import check_plan
from sley_core.plan.plan import Plan, iterate_values
from sley_core.topology import Topology
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.fake_world import meta_outputs
from sley_estimate.bytes.ledger import Ledger, StepPosition
from sley_estimate.bytes.rank import RankBytes, min_equivalent_micro_batches, rank_bytes
from sley_estimate.layers.variants import layer_keys
from sley_estimate.step.record import RankRecord, Recording
from train_cli.meta_model import meta_micro_batch

T = TypeVar("T")

MAX_UNFORKED_STAGES = 2  # up to this number, stages run in this process, since a fork does not pay off


class StageTooLargeError(Exception):
    """Raised for a stage that needs more bytes than allowed. num_bytes: the bytes of its peak."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"a stage needs {num_bytes} bytes")
        self.num_bytes = num_bytes


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
    draft, stages = build_first_draft(plan, size), range(plan.topology(size).pp)
    return [memory for memory, _ in run_stages(plan, size, stages, draft, cores)]


def run_stages(
    plan: Plan,
    size: int,
    stages: Sequence[int],
    draft: Draft,
    cores: int,
    *,
    records: bool = False,
    max_bytes: int | None = None,
) -> list[tuple[RankBytes, RankRecord | None]]:
    """Runs the steps of the first rank of each of `stages`. Returns their bytes, and with `records` their recorded steps, in
    order.

    draft: is not consumed. cores: the number of parallel processes; up to `MAX_UNFORKED_STAGES` stages run in this process.
    Raises the errors of `rank_bytes` and `run_calls`, and StageTooLargeError for a stage with more than `max_bytes`.
    """
    ranks_per_stage = plan.topology(size).ranks_per_stage

    def estimate_stage(stage: int) -> tuple[RankBytes, RankRecord | None]:
        recording = Recording() if records else None
        stage_draft = build_first_draft(plan, size)  # a run consumes its draft; the slower lowered lists are shared
        stage_draft = replace(stage_draft, stage=replace(stage_draft.stage, lists=draft.stage.lists))
        memory = rank_bytes(plan, stage * ranks_per_stage, size, stage_draft, recording)
        return memory, recording.record if recording else None

    calls = [partial(estimate_stage, stage) for stage in stages]
    by_index: dict[int, tuple[RankBytes, RankRecord | None]] = {}
    for index, (memory, record) in run_calls(calls, cores if len(calls) > MAX_UNFORKED_STAGES else 1):
        if max_bytes is not None and memory.peak > max_bytes:
            raise StageTooLargeError(memory.peak)
        by_index[index] = memory, record
    return [by_index[index] for index in range(len(calls))]


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


def representative_stages(plan: Plan, topology: Topology, draft: Draft) -> list[int]:
    """Returns, for every stage, the stage whose recorded step gives its seconds: of the stages with equal work, the one with
    the most pending forwards and so the most bytes. Raises the errors of `stage_work_keys`.
    """
    lists, keys = draft.stage.lists, stage_work_keys(plan, topology, draft)
    num_micro_batches = min_equivalent_micro_batches(lists, plan.num_micros(topology))
    pending_forwards = [max_pending_forwards(steps) for steps in lists.of_all_stages(num_micro_batches)]
    by_key: dict[Hashable, int] = {}
    for stage in sorted(range(topology.pp), key=lambda stage: -pending_forwards[stage]):
        by_key.setdefault(keys[stage], stage)
    return [by_key[key] for key in keys]


def max_pending_forwards(steps: Sequence[Step]) -> int:
    """Returns the largest number of forwards in a stage's list, lowered or not, that wait for their (whole) backward at the
    same time.
    """
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRADIENT: -1}
    return max(accumulate((changes.get(step.kind, 0) for step in steps if isinstance(step, Action)), initial=0))


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
        return all(is_done for _, is_done in _run_forked([_run_backward], 1))
    except (RuntimeError, RunError):
        return False


def _run_backward() -> bool:
    torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    return True


def run_calls(calls: Sequence[Callable[[], T]], num_processes: int) -> Iterator[tuple[int, T]]:
    """Yields the index of each call and its pickled result on completion. Calls run in `num_processes` forked processes, or in
    this process if `num_processes` is 1 or forked processes could not run a backward.

    Raises the errors of the calls, and RunError `estimate-ended` if a process exits before its call is done.
    """
    if num_processes == 1 or not can_fork():
        return ((index, call()) for index, call in enumerate(calls))
    return _run_forked(calls, num_processes)


def _run_forked(calls: Sequence[Callable[[], T]], num_processes: int) -> Iterator[tuple[int, T]]:
    with FakeTensors(Ledger(lambda: StepPosition(0, "", ""))):
        torch.empty(2).add_(1)  # imports much of torch, which every forked process would repeat
    pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork"), _start_worker, (calls,))
    try:
        indices = {pool.submit(_run_call, index): index for index in range(len(calls))}
        for future in as_completed(indices):
            yield indices[future], future.result()
    except BrokenProcessPool:
        message = "a process that simulated the steps of a stage ended unexpectedly"
        hint = "use a machine with more memory, since the system ends processes if there is too little"
        raise RunError("estimate-ended", message, hint=hint) from None
    finally:
        pool.shutdown(cancel_futures=True)


_calls: Sequence[Callable[[], Any]] = ()
"""The calls of a forked process, which cannot be pickled."""


def _start_worker(calls: Sequence[Callable[[], Any]]) -> None:
    global _calls
    _calls = calls
    gc.freeze()  # otherwise the collector would copy inherited pages
    torch.set_num_threads(1)  # OpenMP's threads are not inherited


def _run_call(index: int) -> Any:
    return _calls[index]()
