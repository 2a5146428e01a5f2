"""Finds the fastest layouts that fit: ranks all by one formula, and takes the steps of the best.

all layouts ──roofline──> ranked ──one of each group of nearly equal ones first──> steps of the best `NUM_EXACT`, as far as the
                 └──> too large      budget of seconds allows ──> the fastest, and slower ones with less memory

Both are done in processes of their own: torch takes no backward in a process that was forked behind one.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import check_plan
from sley_core.process import uncollected
from sley_estimate.bytes.each_rank import first_draft
from sley_estimate.bytes.forks import can_fork, forked
from sley_estimate.bytes.rank import rank_bytes
from sley_estimate.bytes.recipes import Recipes
from sley_estimate.bytes.stage_kinds import representatives
from sley_estimate.machine.on_machine import on_machine
from sley_estimate.recorded.of_plan import bytes_and_record, records_from
from sley_estimate.recorded.record import record
from sley_estimate.search.compare import parts_of_seconds
from sley_estimate.search.roofline import Roofline, Rough
from sley_estimate.seconds_of_plan import seconds_from

if TYPE_CHECKING:
    from sley_core.assemble import Draft
    from sley_core.plan.plan import Plan
    from sley_estimate.layers.nearest import Source
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.search.layouts import Candidate, Layouts

T = TypeVar("T")

NUM_EXACT = 30
"""So many of the best layouts take their own steps; where too few of them fit, so many more."""

MOST_ROUNDS = 4
"""How often that is."""

LEAST_EXACT = 8
"""So many of the best layouts take their own steps whatever the budget is."""

NEARLY = 0.01
"""Layouts whose seconds and bytes differ by less, in proportion, count as nearly equal."""

SLOWEST = 1.2
"""Nobody waits longer than this many times the fastest step for less memory."""

LESS = 0.8
"""What a slower layout needs at most of the memory of those before it, to be worth a line."""


@dataclass(frozen=True)
class ExactEstimate:
    """What a layout takes by its own steps, as `train-cli estimate` says it. num_bytes: of the stage that holds most.
    parts_of_seconds, parts_of_bytes: where they go, by name. sources: where the seconds of its layers come from.
    """

    seconds: float
    num_bytes: int
    parts_of_seconds: Mapping[str, float]
    parts_of_bytes: Mapping[str, float]
    sources: frozenset[Source]


@dataclass(frozen=True)
class Final:
    """A layout and what it takes: by its own steps, or by the formula alone."""

    layout: Candidate
    takes: ExactEstimate | Rough


@dataclass
class Ranking:
    """Holds layouts by their numbers in `Layouts.every`. best: those that fit, the fastest first, and what they take. front:
    slower ones with less memory. smallest: the one with the fewest bytes.

    refused: how many cannot be assembled, or not be priced, by the reason. hints: what to do about it.
    """

    num_layouts: int = 0
    too_large: int = 0
    best: Mapping[int, Rough] = field(default_factory=dict)
    front: Mapping[int, Rough] = field(default_factory=dict)
    smallest: tuple[int, Rough] | None = None
    refused: Counter[str] = field(default_factory=Counter)
    hints: dict[str, str] = field(default_factory=dict)

    def refuse(self, error: SleyError) -> None:
        """Counts a layout that `error` refuses, under its code and message."""
        problem = error.diagnostics[0]
        reason = f"{problem.code}: {problem.message}"
        self.refused[reason] += 1
        if problem.hint:
            self.hints[reason] = problem.hint


@dataclass
class SearchFound:
    """What a search found. fastest: layouts that fit, the fastest first. front: slower ones that need less memory. num_exact:
    how many layouts took their own steps; dropped: how many of these fit by the formula, and not by their steps. not_begun: how
    many would have followed if the budget had not ended. smallest: the layout that needs the fewest bytes by the formula.
    """

    ranking: Ranking
    fastest: list[Final] = field(default_factory=list)
    front: list[Final] = field(default_factory=list)
    num_exact: int = 0
    dropped: int = 0
    not_begun: int = 0
    smallest: Final | None = None


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
) -> SearchFound:
    """Returns the `top` fastest layouts of `space` that need at most `memory` bytes on any rank (None: any number), slower ones
    that need less memory, and what was refused or did not fit.

    verify: whether all of these take their own steps; else the formula alone says what they take. cores: how many processes may
    work at a time. budget_s: seconds after the ranking in which layouts begin their steps; `LEAST_EXACT` do in any time, and
    all do until one fits. tell: called with how many layouts have taken their steps, of how many. Raises PlanError for a model
    or data that cannot be made.
    """
    space.plan = on_machine(space.plan, machine)
    is_forked = can_fork()
    call = partial(rank_layouts, space, machine, memory, max(top, NUM_EXACT * MOST_ROUNDS), top)
    (_, ranking), *_ = _made([call], 1, space, is_forked=is_forked)
    wanted = {*ranking.best, *ranking.front, *(() if ranking.smallest is None else ranking.smallest[:1])}
    layouts = {number: layout for number, layout in enumerate(space.every()) if number in wanted}
    found = SearchFound(ranking)
    if ranking.smallest is not None:
        found.smallest = Final(layouts[ranking.smallest[0]], ranking.smallest[1])
    if not verify:
        found.fastest = [Final(layouts[number], rough) for number, rough in islice(ranking.best.items(), top)]
        found.front = [Final(layouts[number], rough) for number, rough in ranking.front.items()]
        return found
    finals: list[Final] = []
    best = one_of_each_first([(layouts[number], rough) for number, rough in ranking.best.items()], space)
    sound = _sound(space, best, ranking)
    batch = list(islice(sound, NUM_EXACT))
    smaller = _sound(space, [layouts[number] for number in ranking.front if layouts[number] not in batch], ranking)
    batch[LEAST_EXACT:LEAST_EXACT] = smaller
    end_s = time.monotonic() + budget_s

    def until_the_end(calls: Sequence[Callable[[], T]]) -> Iterator[Callable[[], T]]:
        """Yields calls, each once a process is free for it, as long as the budget lasts."""
        for begun, call in enumerate(calls, found.num_exact):
            if begun >= LEAST_EXACT and finals and time.monotonic() > end_s:
                return
            yield call

    while batch:
        recipes = Recipes()
        calls = until_the_end([partial(_told, layout, space, machine, memory, recipes) for layout in batch])
        done = 0
        for done, (number, (takes, learned)) in enumerate(_made(calls, cores, space, is_forked=is_forked), 1):
            recipes.learn(learned)
            tell(done, len(batch))
            if isinstance(takes, SleyError):
                ranking.refuse(takes)
            elif takes is None:
                found.dropped += 1
            else:
                finals.append(Final(batch[number], takes))
        found.num_exact += done
        found.not_begun = len(batch) - done
        batch = list(islice(sound, NUM_EXACT)) if len(finals) < top and not found.not_begun else []
    finals.sort(key=lambda final: final.takes.seconds)
    found.fastest = finals[:top]
    found.front = [finals[at] for at in _front([final.takes for final in finals], top)]
    return found


def rank_layouts(space: Layouts, machine: MachineFile, memory: int | None, many: int, top: int) -> Ranking:
    """Returns the `many` fastest layouts by the formula, and those that are slower than the `top` fastest and need less memory.

    Optimizer states leave the device only in layouts that do not fit with them: none is faster so.
    """
    found, roofline = Ranking(), Roofline(space.plan, space.world, machine, space.choices)
    numbers, seconds, sizes = array("q"), array("d"), array("d")
    fits_here = False
    with uncollected():
        for number, layout in enumerate(space.every()):
            found.num_layouts = number + 1
            if not (is_away := space.is_offloading(layout)):
                fits_here = False
            elif fits_here:
                continue
            try:
                rough = roofline.of(layout)
            except SleyError as error:
                found.refuse(error)
                continue
            if found.smallest is None or rough.num_bytes < found.smallest[1].num_bytes:
                found.smallest = number, rough
            if memory is not None and rough.num_bytes > memory:
                found.too_large += 1
                continue
            fits_here = fits_here or not is_away
            numbers.append(number)
            seconds.append(rough.seconds)
            sizes.append(rough.num_bytes)
    order = np.argsort(seconds, kind="stable").tolist()
    found.best = {numbers[at]: Rough(seconds[at], sizes[at]) for at in order[:many]}
    every = [Rough(seconds[at], sizes[at]) for at in order if seconds[at] <= SLOWEST * seconds[order[0]]]
    found.front = {numbers[order[at]]: every[at] for at in _front(every, top)}
    return found


def _front(takes: Sequence[ExactEstimate | Rough], top: int) -> Iterator[int]:
    """Yields the numbers of those of `takes`, which come in the order of their seconds, that are slower than the `top` fastest
    and need less memory than all before them.
    """
    if not takes:
        return
    least = min(one.num_bytes for one in takes[:top])
    for at, one in enumerate(takes[top:], top):
        if one.num_bytes <= LESS * least and one.seconds <= SLOWEST * takes[0].seconds:
            least = one.num_bytes
            yield at


def one_of_each_first(best: Sequence[tuple[Candidate, Rough]], space: Layouts) -> list[Candidate]:
    """Returns the layouts of `best` in their order, but one of each group of nearly equal ones before all others.

    Nearly equal are layouts with about the same seconds and bytes by the formula that differ only in `sp` and `micro_size`, or,
    with one micro-batch, in the options of their weight communicator too.
    """
    seen: dict[Hashable, list[Rough]] = {}
    first, others = [], []
    for layout, rough in best:
        sizes, weights = layout.shape.sizes, layout.shape.weights
        options = None if sizes.micros(space.plan, space.world) == 1 else str(weights)
        shape = layout.shape
        choices = layout.schedule, layout.reducer, shape.activations, shape.attention, shape.offload
        key = sizes.pp, sizes.wp, weights and weights.name, options, *map(str, choices)
        group = seen.setdefault(key, [])
        if any(all(map(_is_near, rough, one)) for one in group):
            others.append(layout)
        else:
            first.append(layout)
            group.append(rough)
    return first + others


def _is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NEARLY)


def _sound(space: Layouts, layouts: Sequence[Candidate], ranking: Ranking) -> Iterator[Candidate]:
    """Yields those of `layouts` that the checks of plans accept; the others are refused in `ranking`."""
    for layout in layouts:
        try:
            problems = check_plan(layout.plan(space.plan, space.world), space.world)
            if problems:
                raise PlanError.many(problems)
        except SleyError as error:
            ranking.refuse(error)
        else:
            yield layout


def _made(calls: Iterable[Callable[[], T]], cores: int, space: Layouts, *, is_forked: bool) -> Iterator[tuple[int, T]]:
    """Yields the number of each call and its result: from `cores` processes at a time, or from this one."""
    if is_forked:
        limit_s = 2 * space.world * space.plan.limits.estimate_timeout_s  # the steps of each stage have a limit of their own
        yield from forked(calls, cores, limit_s)
    else:
        yield from ((number, call()) for number, call in enumerate(calls))


def _told(
    layout: Candidate, space: Layouts, machine: MachineFile, memory: int | None, recipes: Recipes
) -> tuple[ExactEstimate | SleyError | None, Recipes]:
    """Returns what `exact` does of a layout, or the error that it raises, and what operations made."""
    try:
        return exact(layout.plan(space.plan, space.world), space.world, machine, memory, recipes), recipes
    except SleyError as error:
        return error, recipes


def exact(
    plan: Plan, size: int, machine: MachineFile, memory: int | None = None, recipes: Recipes | None = None
) -> ExactEstimate | None:
    """Returns the estimate of a plan on `size` ranks of `machine`, from steps that one rank of each kind of stage takes in this
    process; None if a stage needs more than `memory` bytes, which ends it early. recipes: what operations made; added to.

    Raises PlanError for all that the plan's checks find, and for what the machine file does not say, RunError "estimate-layer"
    for a layer that cannot be called without values, "estimate-late" for one that takes too long.
    """
    plan, recipes = on_machine(plan, machine), Recipes() if recipes is None else recipes
    draft, topology = first_draft(plan, size), plan.topology(size)
    standing, is_ahead = representatives(plan, topology, draft), machine.device.kind == "cuda"

    def another() -> Draft:
        """Returns a draft that a run may use up; its lists are shared, since lowering them takes longer than the draft."""
        own = first_draft(plan, size)
        return replace(own, stage=replace(own.stage, lists=draft.stage.lists))

    held, known = [], {}
    stages = sorted({one for some in standing for one in some})
    for stage in stages:
        rank = stage * topology.ranks_per_stage
        if plan.run.device == "cuda" and is_ahead:
            one, known[stage] = bytes_and_record(plan, rank, size, recipes, another())
        else:
            one = rank_bytes(plan, rank, size, recipes, another())
        if memory is not None and one.peak > memory:
            return None
        held.append(one)
    for stage in set(stages) - set(known):
        rank = stage * topology.ranks_per_stage
        known[stage] = record(plan, rank, size, runs_ahead=is_ahead, recipes=recipes, draft=another())
    seconds = seconds_from(records_from(known, standing, draft), plan, size, machine, draft)
    fullest = max(held, key=lambda one: one.peak)
    sources = frozenset(layer.source for layer in seconds.layers)
    return ExactEstimate(seconds.step.seconds, fullest.peak, parts_of_seconds(seconds.step), fullest.alive, sources)


def exact_apart(plan: Plan, size: int, machine: MachineFile) -> ExactEstimate:
    """Returns what `exact` does, from a process of its own where that works, and raises as it does."""
    call = partial(exact, plan, size, machine)
    if not can_fork():
        found = call()
    else:
        ((_, found),) = forked([call], 1, 2 * size * plan.limits.estimate_timeout_s)
    assert found is not None, "there is no limit that it could exceed"
    return found
