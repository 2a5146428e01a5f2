"""Finds the fastest layouts that fit in memory. The roofline formula ranks all layouts, and the best of them run their own
steps.

all layouts ──roofline──> ranked ──one of each group of nearly equal ones first──> steps of the best `NUM_EXACT` ──> the fastest
                 └──> too large

Both parts run in forked processes, so that this process never runs a backward: torch refuses a backward in a process that was
forked after one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import check_plan
from sley_estimate.bytes.rank import StageTooLargeError, run_calls
from sley_estimate.layers.prices import Source
from sley_estimate.machine import MachineFile
from sley_estimate.search.layouts import Layout, Layouts
from sley_estimate.search.roofline import Roofline, RooflineEstimate
from sley_estimate.step.estimate import estimate_plan, plan_for_machine
from train_cli.main import disable_gc

NUM_EXACT = 30  # the number of the best layouts that run their own steps; as many more follow if too few of them fit
MAX_ROUNDS = 4  # the largest number of such rounds
SIMILARITY = 0.01  # layouts count as nearly equal if their seconds and bytes differ by about this share


class VerifiedLayout(NamedTuple):
    """A layout and its estimate from its own steps: the seconds of a step, and the peak bytes of the fullest stage."""

    layout: Layout
    seconds: float
    num_bytes: int
    sources: frozenset[Source]


@dataclass
class SearchResult:
    """The result of a search. num_layouts: the number of all layouts. num_too_large: the number that the formula finds too
    large. refusals: the number of invalid layouts by reason. fastest_layouts: the fastest layouts that fit, in this order.

    smallest_layout, min_bytes: the layout with the fewest bytes by the formula, and these bytes; None and infinity if no layout
    is valid. num_exact: the number of layouts that ran their own steps. num_dropped: the number of these that turned out to be
    too large.
    """

    num_layouts: int = 0
    num_too_large: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    fastest_layouts: list[VerifiedLayout] = field(default_factory=list)
    smallest_layout: Layout | None = None
    min_bytes: float = math.inf
    num_exact: int = 0
    num_dropped: int = 0

    def refuse(self, error: SleyError) -> None:
        """Counts a layout as invalid because of `error`."""
        problem = error.diagnostics[0]
        self.refusals[f"{problem.code}: {problem.message}" + (f" (hint: {problem.hint})" if problem.hint else "")] += 1


def search_layouts(
    space: Layouts,
    machine: MachineFile,
    *,
    memory: int | None = None,
    top: int = 5,
    cores: int = 1,
    report_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult:
    """Searches for the `top` fastest layouts of `space` that need at most `memory` bytes on every rank.

    memory: None means no limit. cores: the number of parallel processes. report_progress: a function called with the number of
    layouts whose steps have run, and the number of all layouts whose steps are to run. Sets the device type of `space.plan` to
    that of `machine`. Raises PlanError for a model or dataset that cannot be built.
    """
    space.plan = plan_for_machine(space.plan, machine)
    ((_, (result, best, smallest)),) = run_calls([partial(rank_layouts, space, machine, memory)], cores)
    numbers = {smallest, *(number for number, _ in best)}
    layouts = {number: layout for number, layout in enumerate(space.all_layouts()) if number in numbers}
    result.smallest_layout = layouts.get(smallest)
    ordered = order_by_variety([(layouts[number], estimate) for number, estimate in best], space)
    candidates = (layout for layout in ordered if _check_layout(layout, space, result))
    verified: list[VerifiedLayout] = []

    def estimate_layout(layout: Layout) -> tuple[float, int, frozenset[Source]] | SleyError:
        try:
            estimate = estimate_plan(layout.apply(space.plan, space.world), space.world, machine, max_bytes=memory)
        except StageTooLargeError as error:
            return math.inf, error.args[0], frozenset()
        except SleyError as error:
            return error
        num_bytes = max(stage.peak for stage in estimate.memory)
        return estimate.step.seconds, num_bytes, frozenset(layer.source for layer in estimate.layers)

    while len(verified) < top and (next_layouts := list(islice(candidates, NUM_EXACT))):
        total = result.num_exact + len(next_layouts)
        for index, estimate in run_calls([partial(estimate_layout, layout) for layout in next_layouts], cores):
            result.num_exact += 1
            report_progress(result.num_exact, total)
            if isinstance(estimate, SleyError):
                result.refuse(estimate)
            elif memory is not None and estimate[1] > memory:
                result.num_dropped += 1
            else:
                verified.append(VerifiedLayout(next_layouts[index], *estimate))
    verified.sort(key=lambda verified_result: verified_result.seconds)
    result.fastest_layouts = verified[:top]
    return result


def rank_layouts(
    space: Layouts, machine: MachineFile, memory: int | None
) -> tuple[SearchResult, list[tuple[int, RooflineEstimate]], int]:
    """Ranks all layouts by the formula. Returns a result with their counts; the fastest layouts that fit, in this order, with
    their estimates; and the layout with the fewest bytes, or -1 if none is valid.

    Layouts are returned as indices into `Layouts.all_layouts`, since records of plugins may not be picklable.
    """
    result, roofline = SearchResult(), Roofline(space.plan, space.world, machine, space.choices)
    smallest, ranked = -1, list[tuple[int, RooflineEstimate]]()
    with disable_gc():
        for number, layout in enumerate(space.all_layouts()):
            result.num_layouts = number + 1
            try:
                estimate = roofline.estimate(layout)
            except SleyError as error:
                result.refuse(error)
                continue
            if estimate.num_bytes < result.min_bytes:
                smallest, result.min_bytes = number, estimate.num_bytes
            if memory is None or estimate.num_bytes <= memory:
                ranked.append((number, estimate))
            else:
                result.num_too_large += 1
    return result, nsmallest(NUM_EXACT * MAX_ROUNDS, ranked, key=lambda pair: pair[1].seconds), smallest


def order_by_variety(best: Sequence[tuple[Layout, RooflineEstimate]], space: Layouts) -> list[Layout]:
    """Returns the layouts of `best` in an order in which the first layout of each group of nearly equal ones precedes all
    others.

    Nearly equal layouts have about the same seconds and bytes, and differ only in `sp`, in `micro_size` or, with one
    microbatch, in the options of the weight communicator.
    """
    groups: dict[Hashable, list[Layout]] = defaultdict(list)
    for layout, estimate in best:
        options = None if layout.num_microbatches(space.plan, space.world) == 1 else str(layout.weights)
        choices = layout._replace(sp=1, micro_size=1, weights=None), layout.weights and layout.weights.name, options
        groups[str(choices), *(round(math.log(cost) / SIMILARITY) for cost in estimate)].append(layout)
    leaders = [group[0] for group in groups.values()]
    return [*leaders, *(layout for layout, _ in best if layout not in leaders)]


def _check_layout(layout: Layout, space: Layouts, result: SearchResult) -> bool:
    """Returns whether the layout passes the checks of a plan. Counts it as invalid in `result` if it does not."""
    try:
        if problems := check_plan(layout.apply(space.plan, space.world), space.world):
            raise PlanError.from_diagnostics(problems)
    except SleyError as error:
        result.refuse(error)
        return False
    return True
