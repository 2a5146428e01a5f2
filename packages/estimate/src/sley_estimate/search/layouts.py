"""Every layout that a plan could have in a world: sizes, micro-batches, and what fills its tables.

A layout is a change of the plan's tables; `Candidate.plan` makes it, and it is checked as any plan. Choices are the plan's own,
which come first, and all records of installed plugins for which a hint names variants (`hookspecs.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from pydantic import ValidationError

from sley_core.errors import PluginError, SleyError, UsageError
from sley_core.plan.check import check_offload
from sley_core.plan.load import with_tables
from sley_core.plan.loader import Loader, Plugin
from sley_core.plan.plan import Component, Plan
from sley_core.records import GradientHandlerRecord, OffloadManagerRecord, Record, ScheduleRecord
from sley_core.table import RecordKind
from sley_estimate.hookspecs import Hint, hint_of, hints_of

Axis = Literal["pp", "sp", "wp", "micro_size", "schedule", "activations", "reducer", "offload"]
"""What differs between layouts; `dp` follows. Offload that works by call alone stays as the plan has it."""

AXES: tuple[Axis, ...] = get_args(Axis)

MOST_SLICES = 64
"""The most ranks that share a sequence: attention seldom has more heads."""


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
    plugins = _loaded(plan.loader, skipped)

    def offered(kind: RecordKind) -> list[Choice]:
        choices = []
        for plugin, hints in plugins:
            for key, record in plugin.records.get(kind, {}).items():
                name = f"{plugin.name}.{key}"
                hint = hints.get(name)
                for options in hint.variants if hint else ():
                    try:
                        config = record.config.model_validate(options)
                        choices.append(Choice(name, options, record, config, hint.copies if hint else False))
                    except ValidationError as error:
                        reason = error.errors()[0]["msg"]
                        skipped.append(f"{name}: its variant {dict(options)} is no table of it: {reason}")
        return choices

    own_reducer = next((handler for handler in plan.gradient_handlers if _is_reducer(handler.record)), None)
    return Choices(
        _with_own(plan, plan.pipeline, offered("schedules")),
        _with_own(plan, plan.activations, offered("activation_policies")),
        _with_own(plan, own_reducer, [choice for choice in offered("gradient_handlers") if _is_reducer(choice.record)]),
        _with_own(plan, plan.weights, offered("weight_communicators")),
        _with_own(plan, plan.sequence, offered("sequence_attentions")),
        _offload(plan, offered("offload_managers"), skipped),
        tuple(skipped),
    )


def _loaded(loader: Loader, skipped: list[str]) -> list[tuple[Plugin, Mapping[str, Hint]]]:
    plugins = []
    for name in loader.names():
        try:
            plugin = loader.load(name)
            plugins.append((plugin, hints_of(plugin)))
        except PluginError as error:
            skipped.append(f"{name}: {error.diagnostics[0].message}")
    return plugins


def _offload(plan: Plan, offered: list[Choice], skipped: list[str]) -> tuple[Choice | None, ...]:
    """Returns the ways to keep optimizer states off the device in a step, the plan's own first, without those that the plan's
    optimizer cannot be stepped with.
    """
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
    """Returns the plan's `[[offload]]` with `choice` in place of the manager that moves memory in every step, and without
    managers that move one of its parts by call.
    """
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


def _is_reducer(record: object) -> bool:
    return isinstance(record, GradientHandlerRecord) and record.role == "reducer"


def _with_own(plan: Plan, own: Component | None, offered: list[Choice]) -> tuple[Choice, ...]:
    if own is None:
        return tuple(offered)
    return (_own(plan, own), *(other for other in offered if (other.name, other.config) != (own.name, own.config)))


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


@dataclass(frozen=True)
class Sizes:
    """Ranks of each axis, and samples of a micro-batch."""

    pp: int
    sp: int
    wp: int
    micro_size: int

    def micros(self, plan: Plan, world: int) -> int:
        """Returns the micro-batches of a rank in a step."""
        return plan.batch.global_size // (world // (self.pp * self.sp) * self.micro_size)


@dataclass(frozen=True)
class Shape:
    """Sizes and all that changes the seconds of a layer or of its update. weights, attention: None where the axis has one rank.
    offload: None where optimizer states stay on the device.
    """

    sizes: Sizes
    activations: Choice
    weights: Choice | None
    attention: Choice | None
    offload: Choice | None = None


class Candidate(NamedTuple):
    """One layout. schedule: None without stages. reducer: None where no two ranks hold the same weight."""

    shape: Shape
    schedule: Choice | None
    reducer: Choice | None

    def plan(self, plan: Plan, world: int) -> Plan:
        """Returns `plan` in this layout. Tables of pipelines are left out without stages, and written lengths of stages where
        stages or schedule differ from the plan's. Raises PlanError for tables that are no plan.
        """
        sizes, shape = self.shape.sizes, self.shape
        dp = world // (sizes.pp * sizes.sp)
        tables: dict[str, Any] = {
            "parallel": _own_table(plan, "parallel") | {"dp": dp, "pp": sizes.pp, "sp": sizes.sp, "wp": sizes.wp},
            "batch": _own_table(plan, "batch") | {"micro_size": sizes.micro_size},
            "activations": shape.activations.table,
            "gradient_handlers": self._handlers(plan),
            "offload": offload_tables(plan, shape.offload) or None,
            "pipeline": self.schedule.table if self.schedule else None,
            "weights": shape.weights.table if shape.weights else None,
            "sequence": shape.attention.table if shape.attention else None,
        }
        if self.schedule is None:
            tables |= {"link": None, "partition": None, "timeline": None}
        elif plan.partition is not None and plan.partition.name == "pp.explicit":
            own = plan.pipeline
            is_same = own is not None and (self.schedule.name, self.schedule.config) == (own.name, own.config)
            if not is_same or plan.parallel.pp != sizes.pp:
                tables["partition"] = None
        return with_tables(plan, tables)

    def _handlers(self, plan: Plan) -> list[dict[str, Any]]:
        """Returns the reducer, the schedule's handler of ties, and the plan's own other handlers."""
        others = [
            table
            for component, table in zip(plan.gradient_handlers, plan.document.tables.get("gradient_handlers", ()), strict=False)
            if not (isinstance(component.record, GradientHandlerRecord) and component.record.role in ("reducer", "tie"))
        ]
        record = self.schedule.record if self.schedule else None
        ties = [{"use": record.ties}] if isinstance(record, ScheduleRecord) and record.ties else []
        return [*([self.reducer.table] if self.reducer else []), *ties, *others]

    def __str__(self) -> str:
        sizes, shape = self.shape.sizes, self.shape
        texts = [f"pp {sizes.pp}, sp {sizes.sp}, wp {sizes.wp}, micro_size {sizes.micro_size}"]
        choices = (self.schedule, shape.activations, self.reducer, shape.weights, shape.attention, shape.offload)
        return "; ".join([*texts, *(str(choice) for choice in choices if choice is not None)])


class Layouts:
    """Every layout of `plan` in a world of `world` ranks, without sizes that do not divide.

    keep: axes on which the plan's own value stays. Raises UsageError "no-axis" for an unknown one.
    """

    def __init__(self, plan: Plan, world: int, choices: Choices, keep: Collection[str] = ()) -> None:
        for axis in keep:
            if axis not in AXES:
                raise UsageError("no-axis", f"there is no axis `{axis}`", hint=f"the axes are {', '.join(AXES)}")
        self.plan = plan
        self.world = world
        self.choices = choices
        self.keep = keep

    def every(self) -> Iterator[Candidate]:
        """Yields every layout in one order: each with its optimizer states on the device, then off it, unless that is kept."""
        away = [] if "offload" in self.keep else [choice for choice in self.choices.offload if choice is not None]
        for sizes, shape in self._shapes():
            for schedule, reducer in product(self._schedules(sizes), self._reducers(sizes)):
                yield Candidate(shape, schedule, reducer)
                yield from (Candidate(replace(shape, offload=choice), schedule, reducer) for choice in away)

    def is_offloading(self, layout: Candidate) -> bool:
        """Returns whether `every` has the same layout with optimizer states on the device."""
        return layout.shape.offload is not None and "offload" not in self.keep

    def _shapes(self) -> Iterator[tuple[Sizes, Shape]]:
        offload = self.choices.offload[0] if "offload" in self.keep else None
        for sizes in self.sizes():
            weights: tuple[Choice | None, ...] = self._of("wp", self.choices.weights) if sizes.wp > 1 else (None,)
            attention = self.choices.attention[0] if sizes.sp > 1 else None
            for policy, communicator in product(self._of("activations", self.choices.policies), weights):
                yield sizes, Shape(sizes, policy, communicator, attention, offload)

    def sizes(self) -> Iterator[Sizes]:
        """Yields every whole division of the ranks and of the batch, with micro-batches of powers of two."""
        own, world, choices = self.plan.parallel, self.world, self.choices
        stages = [own.pp] if "pp" in self.keep else divisors(world) if choices.schedules else [1]
        slices = [own.sp] if "sp" in self.keep else divisors(world, MOST_SLICES) if choices.attention else [1]
        shards = [own.wp] if "wp" in self.keep else divisors(world) if choices.weights else [1]
        batch = self.plan.batch
        for pp, sp, wp in product(stages, slices, shards):
            if world % (pp * sp) or world % (pp * wp):
                continue
            dp = world // (pp * sp)
            if batch.global_size % dp:
                continue
            rows = batch.global_size // dp
            powers = [1 << bits for bits in range(rows.bit_length())]
            for micro_size in [batch.micro_size] if "micro_size" in self.keep else powers:
                if rows % micro_size == 0:
                    yield Sizes(pp, sp, wp, micro_size)

    def _schedules(self, sizes: Sizes) -> tuple[Choice | None, ...]:
        keeps = "schedule" in self.keep and self.plan.pipeline is not None
        offered = self.choices.schedules[:1] if keeps else self.choices.schedules
        return offered if sizes.pp > 1 else (None,)

    def _reducers(self, sizes: Sizes) -> tuple[Choice | None, ...]:
        return self._of("reducer", self.choices.reducers) if self.world > sizes.pp else (None,)

    def _of(self, axis: Axis, offered: tuple[Choice, ...]) -> tuple[Choice, ...]:
        return offered[:1] if axis in self.keep else offered


def divisors(number: int, most: int | None = None) -> list[int]:
    """Returns the divisors of `number` up to `most`, in ascending order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    both = sorted({*small, *(number // divisor for divisor in small)})
    return [divisor for divisor in both if most is None or divisor <= most]


def _own_table(plan: Plan, key: str) -> dict[str, Any]:
    return dict(plan.document.tables.get(key) or {})
