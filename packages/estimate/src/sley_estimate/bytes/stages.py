"""What the stages of a run hold and do: of one rank of each kind of stage, in processes of their own where there are several.

plan ──draft──> kinds of stages ──fork──> first rank of a kind: bytes, and its recorded step
                                ──fork──> another, which knows the results of operations so far

The ranks of a stage hold as much as each other.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
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
from sley_estimate.bytes.fake_tensors import FakeTensors, Recipes
from sley_estimate.bytes.fake_world import meta_outputs
from sley_estimate.bytes.ledger import Ledger, StepPlace
from sley_estimate.bytes.rank import RankBytes, fewest_micros, late_error, least_micros, rank_bytes
from sley_estimate.layers.variants import layer_keys
from sley_estimate.step.record import RankRecord, Recording
from train_cli.on_meta import meta_micro_batch

T = TypeVar("T")

BACKWARD_S = 60.0  # the most seconds of the backward of one element in a fork
FEW = 2  # up to so many ranks take their steps in this process: a fork is not worth it


def first_draft(plan: Plan, size: int) -> Draft:
    """Returns the draft of the first of `size` ranks. Raises the same errors as `build_draft` and the plan's checks."""
    if problems := check_plan(plan, size):
        raise PlanError.many(problems)
    with World.fake(0, size) as world:
        return build_draft(plan, world)


def stage_bytes(plan: Plan, size: int, cores: int = 1) -> list[RankBytes]:
    """Returns the bytes of the first rank of each stage, which no other exceeds. Raises as `first_draft`, `rank_bytes`."""
    return [memory for memory, _ in each_stage(plan, size, cores, first_draft(plan, size), records=False)]


def each_stage(plan: Plan, size: int, cores: int, draft: Draft, *, records: bool) -> list[tuple[RankBytes, RankRecord | None]]:
    """Returns the bytes of the first rank of each stage, and with `records` the step of the first stage of its kind."""
    topology = plan.topology(size)
    kinds = stage_kinds(plan, topology, draft)
    firsts = sorted({kinds.index(kind) for kind in kinds})
    known = dict(zip(firsts, take_steps(plan, size, firsts, cores, draft, records=records), strict=True))
    stages = ((number, *known[kinds.index(kind)]) for number, kind in enumerate(kinds))
    return [(_on_stage(memory, draft.stage.at(number), topology), record) for number, memory, record in stages]


def take_steps(
    plan: Plan,
    size: int,
    stages: Sequence[int],
    cores: int,
    draft: Draft,
    *,
    records: bool,
    recipes: Recipes | None = None,
    most: int | None = None,
) -> list[tuple[RankBytes, RankRecord | None]]:
    """Takes the steps of the first rank of each of `stages`; returns bytes, and with `records` recorded steps, in order.

    cores: processes at a time; with more than `FEW` of them and stages they are forked. draft: is not used up. recipes: added
    to. most: in this process, a stage that holds more bytes is the last. Raises as `rank_bytes` and `forked`.
    """
    ranks = [stage * plan.topology(size).ranks_per_stage for stage in stages]
    recipes = recipes or Recipes()

    def look(rank: int, own: Draft) -> tuple[RankBytes, RankRecord | None, Recipes]:
        recording = Recording() if records else None
        memory = rank_bytes(plan, rank, size, recipes, own, recording)
        return memory, recording.record if recording else None, recipes

    if min(len(ranks), cores + 1) <= FEW or not can_fork():
        result = []
        for rank in ranks:
            own = first_draft(plan, size)  # a run uses it up; lowered lists, which take longer, are shared
            result.append(look(rank, replace(own, stage=replace(own.stage, lists=draft.stage.lists)))[:2])
            if most is not None and result[-1][0].peak > most:
                break
        return result
    by_number: dict[int, tuple[RankBytes, RankRecord | None]] = {}
    calls = [partial(look, rank, draft) for rank in ranks]
    for number, (memory, record, learned) in forked(calls, cores, plan.limits.estimate_timeout_s):
        recipes.learn(learned)
        by_number[number] = memory, record
    return [by_number[number] for number in range(len(ranks))]


def _on_stage(memory: RankBytes, stage: Stage, topology: Topology) -> RankBytes:
    """Returns the bytes of a rank of one stage as those of `stage`, of the same kind: numbers and names change."""
    number, same = stage.lists.stage, stage.at(memory.stage)
    layers = {here.name: there.name for here, there in zip(same.layers, stage.layers, strict=True)}
    lists = (same.lists.training(memory.num_micros), stage.lists.training(memory.num_micros))
    entries = {str(here): str(there) for here, there in zip(*lists, strict=True)}
    step, entry, layer = memory.place
    return replace(
        memory,
        stage=number,
        rank=number * topology.ranks_per_stage,
        place=StepPlace(step, entries.get(entry, entry), layers.get(layer, layer)),
        curve=[(entries.get(entry, entry), num_bytes) for entry, num_bytes in memory.curve],
    )


def stage_kinds(plan: Plan, topology: Topology, draft: Draft) -> list[Hashable]:
    """Returns a value per stage, equal for stages that hold as much: alike, with equal lists. Raises as `alike_stages`."""
    lists, of_micros = draft.stage.lists, plan.num_micros(topology)
    alike = alike_stages(plan, topology, draft)
    return [(kind, _entries(lists.at(number), of_micros)) for number, kind in enumerate(alike)] if topology.pp > 1 else alike


def alike_stages(plan: Plan, topology: Topology, draft: Draft) -> list[Hashable]:
    """Returns for every stage a value equal for stages that do the same in an action: with layers of the same kinds that no
    name or pattern of the plan distinguishes, the same messages, and no tie. Raises RunError `estimate-layer` for a layer that
    cannot be called on meta.
    """
    if topology.pp == 1:
        return [0]
    model, stage = draft.model, draft.stage
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, meta_micro_batch(plan, draft.dataset))
    patterns = _matching_patterns(plan, model.layers)
    known = {layer.name: (key, patterns[layer.name]) for layer, key in zip(model.layers, keys, strict=True)}
    parts = [tuple(known[layer.name] for layer in layers) for _, layers in stage.stages]
    outputs = [*map(repr, meta_outputs(plan, stage, draft.dataset, weight_dtypes(plan)[0])), None]
    tied = {number for stages in stage.ties for number in stages}
    placement = stage.lists.placement
    kinds: list[Hashable] = []
    for number in range(topology.pp):
        positions = [placement.position(number, chunk) for chunk in range(placement.chunks)]
        chunks = tuple((at and outputs[at - 1], parts[at], outputs[at]) for at in positions)
        kinds.append((chunks, number if number in tied else None))
    return kinds


def representatives(plan: Plan, topology: Topology, draft: Draft) -> list[tuple[int, ...]]:
    """Returns for every stage the stages whose recorded steps give its seconds, the nearest first. Raises as `alike_stages`.

    Of alike stages this is one with the most forwards waiting at once, which holds the most bytes; with sharded weights also
    one with the fewest: a gather ahead depends on the next action, and these two have nearly all pairs of actions.
    """
    lists = draft.stage.lists
    alike, micros = alike_stages(plan, topology, draft), fewest_micros(lists, plan.num_micros(topology))
    waiting = [most_waiting(steps) for steps in lists.of_all_stages(micros)]
    ends: dict[Hashable, tuple[int, ...]] = {}
    for number in sorted(range(topology.pp), key=lambda stage: (-waiting[stage], stage)):
        known = ends.get(alike[number], ())
        ends[alike[number]] = (*known[:1], number) if plan.parallel.wp > 1 else known or (number,)
    return [tuple(sorted(ends[kind], key=lambda end: abs(end - number))) for number, kind in enumerate(alike)]


def most_waiting(steps: Sequence[Step]) -> int:
    """Returns the most forwards of a stage's list, lowered or not, that wait for their (whole) backward at once."""
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRADIENT: -1}
    return max(accumulate((changes.get(step.kind, 0) for step in steps if isinstance(step, Action)), initial=0))


def _entries(lists: Lists, of_micros: int) -> Hashable:
    """Returns the lists of the steps that this stage's estimate takes, with a transfer's peer as a distance."""
    counts = {least_micros(lists, of_micros), fewest_micros(lists, of_micros)}
    return tuple(
        tuple(step if isinstance(step, Action) else step._replace(peer=step.peer - lists.stage) for step in steps)
        for steps in map(lists.training, sorted(counts))
    )


def _matching_patterns(plan: Plan, layers: Sequence[Layer]) -> dict[str, Hashable]:
    """Returns, per layer, the texts of the plan that match one of its modules or parameters, with the rest of that name."""

    def texts(value: object) -> list[str]:
        if isinstance(value, list):
            return [text for each in value for text in texts(each)]
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
    """Returns whether a forked process can work: torch refuses a backward there after one in this process."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    try:
        return all(is_done for _, is_done in forked([_backward], 1, BACKWARD_S))
    except (RuntimeError, RunError):
        return False


@cache
def _import_all() -> None:
    """Runs an operation on fake tensors: the first one imports much of torch, which a forked process would do anew."""
    with FakeTensors(Ledger(lambda: StepPlace(0, "", ""))):
        torch.empty(2).add_(1)


def forked(calls: Iterable[Callable[[], T]], at_once: int, limit_s: float) -> Iterator[tuple[int, T]]:
    """Yields the number of each call and its result as they end, each from a forked process, `at_once` at a time. A call is
    taken from `calls` when its process starts.

    Results cross by pickle. Raises what a call raises, RunError `estimate-ended` for a process that ends before its call, and
    `estimate-late` for a call that takes longer than `limit_s`; then the other processes are killed.
    """
    _import_all()
    context = multiprocessing.get_context("fork")
    remaining = enumerate(calls)
    running: dict[Any, tuple[int, Any, float]] = {}
    try:
        while True:
            for number, call in islice(remaining, at_once - len(running)):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(call, sender), daemon=True)
                process.start()
                sender.close()
                running[receiver] = number, process, time.monotonic() + limit_s
            if not running:
                return
            first_end = min(end for _, _, end in running.values())
            ready = wait(list(running), max(0.0, first_end - time.monotonic()))
            if not ready:
                raise late_error(limit_s)
            for ended in ready:
                assert isinstance(ended, Connection), ended
                number, process, _ = running[ended]
                try:
                    is_done, result = cast("tuple[bool, Any]", ended.recv())
                except EOFError:
                    process.join()
                    message = f"a process that took a stage's steps without values ended with code {process.exitcode}"
                    raise RunError("estimate-ended", message, hint="-9 is the system's when memory runs out") from None
                process.join()
                if not is_done:
                    raise result
                del running[ended]
                yield number, result
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()


def _work(call: Callable[[], Any], sender: Connection) -> None:
    """Makes the call in a forked process, with one thread, and sends (True, its result) or (False, the exception)."""
    gc.freeze()  # else the collector would copy inherited pages
    torch.set_num_threads(1)  # OpenMP's threads are not inherited
    try:
        sender.send((True, call()))
    except Exception as error:
        sender.send((False, error))


def _backward() -> bool:
    torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]  # torch's
    return True
