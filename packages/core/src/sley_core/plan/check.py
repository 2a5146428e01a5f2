"""Checks a valid plan for a world of a given size, without torch and before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sley_core.discovery import to_install
from sley_core.errors import Diagnostic, PlanError
from sley_core.optim.scope import scope_of
from sley_core.plan.check_canonical import check_canonical
from sley_core.plan.check_handlers import check_handlers
from sley_core.plan.check_offload import check_offload
from sley_core.plan.check_tables import check_tables
from sley_core.plan.document import by_place
from sley_core.plan.tables import OPTIONAL, TABLES, ModelConfig
from sley_core.records import GradientHandlerRecord, PartitionerRecord, Problem
from sley_core.topology import Topology

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

MOST_FORWARDS = 1_000_000
"""The most forwards (chunks x micro-batches) in one step: longer lists take minutes and gigabytes to check."""


def check_plan(plan: Plan, world: int) -> list[Diagnostic]:
    """Returns all problems of `plan` with `world` ranks, sorted by place; empty if it can run. Starts no process.

    Codes: "layout", "optimizer-layout", and more of this module's, those of `check_tables`, `check_handlers`, `check_offload`
    and `check_canonical`, and those of the plugins' `sley_check_plan`, which are called only if the sizes fit. Raises
    PluginError if one of these hooks fails.
    """
    problems = [
        *_accumulation(plan),
        *check_offload(plan),
        *check_canonical(plan),
        *_pipeline_is_there(plan),
        *_timer(plan),
        *_weights(plan),
        *_sequence(plan),
    ]
    found: list[Diagnostic] = []
    own = {name: getattr(plan, name) for name in (*TABLES, *OPTIONAL)}
    try:
        topology = plan.topology(world)
    except PlanError as error:
        found += error.diagnostics
        problems += check_tables(own)
    else:
        problems += [*check_tables(own, topology.dp), *_optimizer(plan, topology), *check_handlers(plan, topology)]
        found += _schedule(plan, topology)
        for _, more in plan.call("sley_check_plan", plan=plan, topology=topology):
            problems += more
    found += [plan.diagnostic(one.code, one.message, one.path, one.hint) for one in problems]
    return by_place(found)


def _pipeline_is_there(plan: Plan) -> Iterator[Problem]:
    if plan.parallel.pp > 1 and plan.pipeline is None:
        message = f"`pp = {plan.parallel.pp}` needs a [pipeline] table that names a schedule"
        yield Problem(("parallel", "pp"), message, 'add [pipeline] with `use = "pp.one_f_one_b"`', "pipeline-missing")


def _timer(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if the partition times layers by a package that is not installed."""
    if plan.partition is None or not isinstance(plan.partition.record, PartitionerRecord):
        return
    timer = plan.partition.record.timer
    package = timer.partition(".")[0] if timer is not None and plan.partition.config.layer_costs is None else ""
    if package and find_spec(package) is None:
        hint = to_install(package.removeprefix("sley_")) if package.startswith("sley_") else f"install `{package}`"
        message = f"`{plan.partition.name}` times layers by `{package}`, which is not installed"
        yield Problem(("partition", "use"), message, f"{hint}; or give `layer_costs`", "timer-missing")


def _weights(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if weights are sharded but nothing gathers them, or a compiled layer would read them."""
    if plan.parallel.wp == 1:
        return
    if plan.weights is None:
        message = f"`wp = {plan.parallel.wp}` needs a [weights] table that names a weight communicator"
        hint = 'add [weights] with `use = "isp.communicator"`, of sley-isp'
        yield Problem(("parallel", "wp"), message, hint, "weights-missing")
    config = plan.model.config
    if isinstance(config, ModelConfig) and config.compile:
        message = "a compiled layer cannot gather its weights"
        yield Problem(("model", "compile"), message, "leave `compile` out, or `wp = 1`", "weights-compiled")


def _schedule(plan: Plan, topology: Topology) -> list[Diagnostic]:
    """Returns what is wrong with the pipeline's action lists for this many stages and micro-batches, by lowering them."""
    if plan.pipeline is None or plan.batch.global_size % (topology.dp * plan.batch.micro_size):
        return []
    # Imported only if there is a schedule, so that other plans are checked faster.
    from sley_core.actions.lower import lower

    micros = plan.num_micros(topology)
    try:
        schedule = plan.pipeline.build()
        placement = schedule.placement(topology.pp)
        if placement.num_positions * micros > MOST_FORWARDS:
            return [_too_long(plan, placement.num_positions, micros)]
        lower(schedule.lists(topology.pp, micros), placement, micros)
    except PlanError as error:
        return list(plan.located(error).diagnostics)
    return []


def _too_long(plan: Plan, parts: int, micros: int) -> Diagnostic:
    message = f"a step of {micros} micro-batches through {parts} parts of the model is longer than can be checked"
    hint = f"together {MOST_FORWARDS:,} forwards at most: raise `batch.micro_size`, or lower `pp`"
    return plan.diagnostic("schedule-too-long", message, ("batch", "micro_size"), hint)


def _sequence(plan: Plan) -> Iterator[Problem]:
    """Yields a problem if sequences are split but no attention works across slices, or slices are not equal."""
    size = plan.parallel.sp
    if size == 1:
        return
    if plan.sequence is None:
        message = f"`sp = {size}` needs a [sequence] table that names an attention over split sequences"
        hint = 'add [sequence] with `use = "isp.all_to_all"`, of sley-isp'
        yield Problem(("parallel", "sp"), message, hint, "sequence-missing")
    partition = plan.partition
    record = partition.record if partition else None
    if (
        partition
        and isinstance(record, PartitionerRecord)
        and record.timer is not None
        and not partition.config.layer_costs
    ):
        message = f"`{partition.name}` times layers on whole sequences, of which a rank of `sp = {size}` has a slice"
        hint = 'use "pp.balanced", or give `layer_costs`'
        yield Problem(("partition", "use"), message, hint, "sequence-partition")
    length = getattr(plan.data.config, "sequence", None)
    if isinstance(length, int) and length % size:
        message = f"sequence = sp x slice fails: {length} is no multiple of {size}"
        near = f"{length // size * size} or " if length > size else ""
        hint = f"use sequence = {near}{(length // size + 1) * size}"
        yield Problem(("data", "sequence"), message, hint, "sequence-does-not-divide")


def _accumulation(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for a compiled model with `accumulation = "direct"`, which needs hooks that compiled layers lack."""
    config = plan.model.config
    if plan.precision.accumulation == "direct" and isinstance(config, ModelConfig) and config.compile:
        message = "a compiled layer cannot hand its weight gradients over itself"
        hint = 'use `accumulation = "autograd"`, or leave `compile` out'
        yield Problem(("precision", "accumulation"), message, hint, "accumulation-compiled")


LOOKS = {"per_matrix": "looks at whole matrices", "global": "looks at all gradients at once"}


def _optimizer(plan: Plan, topology: Topology) -> Iterator[Problem]:
    """Yields a problem if the optimizer needs full matrices or the full model and a rank has only a part."""
    scope = scope_of(plan.optimizer)
    by = _divider(plan, topology) if scope != "elementwise" else None
    if by is None and scope in ("global", "unknown") and topology.pp > 1:
        by = f"`pp = {topology.pp}` leaves a part of the model to a rank"
    if by is None:
        return
    looks = LOOKS.get(scope, "may look at whole matrices, or at all gradients at once")
    hint = "use an elementwise optimizer such as `core.adamw`"
    if scope == "unknown":
        hint += ', or say `scope = "elementwise"` where an element is updated by its own gradients alone'
    where = "use" if plan.optimizer.record else "factory"
    yield Problem(("optimizer", where), f"`{plan.optimizer.name}` {looks}, but {by}", hint, "optimizer-layout")


def _divider(plan: Plan, topology: Topology) -> str | None:
    """Returns in words what leaves a rank only a part of each matrix; None if nothing does."""
    sharders = [one.name for one in plan.gradient_handlers if _leaves_shards(one.record)]
    if topology.wp > 1:
        return f"`wp = {topology.wp}` leaves a part of each to a rank"
    if sharders and topology.ranks_per_stage > 1:
        return f"`{sharders[0]}` leaves a part of each to a rank"
    return None


def _leaves_shards(record: object) -> bool:
    return isinstance(record, GradientHandlerRecord) and record.result == "shard"
