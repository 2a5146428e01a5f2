"""Finds the fastest layouts that fit: the roofline formula ranks all, and the best take their own steps.

all layouts ──roofline──> ranked ──one of each group of nearly equal ones first──> steps of the best `NUM_EXACT`, within the
                 └──> too large    budget of seconds ──> the fastest, and slower ones with less memory

Both happen in forked processes: torch takes no backward in a process that was forked after one.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import check_plan
from sley_core.plan.plan import Plan
from sley_core.process import disable_gc
from sley_estimate.bytes.fake_tensors import Recipes
from sley_estimate.bytes.stages import can_fork, first_draft, forked, representatives, take_steps
from sley_estimate.layers.prices import Source
from sley_estimate.machine import MachineFile
from sley_estimate.search.layouts import Layout, Layouts
from sley_estimate.search.roofline import Roofline, Rough
from sley_estimate.step.estimate import on_machine, records_from, seconds_from
from sley_estimate.step.lanes import StepSeconds

T = TypeVar("T")

NUM_EXACT = 30  # the best layouts that take their own steps; if too few of them fit, so many more follow
MOST_ROUNDS = 4  # how often that happens
LEAST_EXACT = 8  # the best layouts that take their own steps whatever the budget is
NEARLY = 0.01  # layouts whose seconds and bytes differ by a smaller share count as nearly equal
SLOWEST = 1.2  # a layout with less memory may take this many times the fastest step
LESS = 0.8  # the most that it may need of the memory of those before it


@dataclass(frozen=True)
class ExactEstimate:
    """What a layout takes by its own steps, as `train-cli estimate` says it. num_bytes: of the fullest stage. seconds_parts,
    bytes_parts: by name. sources: of its layers' seconds.
    """

    seconds: float
    num_bytes: int
    seconds_parts: Mapping[str, float]
    bytes_parts: Mapping[str, float]
    sources: frozenset[Source]


class Result(NamedTuple):
    """A layout and its estimate: by its own steps, or by the formula."""

    layout: Layout
    takes: ExactEstimate | Rough


@dataclass
class SearchResult:
    """The result of a search. refused: counts of layouts that cannot be, by reason; hints: for a reason. too_large: do not fit
    by the formula.

    fastest: layouts that fit, the fastest first. front: slower ones that need less memory. smallest: the layout with the fewest
    bytes by the formula. num_exact: layouts that took their own steps; dropped: those that fit by the formula alone; not_begun:
    left out by the budget.
    """

    num_layouts: int = 0
    too_large: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    hints: dict[str, str] = field(default_factory=dict)
    fastest: list[Result] = field(default_factory=list)
    front: list[Result] = field(default_factory=list)
    smallest: Result | None = None
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
    """Layouts by their numbers in `Layouts.every`, since plugins' records need not be picklable. best: those that fit, the
    fastest first. front: slower ones with less memory. smallest: the one with the fewest bytes, if there is any.
    """

    best: Mapping[int, Rough]
    front: Mapping[int, Rough]
    smallest: Mapping[int, Rough]


def find(
    space: Layouts,
    machine: MachineFile,
    *,
    memory: int | None = None,
    top: int = 5,
    verify: bool = True,
    cores: int = 1,
    budget_s: float = math.inf,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult:
    """Returns the `top` fastest layouts of `space` that need at most `memory` bytes on any rank, and slower ones with less.

    verify: whether these take their own steps. cores: processes at a time. budget_s: seconds after the ranking in which layouts
    begin their steps; `LEAST_EXACT` do in any time, and all do until one fits. tell: called with the layouts that are done, of
    how many. Raises PlanError for a model or data that cannot be made.
    """
    space.plan = on_machine(space.plan, machine)
    is_forked = can_fork()
    call = partial(rank_layouts, space, machine, memory, max(top, NUM_EXACT * MOST_ROUNDS), top)
    (_, (result, ranked)), *_ = _results([call], 1, space, is_forked=is_forked)
    numbers = {number for group in ranked for number in group}
    layouts = {number: layout for number, layout in enumerate(space.every()) if number in numbers}
    best, front, smallest = ([Result(layouts[number], rough) for number, rough in group.items()] for group in ranked)
    result.smallest = next(iter(smallest), None)
    if not verify:
        result.fastest, result.front = best[:top], front
        return result
    checked = _checked(space, one_of_each_first(best, space), result)
    batch = list(islice(checked, NUM_EXACT))
    batch[LEAST_EXACT:LEAST_EXACT] = _checked(space, [each.layout for each in front if each.layout not in batch], result)
    end_s = time.monotonic() + budget_s
    verified: list[Result] = []

    def estimated(layout: Layout, recipes: Recipes) -> tuple[ExactEstimate | SleyError | None, Recipes]:
        try:
            return exact(layout.plan(space.plan, space.world), space.world, machine, memory, recipes), recipes
        except SleyError as error:
            return error, recipes

    def within_budget(calls: Sequence[Callable[[], T]]) -> Iterator[Callable[[], T]]:
        """Yields calls as processes become free, until the budget ends."""
        for begun, call in enumerate(calls, result.num_exact):
            if begun >= LEAST_EXACT and verified and time.monotonic() > end_s:
                return
            yield call

    while batch:
        recipes = Recipes()
        calls = within_budget([partial(estimated, layout, recipes) for layout in batch])
        done = 0
        for done, (number, (takes, learned)) in enumerate(_results(calls, cores, space, is_forked=is_forked), 1):
            recipes.learn(learned)
            tell(done, len(batch))
            if isinstance(takes, SleyError):
                result.refuse(takes)
            elif takes is None:
                result.dropped += 1
            else:
                verified.append(Result(batch[number], takes))
        result.num_exact += done
        result.not_begun = len(batch) - done
        batch = list(islice(checked, NUM_EXACT)) if len(verified) < top and not result.not_begun else []
    verified.sort(key=lambda each: each.takes.seconds)
    result.fastest = verified[:top]
    result.front = [verified[at] for at in _front([each.takes for each in verified], top)]
    return result


def rank_layouts(space: Layouts, machine: MachineFile, memory: int | None, many: int, top: int) -> tuple[SearchResult, Ranked]:
    """Returns the counts of a search, and the `many` fastest layouts by the formula, with slower ones than the `top` fastest
    that need less memory. Optimizer states leave the device only in layouts that do not fit with them: none is faster so.
    """
    result, roofline = SearchResult(), Roofline(space.plan, space.world, machine, space.choices)
    numbers, seconds, sizes = array("q"), array("d"), array("d")
    least, smallest = math.inf, dict[int, Rough]()
    fits_here = False
    with disable_gc():
        for number, layout in enumerate(space.every()):
            result.num_layouts = number + 1
            # Whether `every` has the same layout with optimizer states on the device.
            is_away = layout.offload is not None and "offload" not in space.keep
            if not is_away:
                fits_here = False
            elif fits_here:
                continue
            try:
                rough = roofline.of(layout)
            except SleyError as error:
                result.refuse(error)
                continue
            if rough.num_bytes < least:
                least, smallest = rough.num_bytes, {number: rough}
            if memory is not None and rough.num_bytes > memory:
                result.too_large += 1
                continue
            fits_here = fits_here or not is_away
            numbers.append(number)
            seconds.append(rough.seconds)
            sizes.append(rough.num_bytes)
    order = np.argsort(seconds, kind="stable").tolist()
    best = {numbers[at]: Rough(seconds[at], sizes[at]) for at in order[:many]}
    near = [Rough(seconds[at], sizes[at]) for at in order if seconds[at] <= SLOWEST * seconds[order[0]]]
    return result, Ranked(best, {numbers[order[at]]: near[at] for at in _front(near, top)}, smallest)


def _front(takes: Sequence[ExactEstimate | Rough], top: int) -> Iterator[int]:
    """Yields the numbers of those behind the `top` fastest that need less memory than all before; `takes` is by seconds."""
    if not takes:
        return
    least = min(each.num_bytes for each in takes[:top])
    for at, each in enumerate(takes[top:], top):
        if each.num_bytes <= LESS * least and each.seconds <= SLOWEST * takes[0].seconds:
            least = each.num_bytes
            yield at


def one_of_each_first(best: Sequence[Result], space: Layouts) -> list[Layout]:
    """Returns the layouts of `best` in order, but one of each group of nearly equal ones before all others.

    Nearly equal are layouts with about the same seconds and bytes that differ only in `sp` and `micro_size`, or, with one
    micro-batch, in the options of their weight communicator.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    first, others = [], []
    for layout, takes in best:
        options = None if layout.micros(space.plan, space.world) == 1 else str(layout.weights)
        key = layout._replace(sp=1, micro_size=1, weights=None), layout.weights and layout.weights.name, options
        group = groups.setdefault(str(key), [])
        own = takes.seconds, takes.num_bytes
        if any(all(math.isclose(*pair, rel_tol=NEARLY) for pair in zip(own, each, strict=True)) for each in group):
            others.append(layout)
        else:
            first.append(layout)
            group.append(own)
    return first + others


def _checked(space: Layouts, layouts: Sequence[Layout], result: SearchResult) -> Iterator[Layout]:
    """Yields the layouts that the checks of plans accept; refuses the others in `result`."""
    for layout in layouts:
        try:
            if problems := check_plan(layout.plan(space.plan, space.world), space.world):
                raise PlanError.many(problems)
        except SleyError as error:
            result.refuse(error)
        else:
            yield layout


def _results(calls: Iterable[Callable[[], T]], cores: int, space: Layouts, *, is_forked: bool) -> Iterator[tuple[int, T]]:
    """Yields the number of each call and its result, from `cores` forked processes at a time or from this one."""
    if is_forked:
        limit_s = 2 * space.world * space.plan.limits.estimate_timeout_s  # the steps of each stage have a limit of their own
        yield from forked(calls, cores, limit_s)
    else:
        yield from ((number, call()) for number, call in enumerate(calls))


def exact(
    plan: Plan, size: int, machine: MachineFile, memory: int | None = None, recipes: Recipes | None = None
) -> ExactEstimate | None:
    """Returns the estimate of a plan from steps in this process; None if a stage needs more than `memory` bytes. Raises as
    `estimate_seconds`.
    """
    plan = on_machine(plan, machine)
    draft = first_draft(plan, size)
    samples = representatives(plan, plan.topology(size), draft)
    stages = sorted({stage for each in samples for stage in each})
    taken = take_steps(plan, size, stages, 1, draft, records=True, recipes=recipes, most=memory)
    fullest = max((each for each, _ in taken), key=lambda each: each.peak)
    if memory is not None and fullest.peak > memory:
        return None
    known = {stage: record for stage, (_, record) in zip(stages, taken, strict=True) if record}
    seconds = seconds_from(records_from(known, samples, draft), plan, size, machine, draft)
    sources = frozenset(layer.source for layer in seconds.layers)
    return ExactEstimate(seconds.step.seconds, fullest.peak, seconds_parts(seconds.step), fullest.alive, sources)


def exact_apart(plan: Plan, size: int, machine: MachineFile) -> ExactEstimate:
    """Returns `exact` from a forked process, where that works."""
    call = partial(exact, plan, size, machine)
    limit_s = 2 * size * plan.limits.estimate_timeout_s
    estimate = next(forked([call], 1, limit_s))[1] if can_fork() else call()
    assert estimate is not None, "there is no limit to exceed"
    return estimate


def seconds_parts(step: StepSeconds) -> Mapping[str, float]:
    """Returns the parts of a step's seconds on the stage that computes longest; their sum is the step."""
    stage = max(range(len(step.computing_s)), key=lambda at: step.computing_s[at])
    updating_s = step.updating_s[stage]
    parts: dict[str, float] = defaultdict(
        float, {"actions": step.computing_s[stage] - updating_s, "norm and update": updating_s}
    )
    for lane, seconds in step.exposed_s(stage).items():
        parts[f"waiting for {lane}"] += seconds
    if step.seconds > step.devices_s:
        parts["waiting for the host"] = step.seconds - step.devices_s
    parts["idle besides"] = step.seconds - sum(parts.values())
    return dict(parts)
