"""Checks a valid plan for a world of a given size, without torch and before any process starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sley_core.discovery import install_hint
from sley_core.errors import Diagnostic, KeyPath, PlanError
from sley_core.optim.config import FactoryOptimizerConfig, scope_of
from sley_core.plan.document import sort_by_place
from sley_core.plan.kinds import CHECKPOINTER
from sley_core.plan.tables import (
    BETTER,
    OPTIONAL,
    TABLES,
    BatchTable,
    EvaluationTable,
    ModelConfig,
    ParallelTable,
    PrecisionTable,
    ProfileTable,
    RunTable,
    number_of,
    row_name,
)
from sley_core.records import (
    DatasetRecord,
    GradientHandlerRecord,
    OffloadManagerRecord,
    PartitionerRecord,
    Problem,
    Role,
    WeightCommunicatorRecord,
)
from sley_core.table import Table
from sley_core.topology import Topology
from sley_core.words import suggestion

if TYPE_CHECKING:
    from sley_core.plan.plan import Component, EvaluationSet, Plan


MAX_FORWARDS = 1_000_000
"""The most forwards (chunks x micro-batches) in one step: longer lists take minutes and gigabytes to check."""


def check_plan(plan: Plan, world: int) -> list[Diagnostic]:
    """Returns all problems of `plan` with `world` ranks, sorted by place; empty if it can run. Starts no process.

    Codes: "layout", "optimizer-layout", and more of this module's, those of `check_tables`, `check_handlers`, `check_offload`
    and `check_canonical`, and those of the plugins' `sley_check_plan`, which are called only if the sizes fit. Raises
    PluginError if one of these hooks fails.
    """
    problems = [
        *check_offload(plan),
        *check_canonical(plan),
        *_check_parts(plan),
        *_check_sequence(plan),
        *_check_keep_best(plan),
    ]
    diagnostics: list[Diagnostic] = []
    own = {name: getattr(plan, name) for name in (*TABLES, *OPTIONAL)}
    try:
        topology = plan.topology(world)
    except PlanError as error:
        diagnostics += error.diagnostics
        problems += check_tables(own)
    else:
        problems += [*check_tables(own, topology.dp), *_check_optimizer(plan, topology), *check_handlers(plan, topology)]
        problems += check_all_data(plan.data, plan.model, plan.evaluation, plan.evaluation_sets)
        diagnostics += _check_schedule(plan, topology)
        for _, more in plan.call("sley_check_plan", plan=plan, topology=topology):
            problems += more
    diagnostics += [plan.diagnostic(one.code, one.message, one.path, one.hint) for one in problems]
    return sort_by_place(diagnostics)


def timer_package(plan: Plan) -> str:
    """Returns the import name of the package that measures layers for the partition, or an empty string."""
    if plan.partition is None or not isinstance(plan.partition.record, PartitionerRecord):
        return ""
    timer = plan.partition.record.timer
    return timer.partition(".")[0] if timer is not None and plan.partition.config.layer_costs is None else ""


def _check_parts(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for each missing table or package that the layout needs, and for each setting that compiled layers
    do not support.
    """
    parallel, config = plan.parallel, plan.model.config
    is_compiled = isinstance(config, ModelConfig) and config.compile
    if plan.precision.accumulation == "direct" and is_compiled:  # it needs hooks that compiled layers lack
        message = "a compiled layer cannot hand its weight gradients over itself"
        hint = 'use `accumulation = "autograd"`, or leave `compile` out'
        yield Problem(("precision", "accumulation"), message, hint, "accumulation-compiled")
    if parallel.pp > 1 and plan.pipeline is None:
        message = f"`pp = {parallel.pp}` needs a [pipeline] table that names a schedule"
        yield Problem(("parallel", "pp"), message, 'add [pipeline] with `use = "pp.one_f_one_b"`', "pipeline-missing")
    package = timer_package(plan)
    if plan.partition is not None and package and find_spec(package) is None:
        hint = install_hint(package.removeprefix("sley_")) if package.startswith("sley_") else f"install `{package}`"
        message = f"`{plan.partition.name}` times layers by `{package}`, which is not installed"
        yield Problem(("partition", "use"), message, f"{hint}; or give `layer_costs`", "timer-missing")
    if parallel.wp > 1 and plan.weights is None:
        message = f"`wp = {parallel.wp}` needs a [weights] table that names a weight communicator"
        hint = 'add [weights] with `use = "isp.communicator"`, of sley-isp'
        yield Problem(("parallel", "wp"), message, hint, "weights-missing")
    if parallel.wp > 1 and is_compiled:
        message = "a compiled layer cannot gather its weights"
        yield Problem(("model", "compile"), message, "leave `compile` out, or `wp = 1`", "weights-compiled")


def _check_schedule(plan: Plan, topology: Topology) -> list[Diagnostic]:
    """Returns the problems of the pipeline's action lists, which it lowers for these stages and micro-batches."""
    if plan.pipeline is None or plan.batch.global_size % (topology.dp * plan.batch.micro_size):
        return []
    # Imported only if there is a schedule, so that other plans are checked faster.
    from sley_core.actions.lower import lower

    micros = plan.num_micros(topology)
    try:
        schedule = plan.pipeline.build()
        placement = schedule.placement(topology.pp)
        if placement.num_positions * micros > MAX_FORWARDS:
            parts = placement.num_positions
            message = f"a step of {micros} micro-batches through {parts} parts of the model is longer than can be checked"
            hint = f"together {MAX_FORWARDS:,} forwards at most: raise `batch.micro_size`, or lower `pp`"
            return [plan.diagnostic("schedule-too-long", message, ("batch", "micro_size"), hint)]
        lower(schedule.lists(topology.pp, micros), placement, micros)
    except PlanError as error:
        return list(plan.located(error).diagnostics)
    return []


def _check_sequence(plan: Plan) -> Iterator[Problem]:
    size = plan.parallel.sp
    if size == 1:
        return
    if plan.sequence is None:
        message = f"`sp = {size}` needs a [sequence] table that names an attention over split sequences"
        hint = 'add [sequence] with `use = "isp.all_to_all"`, of sley-isp'
        yield Problem(("parallel", "sp"), message, hint, "sequence-missing")
    partition = plan.partition
    record = partition.record if partition else None
    if partition and isinstance(record, PartitionerRecord) and record.timer is not None and not partition.config.layer_costs:
        message = f"`{partition.name}` times layers on whole sequences, of which a rank of `sp = {size}` has a slice"
        hint = 'use "pp.balanced", or give `layer_costs`'
        yield Problem(("partition", "use"), message, hint, "sequence-partition")
    length = getattr(plan.data.config, "sequence", None)
    if isinstance(length, int) and length % size:
        message = f"sequence = sp x slice fails: {length} is no multiple of {size}"
        near = f"{length // size * size} or " if length > size else ""
        hint = f"use sequence = {near}{(length // size + 1) * size}"
        yield Problem(("data", "sequence"), message, hint, "sequence-does-not-divide")


SCOPE_DESCRIPTIONS = {"per_matrix": "looks at whole matrices", "global": "looks at all gradients at once"}


def _check_optimizer(plan: Plan, topology: Topology) -> Iterator[Problem]:
    """Yields a problem if the optimizer needs full matrices or the full model and a rank has only a part."""
    scope = scope_of(plan.optimizer.record, plan.optimizer.config)
    sharders = [one.name for one in plan.gradient_handlers if getattr(one.record, "result", None) == "shard"]
    by = None
    if scope != "elementwise" and topology.wp > 1:
        by = f"`wp = {topology.wp}` leaves a part of each to a rank"
    elif scope != "elementwise" and sharders and topology.ranks_per_stage > 1:
        by = f"`{sharders[0]}` leaves a part of each to a rank"
    elif scope in ("global", "unknown") and topology.pp > 1:
        by = f"`pp = {topology.pp}` leaves a part of the model to a rank"
    if by is None:
        return
    looks = SCOPE_DESCRIPTIONS.get(scope, "may look at whole matrices, or at all gradients at once")
    hint = "use an elementwise optimizer such as `core.adamw`"
    if scope == "unknown":
        hint += ', or say `scope = "elementwise"` where an element is updated by its own gradients alone'
    where = "use" if plan.optimizer.record else "factory"
    yield Problem(("optimizer", where), f"`{plan.optimizer.name}` {looks}, but {by}", hint, "optimizer-layout")


CANONICAL_NORMS = (1.0, 2.0, math.inf, "inf")
"""Kinds of norm whose terms every kernel computes to the same bits."""

CODE = "canonical-unsupported"


def check_canonical(plan: Plan) -> Iterator[Problem]:
    """Yields "canonical-unsupported" for each part with which numbers would depend on the layout; plugins check their own."""
    if plan.parallel.reduction != "canonical":
        return
    if plan.parallel.sp > 1:
        yield _canonical_problem(
            ("parallel", "sp"), f"`sp = {plan.parallel.sp}` gives matrix products other shapes", "leave `sp` at 1"
        )
    if isinstance(plan.model.config, ModelConfig) and plan.model.config.compile:
        yield _canonical_problem(("model", "compile"), "a compiled layer sums in an order of its own", "leave `compile` out")
    if plan.precision.accumulation == "autograd":
        message = "weight gradients that autograd adds up have the order of its graph"
        yield _canonical_problem(("precision", "accumulation"), message, 'use "direct", or leave it out')
    config: Any = plan.optimizer.config
    if config.clip_kind not in CANONICAL_NORMS:
        message = f"the {config.clip_kind:g}-norm takes powers, which kernels round each in its way"
        yield _canonical_problem(("optimizer", "clip_kind"), message, 'use 1, 2 or "inf"')
    if isinstance(config, FactoryOptimizerConfig) and config.options.get("fused"):
        message = "a fused optimizer rounds the last elements of a tensor otherwise, and parts end elsewhere than wholes"
        yield _canonical_problem(("optimizer", "options"), message, "leave `fused` out")
    for number, handler in enumerate(plan.gradient_handlers):
        record = handler.record
        if not isinstance(record, GradientHandlerRecord) or record.role == "observer":
            continue
        if not record.fixed_order or record.tolerance_for(handler.config):
            message = f"`{handler.name}` sums in an order, or to a precision, of its own"
            yield _canonical_problem(
                ("gradient_handlers", number, "use"), message, "take `core.each`, `dp.bucketed` or `dp.sharded`"
            )
    weights = plan.weights
    if weights is not None and isinstance(weights.record, WeightCommunicatorRecord) and not weights.record.fixed_order:
        message = f"`{weights.name}` adds up what ranks contribute to a weight's gradient"
        yield _canonical_problem(("weights", "use"), message, "take `isp.communicator`")


def _canonical_problem(path: KeyPath, message: str, hint: str) -> Problem:
    return Problem(path, f"{message}, so there is no canonical sum", f'{hint}, or `reduction = "fast"`', CODE)


SCOPE_RANKS = {"elementwise": 0, "per_matrix": 1, "global": 2, "unknown": 3}
"""Rank of an optimizer's scope: how much of the gradients an update may depend on, from least to most."""


def check_offload(plan: Plan) -> Iterator[Problem]:
    """Yields the problems of `[[offload]]`. Codes: "offload-twice", "offload-optimizer"."""
    mover: dict[str, str] = {}
    for number, component in enumerate(plan.offload):
        record = component.record
        assert isinstance(record, OffloadManagerRecord), component.name
        for part in record.parts(component.config):
            if part in mover:
                message = f"`{mover[part]}` and `{component.name}` both move the run's {part.replace('_', ' ')}"
                yield Problem(("offload", number, "use"), message, "keep one of them", "offload-twice")
                break
            mover[part] = component.name
        allowed, needed = record.scope(component.config), scope_of(plan.optimizer.record, plan.optimizer.config)
        if allowed != "global" and SCOPE_RANKS[needed] > SCOPE_RANKS[allowed]:
            looks = "may look at all gradients at once" if needed == "unknown" else "looks at all gradients at once"
            message = f"`{component.name}` steps the optimizer with some weights at a time, but `{plan.optimizer.name}` {looks}"
            hint = "use an optimizer such as `core.adamw`"
            if needed == "unknown":
                hint += ', or say `scope = "elementwise"` in [optimizer] where an element is updated by its own gradients alone'
            yield Problem(("offload", number, "use"), message, hint, "offload-optimizer")


UNIQUE_ROLES: tuple[Role, ...] = ("reducer", "tie")
"""Roles that must not occur twice: a sum would be summed again."""


def check_handlers(plan: Plan, topology: Topology) -> Iterator[Problem]:
    """Yields the problems of the plan's gradient handlers; each job that correctness needs must be done exactly once.

    Codes: "handler-missing", "handler-twice", "handler-conflict" (two for one job), "handler-order", "handler-shards".
    """
    handlers = [
        (("gradient_handlers", number, "use"), one.name, one.record)
        for number, one in enumerate(plan.gradient_handlers)
        if isinstance(one.record, GradientHandlerRecord)
    ]
    ranks = topology.ranks_per_stage
    if ranks > 1 and not any(record.role == "reducer" for _, _, record in handlers):
        message = f"{ranks} ranks hold the same weights, but no gradient handler sums their gradients"
        hint = 'add [[gradient_handlers]] with `use = "core.each"`, or leave the list out'
        yield Problem(("gradient_handlers",), message, hint, "handler-missing")
    names: set[str] = set()
    first: dict[Role, str] = {}
    for path, name, record in handlers:
        if name in names:
            yield Problem(path, f"`{name}` is listed twice", "keep one of them", "handler-twice")
            continue
        names.add(name)
        if record.role in UNIQUE_ROLES and record.role in first:
            job = "sum gradients" if record.role == "reducer" else "sum gradients of shared weights"
            message = f"`{first[record.role]}` and `{name}` both {job}, so the sum would be wrong"
            yield Problem(path, message, "keep one of them", "handler-conflict")
        first.setdefault(record.role, name)
    for number, (path, name, record) in enumerate(handlers):
        wrong = [("before", other, role.role) for _, other, role in handlers[:number] if role.role in record.before]
        wrong += [("after", other, role.role) for _, other, role in handlers[number + 1 :] if role.role in record.after]
        for word, other, role in wrong:
            message = f"`{name}` must come {word} `{other}`: it works {word} every {role}"
            yield Problem(path, message, f"move its table {word} that of `{other}`", "handler-order")
    reducer = ""
    for path, name, record in handlers:
        if reducer and record.role in ("tie", "transform") and not record.accepts_shards:
            message = f"`{name}` works on whole gradients, of which `{reducer}` leaves a part to each rank"
            yield Problem(path, message, "take a reducer such as `dp.bucketed`", "handler-shards")
        if record.role == "reducer" and record.result == "shard" and topology.ranks_per_stage > 1:
            reducer = name


def has_tie_handler(plan: Plan) -> bool:
    """Returns whether a gradient handler of the plan sums the gradients of parameters that several stages hold."""
    records = (one.record for one in plan.gradient_handlers)
    return any(isinstance(record, GradientHandlerRecord) and record.role == "tie" for record in records)


ACCUMULATION = {"fp32": ("fp32",), "bf16": ("fp32", "bf16"), "fp16": ("fp32",), "fp64": ("fp64",)}
"""The supported dtypes of `compute`, each with those of `gradients`, the default first; the plan's format allows more."""


def check_tables(tables: Mapping[str, Table | None], dp: int | None = None) -> Iterator[Problem]:
    """Yields the conflicts between core's `tables`, which are given by name. A table that is None or missing is not in the plan
    or is invalid itself; checks that depend on it are skipped.

    dp: the number of ranks that share the samples, if it does not come from [parallel].

    Codes: "precision-unsupported", "loss-scale-unused", "loss-scale-range", "beyond-the-run", "skips-unused", and
    "batch-does-not-divide".
    """
    run, batch, precision, parallel = (tables.get(name) for name in ("run", "batch", "precision", "parallel"))
    if isinstance(precision, PrecisionTable):
        compute, gradients = precision.compute, precision.gradients
        if gradients not in ACCUMULATION[compute]:
            known = " or ".join(ACCUMULATION[compute])
            message = f"gradients of what is computed in {compute} are accumulated in {known}, not {gradients}"
            hint = f'use "{ACCUMULATION[compute][0]}", or leave it out'
            yield Problem(("precision", "gradients"), message, hint, "precision-unsupported")
        yield from _check_loss_scale(precision)
    if isinstance(run, RunTable):
        yield from _check_skips(run)
        yield from _check_profile(run, tables.get("profile"))
    if dp is None and isinstance(parallel, ParallelTable) and parallel.dp != "auto":
        dp = parallel.dp
    if isinstance(batch, BatchTable) and dp is not None:
        yield from _check_batch(batch, dp)


def check_data(data: Component, model: Component | None, *, evaluates: bool) -> Iterator[Problem]:
    """Yields the problems that the record of `data` reports in its table and its files. Factory data are checked when built.

    model: None if its table has a mistake. evaluates: whether the plan needs held-out data.
    """
    if isinstance(data.record, DatasetRecord) and data.record.check is not None:
        vocab_size = None if model is None or model.record is None else getattr(model.config, "vocab_size", None)
        yield from data.record.load(data.record.check)(data.config, evaluates=evaluates, vocab_size=vocab_size)


def check_all_data(
    data: Component, model: Component | None, evaluation: EvaluationTable | None, sets: Mapping[str, EvaluationSet]
) -> Iterator[Problem]:
    """Yields the problems of `check_data` of [data], and of the data of each set of [evaluation], at its own table."""
    for one in check_data(data, model, evaluates=evaluation is not None and evaluation.held_out):
        hint = f"{one.hint}; or write `held_out = false`, for the sets alone" if one.code == "held-out" and sets else one.hint
        yield replace(one, hint=hint)
    for name, of_set in sets.items():
        for one in check_data(of_set.data, model, evaluates=of_set.keys.split == "held_out"):
            yield replace(one, path=("evaluation", "sets", name, *one.path[1:]))


def _check_keep_best(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for a `keep_best` that no checkpoint can follow, or that names no number of an evaluation."""
    best = plan.evaluation.best if plan.evaluation is not None else None
    if plan.evaluation is None or best is None:
        return
    path: KeyPath = ("evaluation", "keep_best")
    if plan.checkpoint is None:
        message = "`keep_best` keeps a checkpoint, and the plan saves none"
        yield Problem(path, message, "add [checkpoint], as with `every_steps = 1000`", "keep-best")
    elif not getattr(plan.checkpoint.record, "keeps_best", False):
        message = f"`{plan.checkpoint.name}` keeps no best checkpoint"
        yield Problem(path, message, f'use "{CHECKPOINTER}" in [checkpoint], or leave `keep_best` out', "keep-best")
    sets = [*([""] if plan.evaluation.held_out else []), *plan.evaluation_sets]
    names = [row_name(number, one) for one in sets for number in BETTER]
    is_own = plan.evaluation.metric is not None and best.metric in [row_name(number_of(best.metric), one) for one in sets]
    if best.metric not in names and not is_own:
        hint = suggestion(best.metric, names, f"its numbers are {', '.join(names)}")
        yield Problem(path, f"an evaluation of this plan gives no `{best.metric}`", hint, "keep-best")


def _check_loss_scale(precision: PrecisionTable) -> Iterator[Problem]:
    scale = precision.loss_scale
    path: KeyPath = ("precision", "loss_scale")
    if scale is None:
        return
    if precision.compute != "fp16":
        message = f"only fp16 has a loss scale, and this plan computes in {precision.compute}"
        yield Problem(path, message, "leave `loss_scale` out", "loss-scale-unused")
    elif scale.min_scale > scale.init_scale:
        message = f"the loss scale would begin at {scale.init_scale:g}, below its minimum {scale.min_scale:g}"
        yield Problem((*path, "min_scale"), message, f"use min_scale = {scale.init_scale} or less", "loss-scale-range")


def _check_skips(run: RunTable) -> Iterator[Problem]:
    if run.on_nan == "stop" and run.max_skips is not None:
        message = '`max_skips` limits steps that are skipped, but `on_nan = "stop"` skips none'
        yield Problem(("run", "max_skips"), message, 'leave it out, or write on_nan = "skip"', "skips-unused")


def _check_profile(run: RunTable, profile: Table | None) -> Iterator[Problem]:
    """Yields a problem if the steps to profile are not in the run.

    An interval of evaluations may be longer than the run, which evaluates at its end in any case.
    """
    if not isinstance(profile, ProfileTable):
        return
    first, last = profile.steps
    path: KeyPath = ("profile", "steps")
    if first > last:
        message = f"the first step to record, {first}, comes after the last, {last}"
        yield Problem(path, message, f"write [{last}, {first}]", "beyond-the-run")
    elif last > run.steps:
        message = f"the run has {run.steps} steps, so steps {first} to {last} cannot be recorded"
        yield Problem(path, message, f"the last step is {run.steps}", "beyond-the-run")


def _check_batch(batch: BatchTable, dp: int) -> Iterator[Problem]:
    """Yields a problem, with sizes that fit, if global_size is not a multiple of dp x micro_size."""
    size, micro = batch.global_size, batch.micro_size
    unit = dp * micro
    if size % unit == 0:
        return
    below = size // unit * unit
    sizes = f"{below} or {below + unit}" if below else f"{unit}"
    most = min(size // dp, 1000) if size % dp == 0 else 0  # a larger micro-batch is not worth proposing
    micros = [near for near in range(1, most + 1) if size // dp % near == 0]
    better = f", or micro_size = {min(micros, key=lambda near: (abs(near - micro), near))}" if micros else ""
    message = f"global_size = dp x micro_size x accumulation fails: {size} is no multiple of {dp} x {micro} = {unit}"
    yield Problem(("batch", "global_size"), message, f"use global_size = {sizes}{better}", "batch-does-not-divide")
