"""Finds the fastest layouts that fit: the roofline formula ranks all layouts, and the best run their own steps.

all layouts ──roofline──> ranked ──one of each group of nearly equal ones first──> steps of the best `NUM_EXACT`, within the
                 └──> too large    budget of seconds ──> the fastest

Both run in forked processes, since torch refuses a backward in a process that was forked after a backward.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import check_plan
from sley_core.plan.plan import Plan
from sley_estimate.bytes.fake_tensors import OpResultCache
from sley_estimate.bytes.stages import build_first_draft, can_fork, representative_stages, run_forked, take_steps
from sley_estimate.layers.prices import Source
from sley_estimate.machine import MachineFile
from sley_estimate.search.layouts import Layout, Layouts
from sley_estimate.search.roofline import Roofline, RooflineEstimate
from sley_estimate.step.estimate import build_records, estimate_from_records, plan_for_machine
from train_cli.main import disable_gc

T = TypeVar("T")

NUM_EXACT = 30  # the best layouts that run their own steps; as many follow if too few of them fit
BUDGET_S = 140.0  # seconds after the ranking in which layouts may start their steps
MAX_ROUNDS = 4  # how often more layouts follow
MIN_EXACT = 8  # the best layouts that run their own steps with any budget
SIMILARITY = 0.01  # layouts whose seconds and bytes differ by a smaller share count as nearly equal


@dataclass(frozen=True)
class ExactEstimate:
    """The estimate of a layout from its own steps, as in `train-cli estimate`. num_bytes: the bytes of the fullest stage.
    sources: the sources of its layer seconds.
    """

    seconds: float
    num_bytes: int
    sources: frozenset[Source]


class Result(NamedTuple):
    """A layout and its estimate from its own steps."""

    layout: Layout
    estimate: ExactEstimate


class RoughResult(NamedTuple):
    """A layout and its estimate by the formula."""

    layout: Layout
    estimate: RooflineEstimate


@dataclass
class SearchResult:
    """The result of a search. refused: the counts of invalid layouts by reason. hints: the hints by reason. too_large: the
    number of layouts that do not fit by the formula.

    fastest: the layouts that fit, fastest first. smallest: the layout with the fewest bytes by the formula. num_exact: the
    number of layouts that ran their own steps. dropped: the number of layouts that fit only by the formula. not_begun: the
    number of layouts skipped by the budget.
    """

    num_layouts: int = 0
    too_large: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    hints: dict[str, str] = field(default_factory=dict)
    fastest: list[Result] = field(default_factory=list)
    smallest: RoughResult | None = None
    num_exact: int = 0
    dropped: int = 0
    not_begun: int = 0

    def refuse(self, error: SleyError) -> None:
        problem = error.diagnostics[0]
        reason = f"{problem.code}: {problem.message}"
        self.refused[reason] += 1
        if problem.hint:
            self.hints[reason] = problem.hint


class Ranked(NamedTuple):
    """Layouts by their index in `Layouts.all_layouts`, since plugin records may not be picklable. best: the layouts that fit,
    fastest first. smallest: the layout with the fewest bytes, if any.
    """

    best: Mapping[int, RooflineEstimate]
    smallest: Mapping[int, RooflineEstimate]


def search_layouts(
    space: Layouts,
    machine: MachineFile,
    *,
    memory: int | None = None,
    top: int = 5,
    cores: int = 1,
    budget_s: float = BUDGET_S,
    report_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult:
    """Returns the `top` fastest layouts of `space` that need at most `memory` bytes on every rank.

    cores: the number of parallel processes. budget_s: the seconds after the
    ranking in which layouts may start their steps. The budget never skips the first `MIN_EXACT` layouts, and does not end
    before a layout fits. report_progress: a function called with the number of finished layouts and of all layouts. Raises
    PlanError for a model or dataset that cannot be built.
    """
    space.plan = plan_for_machine(space.plan, machine)
    run = run_forked if can_fork() else _run_in_process
    call = partial(rank_layouts, space, machine, memory, max(top, NUM_EXACT * MAX_ROUNDS))
    (_, (result, ranked)), *_ = run([call], 1)
    numbers = {number for group in ranked for number in group}
    layouts = {number: layout for number, layout in enumerate(space.all_layouts()) if number in numbers}
    best, smallest = ([RoughResult(layouts[number], rough) for number, rough in group.items()] for group in ranked)
    result.smallest = next(iter(smallest), None)
    candidates = order_by_variety(best, space)[: NUM_EXACT * MAX_ROUNDS]
    started: list[Layout] = []
    end_s = time.monotonic() + budget_s
    verified: list[Result] = []
    result_cache = OpResultCache()

    def estimate_layout(layout: Layout) -> tuple[ExactEstimate | SleyError | None, OpResultCache]:
        try:
            return estimate_plan(
                layout.apply(space.plan, space.world), space.world, machine, memory, result_cache
            ), result_cache
        except SleyError as error:
            return error, result_cache

    def next_calls() -> Iterator[Callable[[], tuple[ExactEstimate | SleyError | None, OpResultCache]]]:
        """Yields calls as processes become free: NUM_EXACT within the budget, and more while too few layouts fit."""
        for layout in _valid_layouts(space, candidates, result):
            if len(started) >= NUM_EXACT and len(verified) >= top:
                return
            if len(started) >= MIN_EXACT and verified and time.monotonic() > end_s:
                result.not_begun = max(1, min(NUM_EXACT, len(candidates)) - len(started))
                return
            started.append(layout)
            yield partial(estimate_layout, layout)

    for number, (estimate, call_cache) in run(next_calls(), cores):
        result_cache.merge(call_cache)
        result.num_exact += 1
        report_progress(result.num_exact, max(result.num_exact, min(NUM_EXACT, len(candidates))))
        if isinstance(estimate, SleyError):
            result.refuse(estimate)
        elif estimate is None:
            result.dropped += 1
        else:
            verified.append(Result(started[number], estimate))
    verified.sort(key=lambda verified_result: verified_result.estimate.seconds)
    result.fastest = verified[:top]
    return result


def rank_layouts(space: Layouts, machine: MachineFile, memory: int | None, num_best: int) -> tuple[SearchResult, Ranked]:
    """Returns the counts of a search, and the `num_best` fastest layouts by the formula."""
    result, roofline = SearchResult(), Roofline(space.plan, space.world, machine, space.choices)
    numbers, seconds, sizes = array("q"), array("d"), array("d")
    min_bytes, smallest = math.inf, dict[int, RooflineEstimate]()
    with disable_gc():
        for number, layout in enumerate(space.all_layouts()):
            result.num_layouts = number + 1
            try:
                rough = roofline.estimate(layout)
            except SleyError as error:
                result.refuse(error)
                continue
            if rough.num_bytes < min_bytes:
                min_bytes, smallest = rough.num_bytes, {number: rough}
            if memory is not None and rough.num_bytes > memory:
                result.too_large += 1
                continue
            numbers.append(number)
            seconds.append(rough.seconds)
            sizes.append(rough.num_bytes)
    order = np.argsort(seconds, kind="stable").tolist()
    best = {numbers[index]: RooflineEstimate(seconds[index], sizes[index]) for index in order[:num_best]}
    return result, Ranked(best, smallest)


def order_by_variety(best: Sequence[RoughResult], space: Layouts) -> list[Layout]:
    """Returns the layouts of `best` in order, but the first layout of each group of nearly equal ones before all others.

    Nearly equal layouts have about the same seconds and bytes. They differ only in `sp` and `micro_size`, or, with one
    microbatch, in the options of their weight communicator.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    leaders, followers = [], []
    for layout, estimate in best:
        options = None if layout.num_micro_batches(space.plan, space.world) == 1 else str(layout.weights)
        key = layout._replace(sp=1, micro_size=1, weights=None), layout.weights and layout.weights.name, options
        group = groups.setdefault(str(key), [])
        cost = estimate.seconds, estimate.num_bytes
        if any(all(math.isclose(*pair, rel_tol=SIMILARITY) for pair in zip(cost, member, strict=True)) for member in group):
            followers.append(layout)
        else:
            leaders.append(layout)
            group.append(cost)
    return leaders + followers


def _valid_layouts(space: Layouts, layouts: Sequence[Layout], result: SearchResult) -> Iterator[Layout]:
    """Yields the layouts that pass the plan checks. Records the other layouts as refused in `result`."""
    for layout in layouts:
        try:
            if problems := check_plan(layout.apply(space.plan, space.world), space.world):
                raise PlanError.from_diagnostics(problems)
        except SleyError as error:
            result.refuse(error)
        else:
            yield layout


def _run_in_process(calls: Iterable[Callable[[], T]], num_processes: int) -> Iterator[tuple[int, T]]:
    """Yields the index of each call and its result, like `run_forked`."""
    return ((number, call()) for number, call in enumerate(calls))


def estimate_plan(
    plan: Plan, size: int, machine: MachineFile, memory: int | None = None, result_cache: OpResultCache | None = None
) -> ExactEstimate | None:
    """Returns the estimate of a plan from steps in this process, or None if a stage needs more than `memory` bytes. Raises the
    errors of `estimate_seconds`.
    """
    plan = plan_for_machine(plan, machine)
    draft = build_first_draft(plan, size)
    samples = representative_stages(plan, plan.topology(size), draft)
    stages = sorted({stage for sample in samples for stage in sample})
    estimates = take_steps(plan, size, stages, 1, draft, records=True, result_cache=result_cache, max_bytes=memory)
    fullest = max((memory_bytes for memory_bytes, _ in estimates), key=lambda memory_bytes: memory_bytes.peak)
    if memory is not None and fullest.peak > memory:
        return None
    records = {stage: record for stage, (_, record) in zip(stages, estimates, strict=True) if record}
    seconds = estimate_from_records(build_records(records, samples, draft), plan, size, machine, draft)
    return ExactEstimate(seconds.step.seconds, fullest.peak, frozenset(layer.source for layer in seconds.layers))
