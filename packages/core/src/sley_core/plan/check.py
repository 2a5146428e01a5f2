"""Checks whether a valid plan can run with a given number of ranks. Imports no torch and starts no process."""

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from sley_core import records
from sley_core.errors import Diagnostic, KeyPath, PlanError, install_hint, suggestion
from sley_core.optim.config import FactoryOptimizerConfig, scope_of
from sley_core.plan.document import sort_by_place
from sley_core.plan.kinds import CHECKPOINTER
from sley_core.plan.plan import Component, Plan
from sley_core.plan.tables import BEST_MODES, BatchTable, ModelConfig, metric_row_key, parse_metric
from sley_core.topology import Topology

MAX_FORWARDS = 1_000_000
"""The largest number of forwards (chunks x microbatches) per step. Checking longer action lists takes minutes and gigabytes."""


def check_plan(plan: Plan, world_size: int) -> list[Diagnostic]:
    """Returns all problems of `plan` on `world_size` ranks, sorted by place. If the layout fits the ranks, includes the
    problems that the plugins' hooks `sley_check_plan` return. Raises PluginError "plugin-failed" if a hook fails.
    """
    checks = (check_offload, check_canonical, _check_precision, _check_profile, _check_parts, _check_keep_best)
    problems = [problem for check in checks for problem in check(plan)]
    diagnostics: list[Diagnostic] = []
    try:
        topology = plan.topology(world_size)
    except PlanError as error:
        diagnostics += error.diagnostics
    else:
        problems += [*_check_batch(plan.batch, topology.dp), *_check_optimizer(plan, topology), *check_handlers(plan, topology)]
        problems += _check_all_data(plan)
        diagnostics += _check_schedule(plan, topology)
        for _, plugin_problems in plan.call("sley_check_plan", plan=plan, topology=topology):
            problems += plugin_problems
    diagnostics += [plan.diagnostic(problem.code, problem.message, problem.path, problem.hint) for problem in problems]
    return sort_by_place(diagnostics)


def require_valid(plan: Plan, world_size: int) -> None:
    """Raises PlanError with all problems of `plan` on `world_size` ranks, if there are any."""
    if problems := check_plan(plan, world_size):
        raise PlanError.from_diagnostics(problems)


NEEDED_TABLES = {
    "pp": ("pipeline", "a schedule", '`use = "pp.one_f_one_b"`'),
    "wp": ("weights", "a weight communicator", '`use = "isp.communicator"` from sley-isp'),
    "sp": ("sequence", "an attention over split sequences", '`use = "isp.all_to_all"` from sley-isp'),
}
"""The table that a plan needs if an axis of [parallel] has several ranks, the part that the table names, and an example."""


def _check_parts(plan: Plan) -> Iterator[records.Problem]:
    """Yields a problem for each missing part, and for parts that do not fit `compile`, `sp` or the sequence length."""
    for axis, (table, part, example) in NEEDED_TABLES.items():
        if (size := getattr(plan.parallel, axis)) > 1 and getattr(plan, table) is None:
            message = f"`{axis} = {size}` needs a [{table}] table that names {part}"
            yield records.Problem(("parallel", axis), message, f"add a [{table}] table with {example}", f"{table}-missing")
    config = plan.model.config
    is_compiled = isinstance(config, ModelConfig) and config.compile
    if is_compiled and plan.precision.accumulation == "direct":  # it needs hooks that compiled layers lack
        message = "compiled layers do not support direct accumulation of weight gradients"
        hint = 'use `accumulation = "autograd"`, or remove `compile`'
        yield records.Problem(("precision", "accumulation"), message, hint, "accumulation-compiled")
    partition, sp = plan.partition, plan.parallel.sp
    timer = partition.record.timer if partition and isinstance(partition.record, records.PartitionerRecord) else None
    if partition and timer is not None and not partition.config.layer_costs:
        package = timer.partition(".")[0]
        if find_spec(package) is None:
            hint = install_hint(package.removeprefix("sley_")) if package.startswith("sley_") else f"install `{package}`"
            message = f"`{partition.name}` times layers with `{package}`, which is not installed"
            yield records.Problem(("partition", "use"), message, f"{hint}; or set `layer_costs`", "timer-missing")
        if sp > 1:
            message = f"`{partition.name}` times layers on whole sequences, but with `sp = {sp}` a rank has only slices"
            hint = 'use "pp.balanced", or set `layer_costs`'
            yield records.Problem(("partition", "use"), message, hint, "sequence-partition")
    length = getattr(plan.data.config, "sequence", None)
    if isinstance(length, int) and length % sp:
        message = f"the sequence length must be a multiple of sp = {sp}, but is {length}"
        smaller = f"{length // sp * sp} or " if length > sp else ""
        hint = f"use sequence = {smaller}{(length // sp + 1) * sp}"
        yield records.Problem(("data", "sequence"), message, hint, "sequence-does-not-divide")


def _check_schedule(plan: Plan, topology: Topology) -> list[Diagnostic]:
    """Returns the problems of the schedule; [] if the plan has no schedule, or if `_check_batch` yields a problem."""
    if plan.pipeline is None or plan.batch.global_size % (topology.dp * plan.batch.micro_size):
        return []
    # Imported only if there is a schedule, so that other plans are checked faster.
    from sley_core.actions.action import Kind
    from sley_core.actions.lower import lower

    micros = plan.num_microbatches(topology)
    try:
        schedule = plan.pipeline.build()
        placement = schedule.placement(topology.pp)
        if placement.num_positions * micros > MAX_FORWARDS:
            num_forwards = f"{micros} microbatches x {placement.num_positions} chunks"
            message = f"a step must have at most {MAX_FORWARDS:,} forwards, but has {num_forwards}"
            hint = "increase `batch.micro_size`, or reduce `pp`"
            return [plan.diagnostic("schedule-too-long", message, ("batch", "micro_size"), hint)]
        lists = schedule.lists(topology.pp, micros)
        lower(lists, placement, micros)
    except PlanError as error:
        return list(plan.add_locations(error).diagnostics)
    if plan.model.config.compile and any(action.kind is Kind.INPUT_GRADIENT for actions in lists for action in actions):
        message = (
            f"`{plan.pipeline.name}` splits backwards into input and weight gradients, which compiled layers do not support"
        )
        hint = "use a schedule with whole backwards, such as `pp.one_f_one_b`, or remove `compile`"
        return [plan.diagnostic("split-compiled", message, ("model", "compile"), hint)]
    return []


SCOPE_DESCRIPTIONS = {"per_matrix": "needs whole matrices", "global": "needs all gradients at once"}  # for messages
SCOPE_HINT = (
    ', or set `scope` to "elementwise" or "matrix" if the update of an element, or of a parameter, reads only its own gradient'
)


def _check_optimizer(plan: Plan, topology: Topology) -> Iterator[records.Problem]:
    """Yields a problem if no rank has all gradients on which an update of the optimizer depends."""
    scope = scope_of(plan.optimizer.record, plan.optimizer.config)
    sharders = [handler.name for handler in plan.gradient_handlers if getattr(handler.record, "result", None) == "shard"]
    hosts = [manager.name for manager in plan.offload if records.steps_on_host(manager.record)]
    # The owner of a matrix gathers its parts from the other ranks, but only on the device.
    if scope == "elementwise" or (scope == "per_matrix" and not hosts):
        return
    if topology.wp > 1:
        layout = f"with `wp = {topology.wp}` a rank has only shards"
    elif sharders and topology.ranks_per_stage > 1:
        layout = f"with `{sharders[0]}` a rank has only shards"
    elif scope in ("global", "unknown") and topology.pp > 1:
        layout = f"with `pp = {topology.pp}` a rank has only a part of the model"
    else:
        return
    hint = "use an elementwise optimizer such as `core.adamw`" + (SCOPE_HINT if scope == "unknown" else "")
    if scope == "per_matrix":
        layout += f", and `{hosts[0]}` does not gather them"
        hint = f"remove `{hosts[0]}`, or {hint}"
    needs = SCOPE_DESCRIPTIONS.get(scope, "may need whole matrices, or all gradients at once")
    key = "use" if plan.optimizer.record else "factory"
    yield records.Problem(("optimizer", key), f"`{plan.optimizer.name}` {needs}, but {layout}", hint, "optimizer-layout")


CANONICAL_NORMS = (1.0, 2.0, math.inf, "inf")
"""The values of `clip_kind` for which every kernel computes the terms of the norm with the same bits."""


def check_canonical(plan: Plan) -> Iterator[records.Problem]:
    """If `parallel.reduction` is "canonical", yields a problem for each part of the plan that does not support this value."""
    if plan.parallel.reduction != "canonical":
        return
    if plan.parallel.sp > 1:
        message = f"`sp = {plan.parallel.sp}` changes the shapes of matrix products"
        yield _canonical_problem(("parallel", "sp"), message, "use `sp = 1`")
    if isinstance(plan.model.config, ModelConfig) and plan.model.config.compile:
        message = "compiled layers choose their own order of summation"
        yield _canonical_problem(("model", "compile"), message, "remove `compile`")
    if plan.precision.accumulation == "autograd":
        message = "autograd adds weight gradients in the order of its graph"
        yield _canonical_problem(("precision", "accumulation"), message, 'set `accumulation = "direct"`')
    config: Any = plan.optimizer.config
    if config.clip_kind not in CANONICAL_NORMS:
        message = f"kernels differ in how they round the powers in the {config.clip_kind:g}-norm"
        yield _canonical_problem(("optimizer", "clip_kind"), message, 'set `clip_kind` to 1, 2 or "inf"')
    if isinstance(config, FactoryOptimizerConfig) and config.options.get("fused"):
        message = (
            "a fused optimizer rounds the last elements of a tensor differently, which makes its results depend on the shards"
        )
        yield _canonical_problem(("optimizer", "options"), message, "remove `fused`")
    for number, handler in enumerate(plan.gradient_handlers):
        record = handler.record
        if not isinstance(record, records.GradientHandlerRecord) or record.role == "observer":
            continue
        if not record.fixed_order or record.tolerance_for(handler.config):
            message = f"`{handler.name}` does not compute exact sums in a fixed order"
            hint = "use `core.each`, `dp.bucketed` or `dp.sharded`"
            yield _canonical_problem(("gradient_handlers", number, "use"), message, hint)
    weights = plan.weights
    if weights and isinstance(weights.record, records.WeightCommunicatorRecord) and not weights.record.fixed_order:
        message = f"`{weights.name}` does not sum weight gradients in a fixed order"
        yield _canonical_problem(("weights", "use"), message, "use `isp.communicator`")


def _canonical_problem(path: KeyPath, message: str, hint: str) -> records.Problem:
    hint = f'{hint}, or set `reduction = "fast"`'
    return records.Problem(path, f'{message}, so `reduction = "canonical"` is not possible', hint, "canonical-unsupported")


SCOPE_ORDER = {"elementwise": 0, "per_matrix": 1, "global": 2, "unknown": 3}
"""The position of each optimizer scope in the order from narrow to wide."""


def check_offload(plan: Plan) -> Iterator[records.Problem]:
    """Yields a problem if two managers of `[[offload]]` share a part, or one does not fit the optimizer or `[averaging]`."""
    manager_by_part: dict[str, str] = {}
    for number, component in enumerate(plan.offload):
        record = component.record
        assert isinstance(record, records.OffloadManagerRecord), component.name
        for part in record.parts(component.config):
            if part in manager_by_part:
                message = f"`{manager_by_part[part]}` and `{component.name}` both offload the run's {part.replace('_', ' ')}"
                yield records.Problem(("offload", number, "use"), message, "remove one of them", "offload-twice")
                break
            manager_by_part[part] = component.name
        supported, needed = record.scope(component.config), scope_of(plan.optimizer.record, plan.optimizer.config)
        if supported != "global" and SCOPE_ORDER[needed] > SCOPE_ORDER[supported]:
            needs = "may need all gradients at once" if needed == "unknown" else "needs all gradients at once"
            message = f"`{component.name}` updates a few weights at a time, but `{plan.optimizer.name}` {needs}"
            hint = "use an optimizer such as `core.adamw`" + (SCOPE_HINT if needed == "unknown" else "")
            yield records.Problem(("offload", number, "use"), message, hint, "offload-optimizer")
        if plan.averaging is not None and supported != "global" and not record.steps_on_host:
            message = f"`{component.name}` offloads the averages of [averaging] after each update, but evaluations need them"
            hint = 'use `when = "idle"`, or `memory.host_optimizer`'
            yield records.Problem(("offload", number, "use"), message, hint, "offload-averages")


UNIQUE_ROLES: tuple[records.Role, ...] = ("reducer", "tie")
"""The roles that only one handler of a plan may have, because a second sum would be wrong."""


def check_handlers(plan: Plan, topology: Topology) -> Iterator[records.Problem]:
    """Yields the problems of the plan's gradient handlers: a missing reducer, a handler that is listed twice, two handlers for
    one role in `UNIQUE_ROLES`, a wrong order, and a handler that needs whole gradients but gets shards.
    """
    handlers = [
        (("gradient_handlers", number, "use"), handler.name, handler.record)
        for number, handler in enumerate(plan.gradient_handlers)
        if isinstance(handler.record, records.GradientHandlerRecord)
    ]
    num_ranks = topology.ranks_per_stage
    if num_ranks > 1 and not any(record.role == "reducer" for _, _, record in handlers):
        message = f"{num_ranks} ranks hold the same weights, but no gradient handler sums their gradients"
        hint = 'add [[gradient_handlers]] with `use = "core.each"`, or remove the list'
        yield records.Problem(("gradient_handlers",), message, hint, "handler-missing")
    name_by_role: dict[records.Role, str] = {}
    for number, (path, name, record) in enumerate(handlers):
        if name in [peer for _, peer, _ in handlers[:number]]:
            yield records.Problem(path, f"`{name}` is listed twice", "remove one of them", "handler-twice")
            continue
        if record.role in UNIQUE_ROLES and record.role in name_by_role:
            job = "sum gradients" if record.role == "reducer" else "sum gradients of shared weights"
            message = f"`{name_by_role[record.role]}` and `{name}` both {job}, so the sum would be wrong"
            yield records.Problem(path, message, "remove one of them", "handler-conflict")
        name_by_role.setdefault(record.role, name)
    for number, (path, name, record) in enumerate(handlers):
        conflicts = [("before", peer, role.role) for _, peer, role in handlers[:number] if role.role in record.before]
        conflicts += [("after", peer, role.role) for _, peer, role in handlers[number + 1 :] if role.role in record.after]
        for order, peer, role in conflicts:
            message = f"`{name}` must come {order} `{peer}`, because it must run {order} every {role}"
            yield records.Problem(path, message, f"move its table {order} that of `{peer}`", "handler-order")
    reducer = ""
    for path, name, record in handlers:
        if reducer and record.role in ("tie", "transform") and not record.accepts_shards:
            message = f"`{name}` needs whole gradients, but `{reducer}` leaves only a shard on each rank"
            yield records.Problem(path, message, "use a reducer such as `dp.bucketed`", "handler-shards")
        if record.role == "reducer" and record.result == "shard" and num_ranks > 1:
            reducer = name


def has_tie_handler(plan: Plan) -> bool:
    """Returns whether a gradient handler of the plan sums the gradients of parameters shared by several stages."""
    handlers = (handler.record for handler in plan.gradient_handlers)
    return any(isinstance(record, records.GradientHandlerRecord) and record.role == "tie" for record in handlers)


GRADIENT_DTYPES = {"fp32": ("fp32",), "bf16": ("fp32", "bf16"), "fp16": ("fp32",), "fp64": ("fp64",)}
"""The supported values of `precision.gradients` for each value of `precision.compute`; the first is the default."""


def _check_precision(plan: Plan) -> Iterator[records.Problem]:
    """Yields a problem if `gradients` does not fit `compute`, or if the loss scale has no effect or a wrong range."""
    compute, gradients, scale = plan.precision.compute, plan.precision.gradients, plan.precision.loss_scale
    if gradients not in GRADIENT_DTYPES[compute]:
        dtypes = " or ".join(GRADIENT_DTYPES[compute])
        message = f'with `compute = "{compute}"`, gradients must be accumulated in {dtypes}, not {gradients}'
        hint = f'use "{GRADIENT_DTYPES[compute][0]}", or remove the key'
        yield records.Problem(("precision", "gradients"), message, hint, "precision-unsupported")
    path: KeyPath = ("precision", "loss_scale")
    if scale is not None and compute != "fp16":
        message = f"only fp16 uses a loss scale, but this plan computes in {compute}"
        yield records.Problem(path, message, "remove `loss_scale`", "loss-scale-unused")
    elif scale is not None and scale.min_scale > scale.init_scale:
        message = f"the loss scale would start at {scale.init_scale:g}, below its minimum {scale.min_scale:g}"
        yield records.Problem((*path, "min_scale"), message, f"use min_scale = {scale.init_scale} or less", "loss-scale-range")


def _check_profile(plan: Plan) -> Iterator[records.Problem]:
    first, last = plan.profile.steps if plan.profile else (1, 1)
    if not first <= last <= plan.run.steps:
        message = f"the run has {plan.run.steps} steps, so steps {first} to {last} cannot be recorded"
        yield records.Problem(("profile", "steps"), message, f"use steps up to {plan.run.steps}", "beyond-the-run")


def check_data(data: Component, model: Component, *, evaluates: bool) -> Iterator[records.Problem]:
    """Yields the problems that the dataset's record finds in the table `data` and in the files that this table names. Yields
    none for a dataset from a factory. model: may set the vocabulary size. evaluates: whether the plan needs held-out data.
    """
    if isinstance(data.record, records.DatasetRecord) and data.record.check is not None:
        vocab_size = None if model.record is None else getattr(model.config, "vocab_size", None)
        yield from data.record.load(data.record.check)(data.config, evaluates=evaluates, vocab_size=vocab_size)


def _check_all_data(plan: Plan) -> Iterator[records.Problem]:
    """Yields the problems of `[data]` and of the data of each evaluation set."""
    evaluates = plan.evaluation is not None and plan.evaluation.held_out
    for problem in check_data(plan.data, plan.model, evaluates=evaluates):
        if problem.code == "held-out" and plan.evaluation_sets:
            problem = replace(problem, hint=f"{problem.hint}; or set `held_out = false` to evaluate only on the sets")
        yield problem
    for name, evaluation_set in plan.evaluation_sets.items():
        for problem in check_data(evaluation_set.data, plan.model, evaluates=evaluation_set.settings.split == "held_out"):
            yield replace(problem, path=("evaluation", "sets", name, *problem.path[1:]))


def _check_keep_best(plan: Plan) -> Iterator[records.Problem]:
    """Yields a problem if no checkpointer can keep the best checkpoint, or `keep_best` names an unknown metric."""
    best = plan.evaluation.best if plan.evaluation is not None else None
    if plan.evaluation is None or best is None:
        return
    path: KeyPath = ("evaluation", "keep_best")
    if plan.checkpoint is None:
        message = "`keep_best` keeps a checkpoint, but the plan saves no checkpoints"
        yield records.Problem(path, message, "add a [checkpoint] table, for example with `every_steps = 1000`", "keep-best")
    elif not getattr(plan.checkpoint.record, "keeps_best", False):
        message = f"`{plan.checkpoint.name}` does not support `keep_best`"
        yield records.Problem(path, message, f'use "{CHECKPOINTER}" in [checkpoint], or remove `keep_best`', "keep-best")
    sets = [*([""] if plan.evaluation.held_out else []), *plan.evaluation_sets]
    names = [metric_row_key(metric, set_name) for set_name in sets for metric in BEST_MODES]
    custom_names = [
        metric_row_key(parse_metric(best.metric), set_name) for set_name in sets if plan.evaluation.metric is not None
    ]
    if best.metric not in (*names, *custom_names):
        hint = suggestion(best.metric, names, f"use one of {', '.join(names)}")
        yield records.Problem(path, f"an evaluation with this plan has no metric `{best.metric}`", hint, "keep-best")


def _check_batch(batch: BatchTable, dp: int) -> Iterator[records.Problem]:
    """Yields a problem, with sizes that fit, unless `global_size` is a multiple of `dp x micro_size`."""
    size, micro = batch.global_size, batch.micro_size
    unit = dp * micro
    if size % unit:
        smaller = size // unit * unit
        sizes = f"{smaller} or {smaller + unit}" if smaller else f"{unit}"
        micros = [divisor for divisor in range(min(micro, size // dp), 0, -1) if size % (dp * divisor) == 0]
        hint = f"use global_size = {sizes}" + (f", or micro_size = {micros[0]}" if micros else "")
        message = f"global_size must be a multiple of dp x micro_size = {dp} x {micro} = {unit}, but is {size}"
        yield records.Problem(("batch", "global_size"), message, hint, "batch-does-not-divide")
