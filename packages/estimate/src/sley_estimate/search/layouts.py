"""Every layout that a plan could have in a world: sizes, micro-batches, and what fills its tables.

A layout is a change of the plan's tables; `Layout.plan` makes it, and it is checked as any plan. Choices are the plan's own,
which come first, and all records of installed plugins for which a hint names variants (`hookspecs.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from pydantic import ValidationError

from sley_core.errors import PluginError, SleyError, UsageError
from sley_core.plan.check import check_offload
from sley_core.plan.plan import Component, Plan
from sley_core.records import GradientHandlerRecord, OffloadManagerRecord, Record, ScheduleRecord
from sley_core.table import RecordKind
from sley_estimate.hookspecs import NO_HINT, hint_of, hints_of
from sley_estimate.layers.variants import with_tables

Axis = Literal["pp", "sp", "wp", "micro_size", "schedule", "activations", "reducer", "offload"]
"""What differs between layouts; `dp` follows. Offload that works by call alone stays as the plan has it."""

AXES: tuple[Axis, ...] = get_args(Axis)

MOST_SLICES = 64  # the most ranks that share a sequence: attention seldom has more heads


@dataclass(frozen=True)
class Choice:
    """One way to fill a table. name: of the record; options: the table's other keys; config: the whole table; record, config:
    None of a factory. copies: whether it is a policy that copies saved tensors to the host.
    """

    name: str
    options: Mapping[str, Any]
    record: Record | None = field(default=None, compare=False, repr=False)
    config: Any = field(default=None, compare=False, repr=False)
    copies: bool = field(default=False, compare=False, repr=False)

    @property
    def table(self) -> dict[str, Any]:
        return {"use": self.name, **self.options}

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:  # asked for with every layout
        options = ", ".join(f"{key} = {value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(frozen=True)
class Choices:
    """What may fill each table. weights, attention: empty if nothing installed shards weights, or attends over slices.

    offload: how optimizer states leave the device in a step; None: they stay. skipped: plugins that could not be loaded, and
    variants that their records refuse, with the reason.
    """

    schedules: tuple[Choice, ...]
    policies: tuple[Choice, ...]
    reducers: tuple[Choice, ...]
    weights: tuple[Choice, ...]
    attention: tuple[Choice, ...]
    offload: tuple[Choice | None, ...] = (None,)
    skipped: tuple[str, ...] = ()


def choices_of(plan: Plan) -> Choices:
    """Imports the installed plugins and returns the choices for each table, the plan's own first."""
    skipped: list[str] = []
    plugins = []
    for name in plan.loader.names():
        try:
            plugin = plan.loader.load(name)
            plugins.append((plugin, hints_of(plugin)))
        except PluginError as error:
            skipped.append(f"{name}: {error.diagnostics[0].message}")

    def offered(kind: RecordKind) -> list[Choice]:
        choices = []
        for plugin, hints in plugins:
            for key, record in plugin.records.get(kind, {}).items():
                name = f"{plugin.name}.{key}"
                hint = hints.get(name, NO_HINT)
                for options in hint.variants:
                    try:
                        choices.append(Choice(name, options, record, record.config.model_validate(options), hint.copies))
                    except ValidationError as error:
                        reason = error.errors()[0]["msg"]
                        skipped.append(f"{name}: its variant {dict(options)} is no table of it: {reason}")
        return choices

    def is_reducer(record: object) -> bool:
        return isinstance(record, GradientHandlerRecord) and record.role == "reducer"

    def with_own(own: Component | None, kind: RecordKind) -> tuple[Choice, ...]:
        others = [one for one in offered(kind) if kind != "gradient_handlers" or is_reducer(one.record)]
        if own is None:
            return tuple(others)
        return (_own(plan, own), *(one for one in others if (one.name, one.config) != (own.name, own.config)))

    return Choices(
        with_own(plan.pipeline, "schedules"),
        with_own(plan.activations, "activation_policies"),
        with_own(next((one for one in plan.gradient_handlers if is_reducer(one.record)), None), "gradient_handlers"),
        with_own(plan.weights, "weight_communicators"),
        with_own(plan.sequence, "sequence_attentions"),
        _offload(plan, offered("offload_managers"), skipped),
        tuple(skipped),
    )


def _offload(plan: Plan, offered: list[Choice], skipped: list[str]) -> tuple[Choice | None, ...]:
    """Returns the ways to keep optimizer states off the device that the plan's optimizer allows, the plan's own first."""
    choices: list[Choice | None] = [next((_own(plan, manager) for manager in plan.offload if _in_steps(plan, manager)), None)]
    for choice in (None, *offered):
        if choice in choices or (choice is not None and not _in_steps(plan, choice)):
            continue
        try:
            other = with_tables(plan, {"offload": offload_tables(plan, choice) or None})
        except SleyError as error:
            skipped.append(f"{choice}: {error.diagnostics[0].message}")
            continue
        if not any(check_offload(other)):
            choices.append(choice)
    return tuple(choices)


def offload_tables(plan: Plan, choice: Choice | None) -> list[dict[str, Any]]:
    """Returns `[[offload]]` with `choice` for the manager that moves in every step, without others that move its parts."""
    moved = _moved_by(choice) if choice is not None else set()
    tables = [
        dict(table)
        for component, table in zip(plan.offload, plan.document.tables.get("offload", ()), strict=True)
        if not _in_steps(plan, component) and not moved & _moved_by(component)
    ]
    return [*tables, choice.table] if choice is not None else tables


def _in_steps(plan: Plan, manager: Component | Choice) -> bool:
    return hint_of(plan.loader, manager.name).in_steps(manager.config)


def _moved_by(manager: Component | Choice) -> set[str]:
    record = manager.record
    assert isinstance(record, OffloadManagerRecord), manager
    return set(record.parts(manager.config))


def _own(plan: Plan, component: Component) -> Choice:
    """Returns a plan's table as a choice, with the options that the plan writes."""
    table: Any = component.document.tables
    for part in component.path:
        if isinstance(table, dict) and part not in table:  # a default that the plan does not write
            table = {}
            break
        table = table[part]
    options = {key: value for key, value in table.items() if key not in ("use", "factory")}
    copies = hint_of(plan.loader, component.name).copies
    return Choice(component.name, options, component.record, component.config, copies)


class Layout(NamedTuple):
    """One way to run a plan in a world: ranks of each axis, samples of a micro-batch, and what fills each table.

    schedule: None without stages. reducer: None where no two ranks hold the same weight. weights, attention: None where the
    axis has one rank. offload: None where optimizer states stay on the device.
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
    offload: Choice | None = None

    def micros(self, plan: Plan, world: int) -> int:
        """Returns the micro-batches of a rank in a step."""
        return plan.batch.global_size // (world // (self.pp * self.sp) * self.micro_size)

    def plan(self, plan: Plan, world: int) -> Plan:
        """Returns `plan` in this layout. Tables of pipelines are left out without stages, and written lengths of stages where
        stages or schedule differ from the plan's. Raises PlanError for tables that are no plan.
        """
        written, schedule = plan.document.tables, self.schedule
        sizes = {"dp": world // (self.pp * self.sp), "pp": self.pp, "sp": self.sp, "wp": self.wp}
        # The reducer, the schedule's handler of ties, and the plan's own other handlers.
        handlers = [self.reducer.table] if self.reducer else []
        record = schedule.record if schedule else None
        handlers += [{"use": record.ties}] if isinstance(record, ScheduleRecord) and record.ties else []
        handlers += [
            table
            for component, table in zip(plan.gradient_handlers, written.get("gradient_handlers", ()), strict=False)
            if not (isinstance(component.record, GradientHandlerRecord) and component.record.role in ("reducer", "tie"))
        ]
        tables: dict[str, Any] = {
            "parallel": {**(written.get("parallel") or {}), **sizes},
            "batch": {**(written.get("batch") or {}), "micro_size": self.micro_size},
            "activations": self.activations.table,
            "gradient_handlers": handlers,
            "offload": offload_tables(plan, self.offload) or None,
            "pipeline": schedule.table if schedule else None,
            "weights": self.weights.table if self.weights else None,
            "sequence": self.attention.table if self.attention else None,
        }
        if schedule is None:
            tables |= {"link": None, "partition": None}
        elif plan.partition is not None and plan.partition.name == "pp.explicit":
            own = plan.pipeline
            is_same = own is not None and (schedule.name, schedule.config) == (own.name, own.config)
            if not is_same or plan.parallel.pp != self.pp:
                tables["partition"] = None
        return with_tables(plan, tables)

    def __str__(self) -> str:
        sizes = f"pp {self.pp}, sp {self.sp}, wp {self.wp}, micro_size {self.micro_size}"
        return "; ".join([sizes, *(str(choice) for choice in self[4:] if choice is not None)])


class Layouts:
    """Every layout of `plan` in a world of `world` ranks, without sizes that do not divide. keep: axes on which the plan's own
    value stays. Raises UsageError "no-axis" for an unknown one.
    """

    def __init__(self, plan: Plan, world: int, choices: Choices, keep: Collection[str] = ()) -> None:
        for axis in keep:
            if axis not in AXES:
                raise UsageError("no-axis", f"there is no axis `{axis}`", hint=f"the axes are {', '.join(AXES)}")
        self.plan = plan
        self.world = world
        self.choices = choices
        self.keep = keep

    def every(self) -> Iterator[Layout]:
        """Yields every layout in one order: each with its optimizer states on the device, then off it, unless that is kept."""

        def of(axis: Axis, offered: tuple[Choice, ...]) -> tuple[Choice, ...]:
            return offered[:1] if axis in self.keep else offered

        choices, keeps_offload = self.choices, "offload" in self.keep
        kept = choices.offload[0] if keeps_offload else None
        away = [] if keeps_offload else [choice for choice in choices.offload if choice is not None]
        schedules = choices.schedules if self.plan.pipeline is None else of("schedule", choices.schedules)
        for pp, sp, wp, micro_size in self.sizes():
            for policy, weights, schedule, reducer in product(
                of("activations", choices.policies),
                of("wp", choices.weights) if wp > 1 else (None,),
                schedules if pp > 1 else (None,),
                of("reducer", choices.reducers) if self.world > pp else (None,),
            ):
                attention = choices.attention[0] if sp > 1 else None
                layout = Layout(pp, sp, wp, micro_size, schedule, policy, reducer, weights, attention, kept)
                yield layout
                yield from (layout._replace(offload=choice) for choice in away)

    def sizes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields pp, sp, wp and micro_size, a power of two, for every whole division of the ranks and of the batch."""
        own, world, choices, batch = self.plan.parallel, self.world, self.choices, self.plan.batch
        stages = [own.pp] if "pp" in self.keep else divisors(world) if choices.schedules else [1]
        slices = [own.sp] if "sp" in self.keep else divisors(world, MOST_SLICES) if choices.attention else [1]
        shards = [own.wp] if "wp" in self.keep else divisors(world) if choices.weights else [1]
        for pp, sp, wp in product(stages, slices, shards):
            if world % (pp * sp) or world % (pp * wp) or batch.global_size % (world // (pp * sp)):
                continue
            rows = batch.global_size // (world // (pp * sp))
            powers = [1 << bits for bits in range(rows.bit_length())]
            for micro_size in [batch.micro_size] if "micro_size" in self.keep else powers:
                if rows % micro_size == 0:
                    yield pp, sp, wp, micro_size


def divisors(number: int, most: int | None = None) -> list[int]:
    """Returns the divisors of `number` up to `most`, in ascending order."""
    return [divisor for divisor in range(1, min(number, most or number) + 1) if number % divisor == 0]
