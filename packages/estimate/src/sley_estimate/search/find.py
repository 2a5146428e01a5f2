"""Finds the fastest layouts that fit: the roofline formula ranks all layouts, and the best run their own steps.

all layouts ──roofline──> ranked ──one of each group of nearly equal ones first──> steps of the best `NUM_EXACT` ──> the fastest
                 └──> too large

Both run in forked processes, since torch refuses a backward in a process that was forked after a backward.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import check_plan
from sley_estimate.bytes.stages import StageTooLargeError, run_calls
from sley_estimate.layers.prices import Source
from sley_estimate.machine import MachineFile
from sley_estimate.search.layouts import Layout, Layouts
from sley_estimate.search.roofline import Roofline, RooflineEstimate
from sley_estimate.step.estimate import estimate_plan, plan_for_machine
from train_cli.main import disable_gc

NUM_EXACT = 30  # the best layouts that run their own steps; as many follow if too few of them fit
MAX_ROUNDS = 4  # the largest number of times that so many layouts run their steps
SIMILARITY = 0.01  # layouts whose seconds and bytes differ by about this share count as nearly equal


class ExactEstimate(NamedTuple):
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


@dataclass
class SearchResult:
    """The result of a search. refused: the counts of invalid layouts by reason. hints: the hints by reason. too_large: the
    number of layouts that do not fit by the formula.

    fastest: the layouts that fit, fastest first. smallest, min_bytes: the layout with the fewest bytes by the formula.
    num_exact: the number of layouts that ran their own steps. dropped: the number of layouts that fit only by the formula.
    """

    num_layouts: int = 0
    too_large: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    hints: dict[str, str] = field(default_factory=dict)
    fastest: list[Result] = field(default_factory=list)
    smallest: Layout | None = None
    min_bytes: float = math.inf
    num_exact: int = 0
    dropped: int = 0

    def refuse(self, error: SleyError) -> None:
        problem = error.diagnostics[0]
        reason = f"{problem.code}: {problem.message}"
        self.refused[reason] += 1
        if problem.hint:
            self.hints[reason] = problem.hint


class Ranking(NamedTuple):
    """Layouts by their index in `Layouts.all_layouts`, since plugin records may not be picklable. best: the layouts that fit,
    fastest first. smallest: the layout with the fewest bytes, or -1.
    """

    best: Sequence[tuple[int, RooflineEstimate]]
    smallest: int


def search_layouts(
    space: Layouts,
    machine: MachineFile,
    *,
    memory: int | None = None,
    top: int = 5,
    cores: int = 1,
    report_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult:
    """Returns the `top` fastest layouts of `space` that need at most `memory` bytes on every rank.

    cores: the number of parallel processes. report_progress: a function called with the number of finished layouts and of all
    layouts that run steps. Raises PlanError for a model or dataset that cannot be built.
    """
    space.plan = plan_for_machine(space.plan, machine)
    ((_, (result, ranking)),) = run_calls([partial(rank_layouts, space, machine, memory)], cores)
    numbers = {ranking.smallest, *(number for number, _ in ranking.best)}
    layouts = {number: layout for number, layout in enumerate(space.all_layouts()) if number in numbers}
    result.smallest = layouts.get(ranking.smallest)
    ordered = order_by_variety([(layouts[number], rough) for number, rough in ranking.best], space)
    candidates = (layout for layout in ordered if _is_valid(layout, space, result))
    verified: list[Result] = []

    def estimate_layout(layout: Layout) -> ExactEstimate | SleyError:
        try:
            estimate = estimate_plan(layout.apply(space.plan, space.world), space.world, machine, max_bytes=memory)
        except StageTooLargeError as error:
            return ExactEstimate(math.inf, error.num_bytes, frozenset())
        except SleyError as error:
            return error
        num_bytes = max(memory.peak for memory in estimate.memory)
        return ExactEstimate(estimate.step.seconds, num_bytes, frozenset(layer.source for layer in estimate.layers))

    while len(verified) < top and (next_layouts := list(islice(candidates, NUM_EXACT))):
        total = result.num_exact + len(next_layouts)
        for index, estimate in run_calls([partial(estimate_layout, layout) for layout in next_layouts], cores):
            result.num_exact += 1
            report_progress(result.num_exact, total)
            if isinstance(estimate, SleyError):
                result.refuse(estimate)
            elif memory is not None and estimate.num_bytes > memory:
                result.dropped += 1
            else:
                verified.append(Result(next_layouts[index], estimate))
    verified.sort(key=lambda verified_result: verified_result.estimate.seconds)
    result.fastest = verified[:top]
    return result


def rank_layouts(space: Layouts, machine: MachineFile, memory: int | None) -> tuple[SearchResult, Ranking]:
    """Returns the counts of a search, and the fastest layouts by the formula."""
    result, roofline = SearchResult(), Roofline(space.plan, space.world, machine, space.choices)
    numbers, seconds, sizes = array("q"), array("d"), array("d")
    smallest = -1
    with disable_gc():
        for number, layout in enumerate(space.all_layouts()):
            result.num_layouts = number + 1
            try:
                rough = roofline.estimate(layout)
            except SleyError as error:
                result.refuse(error)
                continue
            if rough.num_bytes < result.min_bytes:
                smallest, result.min_bytes = number, rough.num_bytes
            if memory is not None and rough.num_bytes > memory:
                result.too_large += 1
                continue
            numbers.append(number)
            seconds.append(rough.seconds)
            sizes.append(rough.num_bytes)
    order = np.argsort(seconds, kind="stable")[: NUM_EXACT * MAX_ROUNDS].tolist()
    best = [(numbers[index], RooflineEstimate(seconds[index], sizes[index])) for index in order]
    return result, Ranking(best, smallest)


def order_by_variety(best: Sequence[tuple[Layout, RooflineEstimate]], space: Layouts) -> list[Layout]:
    """Returns the layouts of `best` in order, but the first layout of each group of nearly equal ones before all others.

    Nearly equal layouts have about the same seconds and bytes. They differ only in `sp` and `micro_size`, or, with one
    microbatch, in the options of their weight communicator.
    """
    leaders: dict[Hashable, Layout] = {}
    followers = []
    for layout, estimate in best:
        options = None if layout.num_micro_batches(space.plan, space.world) == 1 else str(layout.weights)
        choices = layout._replace(sp=1, micro_size=1, weights=None), layout.weights and layout.weights.name, options
        key = str(choices), *(round(math.log(cost) / SIMILARITY) for cost in estimate)
        if key in leaders:
            followers.append(layout)
        else:
            leaders[key] = layout
    return [*leaders.values(), *followers]


def _is_valid(layout: Layout, space: Layouts, result: SearchResult) -> bool:
    """Returns whether the layout passes the plan checks. Records it as refused in `result` if it does not."""
    try:
        if problems := check_plan(layout.apply(space.plan, space.world), space.world):
            raise PlanError.from_diagnostics(problems)
    except SleyError as error:
        result.refuse(error)
        return False
    return True
