"""Enumerates every layout that a plan could have in a world of so many ranks: sizes, micro-batches, and what
fills its tables.

    shape       sizes, activation policy, weight communicator, attention: what a layer takes
    candidate   a shape, with a schedule and a reducer

A layout is a change of the plan's tables, no more; `Candidate.plan` makes it, and whoever takes it checks it as any plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

from sley_core.errors import UsageError
from sley_core.plan.load import with_tables
from sley_core.plan.plan import Plan
from sley_core.records import GradientHandlerRecord, ScheduleRecord
from sley_estimate.search.choices import Choice, Choices, offload_tables

Axis = Literal["pp", "sp", "wp", "micro_size", "schedule", "activations", "reducer", "offload"]
"""What differs from layout to layout; `dp` follows. Offload that works by call alone stays as the plan has it."""

AXES: tuple[Axis, ...] = get_args(Axis)

MOST_SLICES = 64
"""The most ranks that share a sequence; attention has no more heads than that, as a rule."""


@dataclass(frozen=True)
class Sizes:
    """How many ranks each axis has, and how many samples a micro-batch."""

    pp: int
    sp: int
    wp: int
    micro_size: int

    def micros(self, plan: Plan, world: int) -> int:
        """Returns how many micro-batches a rank takes in a step of `plan`, in a world of `world` ranks."""
        return plan.batch.global_size // (world // (self.pp * self.sp) * self.micro_size)


@dataclass(frozen=True)
class Shape:
    """Sizes, and what changes how long a layer, or its update, takes. weights, attention: None where these axes have one rank.
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
        """Returns `plan` with the tables of this layout, in a world of `world` ranks. Without stages, link, partition and
        timeline are left out; so are lengths of stages that the plan writes for another number of stages, or another schedule.
        Raises PlanError for tables that are no plan.
        """
        sizes, shape = self.shape.sizes, self.shape
        tables: dict[str, Any] = {
            "parallel": _own_table(plan, "parallel")
            | {"dp": world // (sizes.pp * sizes.sp), "pp": sizes.pp, "sp": sizes.sp, "wp": sizes.wp},
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
        elif plan.partition is not None and plan.partition.name == "pp.explicit" and self._moves_cuts(plan):
            tables["partition"] = None  # lengths that were written for other parts
        return with_tables(plan, tables)

    def _moves_cuts(self, plan: Plan) -> bool:
        """Returns whether this layout has another number of stages than the plan, or another schedule or options of it."""
        own, schedule = plan.pipeline, self.schedule
        if own is None or schedule is None or plan.parallel.pp != self.shape.sizes.pp:
            return True
        return (schedule.name, schedule.config) != (own.name, own.config)

    def _handlers(self, plan: Plan) -> list[dict[str, Any]]:
        """Returns the list of gradient handlers: this reducer, ties where there are stages, and the plan's own others."""
        given = _own_table(plan, "gradient_handlers", [])
        others = [
            table
            for component, table in zip(plan.gradient_handlers, given, strict=False)
            if not (isinstance(component.record, GradientHandlerRecord) and component.record.role in ("reducer", "tie"))
        ]
        reducers = [self.reducer.table] if self.reducer else []
        return [*reducers, *self._ties(), *others]

    def _ties(self) -> list[dict[str, Any]]:
        """Returns the table of the handler that sums tied weights over stages, if the schedule names one; else nothing."""
        record = self.schedule.record if self.schedule else None
        named = record.ties if isinstance(record, ScheduleRecord) else None
        return [{"use": named}] if named else []

    def __str__(self) -> str:
        sizes, shape = self.shape.sizes, self.shape
        words = [f"pp {sizes.pp}, sp {sizes.sp}, wp {sizes.wp}, micro_size {sizes.micro_size}"]
        chosen = (self.schedule, shape.activations, self.reducer, shape.weights, shape.attention, shape.offload)
        return "; ".join([*words, *(str(one) for one in chosen if one is not None)])


class Layouts:
    """Every layout of `plan` in a world of `world` ranks; sizes that do not divide are left out.

    keep: axes on which the plan's own value stays. Raises UsageError "no-axis" for one that there is not.
    """

    def __init__(self, plan: Plan, world: int, choices: Choices, keep: Collection[Axis] = ()) -> None:
        for axis in keep:
            if axis not in AXES:
                raise UsageError("no-axis", f"there is no axis `{axis}`", hint=f"the axes are {', '.join(AXES)}")
        self.plan = plan
        self.world = world
        self.choices = choices
        self.keep = keep

    def shapes(self) -> Iterator[Shape]:
        """Yields all shapes whose optimizer states stay on the device; if `keep` has "offload", all shapes with the plan's own
        offload.
        """
        policies = self._of("activations", self.choices.policies)
        for sizes in self.sizes():
            weights: tuple[Choice | None, ...] = self._of("wp", self.choices.weights) if sizes.wp > 1 else (None,)
            attention = self.choices.attention[0] if sizes.sp > 1 else None
            for policy, communicator in product(policies, weights):
                yield Shape(sizes, policy, communicator, attention, self._first)

    def offloading(self, shape: Shape) -> Iterator[Shape]:
        """Yields the shapes that differ from `shape`, one of `shapes`, in that optimizer states leave the device: none is
        faster. None if `keep` has "offload".
        """
        if "offload" not in self.keep:
            yield from (replace(shape, offload=one) for one in self.choices.offload if one is not None)

    @property
    def _first(self) -> Choice | None:
        """Returns how the optimizer's states of all `shapes` are offloaded: None, on the device, unless
        `keep` has "offload".
        """
        return self.choices.offload[0] if "offload" in self.keep else None

    def sizes(self) -> Iterator[Sizes]:
        """Yields every division of the ranks and of the plan's batch that is whole, with micro-batches of powers of two; axes
        in `keep` have the plan's own size.
        """
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
            for micro_size in [batch.micro_size] if "micro_size" in self.keep else powers_of_two(rows):
                if rows % micro_size == 0:
                    yield Sizes(pp, sp, wp, micro_size)

    def schedules(self, sizes: Sizes) -> tuple[Choice | None, ...]:
        """Returns what may fill `[pipeline]` with these sizes; (None,) for one stage."""
        keeps = "schedule" in self.keep and self.plan.pipeline is not None
        offered = self.choices.schedules[:1] if keeps else self.choices.schedules
        return offered if sizes.pp > 1 else (None,)

    def reducers(self, sizes: Sizes) -> tuple[Choice | None, ...]:
        """Returns what may sum gradients with these sizes; (None,) where no two ranks hold the same weight."""
        return self._of("reducer", self.choices.reducers) if self.world > sizes.pp else (None,)

    def within(self, shape: Shape) -> Iterator[Candidate]:
        """Yields every layout of a shape: it with each schedule and each reducer."""
        for schedule, reducer in product(self.schedules(shape.sizes), self.reducers(shape.sizes)):
            yield Candidate(shape, schedule, reducer)

    def every(self) -> Iterator[Candidate]:
        """Yields every layout in one order: each with its optimizer states on the device, and then off it."""
        for shape in self.shapes():
            offloading = list(self.offloading(shape))
            for layout in self.within(shape):
                yield layout
                yield from (Candidate(other, layout.schedule, layout.reducer) for other in offloading)

    def is_offloading(self, layout: Candidate) -> bool:
        """Returns whether a layout is one of those of which another has its optimizer states on the device."""
        return layout.shape.offload is not None and "offload" not in self.keep

    def _of(self, axis: Axis, offered: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """Returns what an axis may be: the plan's own, which stands first, if `keep` has the axis; else all that is offered."""
        return offered[:1] if axis in self.keep else offered


def divisors(number: int, most: int | None = None) -> list[int]:
    """Returns the divisors of `number` in ascending order, none above `most`."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    both = sorted({*small, *(number // divisor for divisor in small)})
    return [divisor for divisor in both if most is None or divisor <= most]


def powers_of_two(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to `most`."""
    return [1 << bits for bits in range(most.bit_length()) if 1 << bits <= most]


def _own_table(plan: Plan, key: str, default: Any = None) -> Any:
    """Returns a copy of the plan's table, or list of tables, `key` as the plan was given it; `default`, or an empty table, if
    it has none.
    """
    found = plan.document.tables.get(key)
    if found is None:
        return {} if default is None else default
    return dict(found) if isinstance(found, dict) else list(found)
