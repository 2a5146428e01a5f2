"""Lists the possible layouts of a plan in a world: sizes, microbatches, and the choices for its tables.

A layout replaces some tables of a plan; `Layout.apply` returns the resulting plan, which is checked like any other. The choices
for a table are the plan's own table, which comes first, and the variants that installed plugins list in their hints. A plugin
can give hints without requiring this package: it returns plain mappings, and `optionalhook` permits a hook that no installed
package declares.

    @hookimpl(optionalhook=True)
    def sley_estimate_hints():
        return {"mine.reducer": {"variants": [{}, {"bucket_mb": 50}]}}
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from pydantic import ValidationError

from sley_core import records
from sley_core.errors import PluginError, UsageError
from sley_core.hookspecs import hookspec
from sley_core.plan.document import to_plain_data
from sley_core.plan.load import resolve_plan
from sley_core.plan.loader import CORE, Plugin
from sley_core.plan.plan import Component, Plan

Axis = Literal["pp", "sp", "wp", "micro_size", "schedule", "activations", "reducer"]
"""The properties in which layouts differ. With the number of ranks, they determine `dp`. All layouts use the plan's offload."""

AXES: tuple[Axis, ...] = get_args(Axis)  # the names of the properties in which layouts differ

MAX_SLICES = 64  # the largest `sp` to try: ranks that split sequences also divide the heads, and few models have more heads


@hookspec
def sley_estimate_hints() -> Mapping[str, Mapping[str, Any]]:  # type: ignore[empty-body]
    """Returns hints for `train-cli search`, keyed by the full name of a record (`"plugin.record"`):

    variants: the tables, without `use`, that a search tries. `[{}]` means one table with the defaults. Without variants, a
        search uses the record only if the plan does.
    offloads_activations: whether the activation policy copies saved tensors to the host, for the layers in its attribute
        `names`. The default is False.
    moves_every_step: for an offload manager, a function that takes the manager's config and returns whether it moves optimizer
        states in every step. The default returns True.
    """


@dataclass(frozen=True)
class Hint:
    """A plugin's hint for one record. variants: the tables that a search tries. offloads_activations: whether the activation
    policy copies saved tensors to the host. moves_every_step: returns whether an offload manager with this config moves states
    in every step.
    """

    variants: Sequence[Mapping[str, Any]] = ()
    offloads_activations: bool = False
    moves_every_step: Callable[[Any], bool] = lambda config: True


NO_HINT = Hint()  # the hint for a record if its plugin gives none

CORE_HINTS = {f"{CORE}.{name}": Hint(variants=({},)) for name in ("each", "keep", "recompute")}
"""The hints for the records of core. A search tries each of these three records with its default options."""


def plugin_hints(plugin: Plugin) -> Mapping[str, Hint]:
    """Returns a plugin's hints by full record name. Raises PluginError "plugin-invalid" for a failing hook or invalid hints."""
    if plugin.name == CORE:
        return CORE_HINTS
    hook = getattr(plugin.hooks, sley_estimate_hints.__name__, None)
    if hook is None:
        return {}
    names = {f"{plugin.name}.{name}" for name in plugin.records}
    try:
        hints = {name: Hint(**options) for mapping in hook() for name, options in mapping.items()}
        if unknown := sorted(hints.keys() - names):
            raise ValueError(f"it names `{unknown[0]}`, which the plugin does not have")
    except Exception as error:
        message = f"{plugin.label} failed in `{sley_estimate_hints.__name__}`: {type(error).__name__}: {error}"
        raise PluginError("plugin-invalid", message) from error
    return hints


def component_hint(component: Component) -> Hint:
    """Returns the hint for the record of `component`, or `NO_HINT` if there is none. Raises the errors of `plugin_hints`."""
    return NO_HINT if component.plugin is None else plugin_hints(component.plugin).get(component.name, NO_HINT)


@dataclass(frozen=True)
class Choice:
    """One way to fill a table of a plan, such as `[activations]`. name: the full name of the record. options: the keys of the
    table except `use`. record: None for a factory. config: the validated options. offloads_activations: whether the activation
    policy copies saved tensors to the host.
    """

    name: str
    options: Mapping[str, Any]
    record: records.Record | None = field(default=None, compare=False, repr=False)
    config: Any = field(default=None, compare=False, repr=False)
    offloads_activations: bool = field(default=False, compare=False, repr=False)

    @property
    def table(self) -> dict[str, Any]:
        """Returns the table for a plan: the options and `use`."""
        return {"use": self.name, **self.options}

    def __str__(self) -> str:
        return self._text

    def __hash__(self) -> int:
        return hash(self._text)

    @cached_property
    def _text(self) -> str:  # cached, since every layout uses it
        options = ", ".join(f"{key} = {value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(frozen=True)
class Choices:
    """The choices for each table that a layout replaces. weights, attention: empty if neither the plan nor an installed plugin
    offers a choice. skip_reasons: one text for each plugin that could not be loaded, and for each variant with invalid options.
    """

    schedules: tuple[Choice, ...]
    policies: tuple[Choice, ...]
    reducers: tuple[Choice, ...]
    weights: tuple[Choice, ...]
    attention: tuple[Choice, ...]
    skip_reasons: tuple[str, ...] = ()


def list_choices(plan: Plan) -> Choices:
    """Imports the installed plugins, and returns the choices for each table of `plan`. The plan's own choice is the first."""
    skip_reasons: list[str] = []
    plugins = []
    for name in plan.loader.names():
        try:
            plugin = plan.loader.load(name)
            plugins.append((plugin, plugin_hints(plugin)))
        except PluginError as error:
            skip_reasons.append(f"{name}: {error.diagnostics[0].message}")

    def table_choices(component: Component | None, record_type: type[records.Record]) -> tuple[Choice, ...]:
        choices = [] if component is None else [_plan_choice(component)]
        for plugin, hints in plugins:
            for name, record in plugin.records_of(record_type).items():
                hint = hints.get(name, NO_HINT)
                for options in hint.variants if record_type is not records.GradientHandlerRecord or _is_reducer(record) else ():
                    try:
                        config = record.config.model_validate(options)
                    except ValidationError as error:
                        skip_reasons.append(f"{name}: its variant {dict(options)} is invalid: {error.errors()[0]['msg']}")
                        continue
                    if component is None or (name, config) != (component.name, component.config):
                        choices.append(Choice(name, options, record, config, hint.offloads_activations))
        return tuple(choices)

    return Choices(
        table_choices(plan.pipeline, records.ScheduleRecord),
        table_choices(plan.activations, records.ActivationPolicyRecord),
        table_choices(
            next((handler for handler in plan.gradient_handlers if _is_reducer(handler.record)), None),
            records.GradientHandlerRecord,
        ),
        table_choices(plan.weights, records.WeightCommunicatorRecord),
        table_choices(plan.sequence, records.SequenceAttentionRecord),
        tuple(skip_reasons),
    )


def _is_reducer(record: records.Record | None) -> bool:
    return isinstance(record, records.GradientHandlerRecord) and record.role == "reducer"


def _plan_choice(component: Component) -> Choice:
    """Returns the plan's own table for `component` as a choice, which has no options if the plan has no such table."""
    table: Any = component.document.tables
    for key in component.path:
        if isinstance(table, dict) and key not in table:  # the component is a default, which has no table in the plan
            table = {}
            break
        table = table[key]
    options = {key: value for key, value in table.items() if key != "use"}
    return Choice(component.name, options, component.record, component.config, component_hint(component).offloads_activations)


class Layout(NamedTuple):
    """One way to run a plan on a given number of ranks. pp: the number of stages. sp: the number of ranks that split each
    sequence. wp: the number of ranks that shard each weight. micro_size: the samples in a microbatch. schedule: None if there
    is one stage. reducer: None if each stage has one rank. weights: None if `wp` is 1. attention: None if `sp` is 1.
    """

    pp: int
    sp: int
    wp: int
    micro_size: int
    schedule: Choice | None
    activations: Choice
    reducer: Choice | None
    weights: Choice | None = None
    attention: Choice | None = None

    def num_microbatches(self, plan: Plan, world_size: int) -> int:
        """Returns the number of microbatches that each rank runs per step. world_size: the number of ranks."""
        return plan.batch.global_size // (world_size // (self.pp * self.sp) * self.micro_size)

    def apply(self, plan: Plan, world_size: int) -> Plan:
        """Returns `plan` in this layout. Omits a partition that lists the lengths of stages (`pp.explicit`) and, for one stage,
        the `[link]` and `[partition]` tables. Raises PlanError for invalid tables. world_size: the number of ranks.
        """
        schedule, tables = self.schedule, dict(plan.document.tables)
        sizes = {"dp": world_size // (self.pp * self.sp), "pp": self.pp, "sp": self.sp, "wp": self.wp}
        # The gradient handlers are the reducer, the schedule's handler of tied weights, and the plan's other handlers.
        handlers = [self.reducer.table] if self.reducer else []
        record = schedule.record if schedule else None
        handlers += [{"use": record.ties}] if isinstance(record, records.ScheduleRecord) and record.ties else []
        handlers += [
            table
            for component, table in zip(plan.gradient_handlers, tables.get("gradient_handlers", ()), strict=False)
            if not (isinstance(component.record, records.GradientHandlerRecord) and component.record.role in ("reducer", "tie"))
        ]
        tables |= {
            "parallel": {**tables.get("parallel", {}), **sizes},
            "batch": {**tables.get("batch", {}), "micro_size": self.micro_size},
            "activations": self.activations.table,
            "gradient_handlers": handlers,
            "pipeline": schedule and schedule.table,
            "weights": self.weights and self.weights.table,
            "sequence": self.attention and self.attention.table,
        }
        if schedule is None:
            tables |= {"link": None, "partition": None}
        elif plan.partition is not None and plan.partition.name == "pp.explicit":
            tables["partition"] = None
        return resolve_plan(replace(plan.document, tables=to_plain_data(tables)), plan.loader)

    def __str__(self) -> str:
        sizes = f"pp {self.pp}, sp {self.sp}, wp {self.wp}, micro_size {self.micro_size}"
        return "; ".join([sizes, *(str(choice) for choice in self[4:] if choice is not None)])


@dataclass
class Layouts:
    """Lists the layouts of `plan` that divide `world_size` ranks and the batch evenly. keep_axes: the axes on which every
    layout has the plan's own value or choice. Raises UsageError "no-axis" for an unknown axis.
    """

    plan: Plan
    world_size: int
    choices: Choices
    keep_axes: Collection[str] = ()

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.keep_axes) - set(AXES)):
            raise UsageError("no-axis", f"unknown axis `{unknown[0]}`", hint=f"use one of {', '.join(AXES)}")

    def all_layouts(self) -> Iterator[Layout]:
        """Yields every layout in a fixed order."""

        def choices_for(axis: Axis, offered: tuple[Choice, ...]) -> tuple[Choice, ...]:
            return offered[:1] if axis in self.keep_axes else offered

        choices = self.choices
        schedules = choices.schedules if self.plan.pipeline is None else choices_for("schedule", choices.schedules)
        for pp, sp, wp, micro_size in self.sizes():
            for policy, weights, schedule, reducer in product(
                choices_for("activations", choices.policies),
                choices_for("wp", choices.weights) if wp > 1 else (None,),
                schedules if pp > 1 else (None,),
                choices_for("reducer", choices.reducers) if self.world_size > pp else (None,),
            ):
                attention = choices.attention[0] if sp > 1 else None
                yield Layout(pp, sp, wp, micro_size, schedule, policy, reducer, weights, attention)

    def sizes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (pp, sp, wp, micro_size) for each even division. micro_size is a power of two, unless it is in `keep_axes`."""
        parallel, world_size, choices, batch = self.plan.parallel, self.world_size, self.choices, self.plan.batch
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        slice_counts = [size for size in divisors if size <= MAX_SLICES]
        stages = [parallel.pp] if "pp" in self.keep_axes else divisors if choices.schedules else [1]
        slices = [parallel.sp] if "sp" in self.keep_axes else slice_counts if choices.attention else [1]
        shards = [parallel.wp] if "wp" in self.keep_axes else divisors if choices.weights else [1]
        for pp, sp, wp in product(stages, slices, shards):
            if world_size % (pp * sp) or world_size % (pp * wp) or batch.global_size % (world_size // (pp * sp)):
                continue
            rows = batch.global_size // (world_size // (pp * sp))
            powers = [1 << bits for bits in range(rows.bit_length())]
            for micro_size in [batch.micro_size] if "micro_size" in self.keep_axes else powers:
                if rows % micro_size == 0:
                    yield pp, sp, wp, micro_size
