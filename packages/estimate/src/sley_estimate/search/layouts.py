"""Lists the possible layouts of a plan in a world: sizes, microbatches, and the choices for its tables.

A layout changes the plan's tables. `Layout.plan` applies it, with the same checks as for any plan. The choices are the plan's
own, which come first, and all records of installed plugins with variants in a hint (`hookspecs.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from pydantic import ValidationError

from sley_core import records
from sley_core.errors import PluginError, UsageError
from sley_core.plan.plan import Component, Plan
from sley_estimate.hookspecs import NO_HINT, plugin_hints, record_hint
from sley_estimate.layers.variants import replace_tables

Axis = Literal["pp", "sp", "wp", "micro_size", "schedule", "activations", "reducer"]
"""The axes on which layouts differ; `dp` follows from them. Offload is that of the plan."""

AXES: tuple[Axis, ...] = get_args(Axis)

MAX_SLICES = 64  # the largest number of ranks per sequence, since attention seldom has more heads


@dataclass(frozen=True)
class Choice:
    """One way to fill a table. name: the name of the record. options: the other keys of the table. config: the whole table.
    record, config: None for a factory. copies: whether it is a policy that copies saved tensors to the host.
    """

    name: str
    options: Mapping[str, Any]
    record: records.Record | None = field(default=None, compare=False, repr=False)
    config: Any = field(default=None, compare=False, repr=False)
    copies: bool = field(default=False, compare=False, repr=False)

    @property
    def table(self) -> dict[str, Any]:
        return {"use": self.name, **self.options}

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:  # used for every layout
        options = ", ".join(f"{key} = {value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(frozen=True)
class Choices:
    """The choices for each table. weights, attention: empty if no installed plugin shards weights or attends over slices.

    skipped: plugins that could not be loaded and variants that their records refuse, with the reason.
    """

    schedules: tuple[Choice, ...]
    policies: tuple[Choice, ...]
    reducers: tuple[Choice, ...]
    weights: tuple[Choice, ...]
    attention: tuple[Choice, ...]
    skipped: tuple[str, ...] = ()


def list_choices(plan: Plan) -> Choices:
    """Imports the installed plugins and returns the choices for each table, the plan's own choice first."""
    skipped: list[str] = []
    plugins = []
    for name in plan.loader.names():
        try:
            plugin = plan.loader.load(name)
            plugins.append((plugin, plugin_hints(plugin)))
        except PluginError as error:
            skipped.append(f"{name}: {error.diagnostics[0].message}")

    def installed_choices(record_type: type[records.Record]) -> list[Choice]:
        choices = []
        for plugin, hints in plugins:
            for name, record in plugin.records_of(record_type).items():
                hint = hints.get(name, NO_HINT)
                for options in hint.variants:
                    try:
                        choices.append(Choice(name, options, record, record.config.model_validate(options), hint.copies))
                    except ValidationError as error:
                        reason = error.errors()[0]["msg"]
                        skipped.append(f"{name}: its variant {dict(options)} is invalid: {reason}")
        return choices

    def is_reducer(record: object) -> bool:
        return isinstance(record, records.GradientHandlerRecord) and record.role == "reducer"

    def plan_choice_first(component: Component | None, record_type: type[records.Record]) -> tuple[Choice, ...]:
        alternatives = [
            choice
            for choice in installed_choices(record_type)
            if record_type is not records.GradientHandlerRecord or is_reducer(choice.record)
        ]
        if component is None:
            return tuple(alternatives)
        return (
            _plan_choice(plan, component),
            *(choice for choice in alternatives if (choice.name, choice.config) != (component.name, component.config)),
        )

    return Choices(
        plan_choice_first(plan.pipeline, records.ScheduleRecord),
        plan_choice_first(plan.activations, records.ActivationPolicyRecord),
        plan_choice_first(
            next((choice for choice in plan.gradient_handlers if is_reducer(choice.record)), None),
            records.GradientHandlerRecord,
        ),
        plan_choice_first(plan.weights, records.WeightCommunicatorRecord),
        plan_choice_first(plan.sequence, records.SequenceAttentionRecord),
        tuple(skipped),
    )


def _plan_choice(plan: Plan, component: Component) -> Choice:
    """Returns a table of the plan as a choice with the options in the plan."""
    table: Any = component.document.tables
    for key in component.path:
        if isinstance(table, dict) and key not in table:  # a default that is not in the plan
            table = {}
            break
        table = table[key]
    options = {key: value for key, value in table.items() if key not in ("use", "factory")}
    copies = record_hint(plan.loader, component.name).copies
    return Choice(component.name, options, component.record, component.config, copies)


class Layout(NamedTuple):
    """One way to run a plan in a world: the ranks of each axis, the samples of a microbatch, and the choice for each table.

    schedule: None without stages. reducer: None if no two ranks hold the same weight. weights, attention: None if the axis has
    one rank.
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

    def num_micro_batches(self, plan: Plan, world: int) -> int:
        """Returns the number of microbatches of a rank in a step."""
        return plan.batch.global_size // (world // (self.pp * self.sp) * self.micro_size)

    def apply(self, plan: Plan, world_size: int) -> Plan:
        """Returns `plan` in this layout. Omits pipeline tables without stages, and explicit stage lengths. Raises PlanError for
        invalid tables.
        """
        written, schedule = plan.document.tables, self.schedule
        sizes = {"dp": world_size // (self.pp * self.sp), "pp": self.pp, "sp": self.sp, "wp": self.wp}
        # The reducer, the schedule's tie handler, and the plan's remaining handlers.
        handlers = [self.reducer.table] if self.reducer else []
        record = schedule.record if schedule else None
        handlers += [{"use": record.ties}] if isinstance(record, records.ScheduleRecord) and record.ties else []
        handlers += [
            table
            for component, table in zip(plan.gradient_handlers, written.get("gradient_handlers", ()), strict=False)
            if not (isinstance(component.record, records.GradientHandlerRecord) and component.record.role in ("reducer", "tie"))
        ]
        tables: dict[str, Any] = {
            "parallel": {**(written.get("parallel") or {}), **sizes},
            "batch": {**(written.get("batch") or {}), "micro_size": self.micro_size},
            "activations": self.activations.table,
            "gradient_handlers": handlers,
            "pipeline": schedule.table if schedule else None,
            "weights": self.weights.table if self.weights else None,
            "sequence": self.attention.table if self.attention else None,
        }
        if schedule is None:
            tables |= {"link": None, "partition": None}
        elif plan.partition is not None and plan.partition.name == "pp.explicit":
            tables["partition"] = None
        return replace_tables(plan, tables)

    def __str__(self) -> str:
        sizes = f"pp {self.pp}, sp {self.sp}, wp {self.wp}, micro_size {self.micro_size}"
        return "; ".join([sizes, *(str(choice) for choice in self[4:] if choice is not None)])


class Layouts:
    """The layouts of `plan` in a world of `world` ranks whose sizes divide the ranks and the batch. keep: the axes that keep
    the value in the plan. Raises UsageError "no-axis" for an unknown axis.
    """

    def __init__(self, plan: Plan, world: int, choices: Choices, keep: Collection[str] = ()) -> None:
        for axis in keep:
            if axis not in AXES:
                raise UsageError("no-axis", f"unknown axis `{axis}`", hint=f"use one of {', '.join(AXES)}")
        self.plan = plan
        self.world = world
        self.choices = choices
        self.keep = keep

    def all_layouts(self) -> Iterator[Layout]:
        """Yields every layout in a fixed order."""

        def choices_for(axis: Axis, offered: tuple[Choice, ...]) -> tuple[Choice, ...]:
            return offered[:1] if axis in self.keep else offered

        choices = self.choices
        schedules = choices.schedules if self.plan.pipeline is None else choices_for("schedule", choices.schedules)
        for pp, sp, wp, micro_size in self.sizes():
            for policy, weights, schedule, reducer in product(
                choices_for("activations", choices.policies),
                choices_for("wp", choices.weights) if wp > 1 else (None,),
                schedules if pp > 1 else (None,),
                choices_for("reducer", choices.reducers) if self.world > pp else (None,),
            ):
                attention = choices.attention[0] if sp > 1 else None
                yield Layout(pp, sp, wp, micro_size, schedule, policy, reducer, weights, attention)

    def sizes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields pp, sp, wp and micro_size, a power of two, for every even division of the ranks and the batch."""
        parallel, world, choices, batch = self.plan.parallel, self.world, self.choices, self.plan.batch
        stages = [parallel.pp] if "pp" in self.keep else divisors(world) if choices.schedules else [1]
        slices = [parallel.sp] if "sp" in self.keep else divisors(world, MAX_SLICES) if choices.attention else [1]
        shards = [parallel.wp] if "wp" in self.keep else divisors(world) if choices.weights else [1]
        for pp, sp, wp in product(stages, slices, shards):
            if world % (pp * sp) or world % (pp * wp) or batch.global_size % (world // (pp * sp)):
                continue
            rows = batch.global_size // (world // (pp * sp))
            powers = [1 << bits for bits in range(rows.bit_length())]
            for micro_size in [batch.micro_size] if "micro_size" in self.keep else powers:
                if rows % micro_size == 0:
                    yield pp, sp, wp, micro_size


def divisors(number: int, largest: int | None = None) -> list[int]:
    """Returns the divisors of `number` up to `largest`, in ascending order."""
    return [divisor for divisor in range(1, min(number, largest or number) + 1) if number % divisor == 0]
