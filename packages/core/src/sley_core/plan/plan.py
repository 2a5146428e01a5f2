"""The resolved plan: all values of a run, their origins, and the records that build the run's parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import gcd, lcm
from pathlib import Path
from typing import Any

from sley_core.errors import Diagnostic, KeyPath, PlanError, SleyError
from sley_core.factory import call_factory, import_factory
from sley_core.plan.document import Document, add_places
from sley_core.plan.kinds import ComponentTable
from sley_core.plan.loader import Loader, Plugin
from sley_core.plan.tables import (
    BatchTable,
    EvaluationTable,
    FactoryTable,
    LimitsTable,
    ParallelTable,
    PrecisionTable,
    ProfileTable,
    RunTable,
    SetTable,
)
from sley_core.plan.write import plan_sections, portable_tables, to_tables
from sley_core.records import Record
from sley_core.sizes import round_up
from sley_core.table import RecordKind
from sley_core.topology import Topology


@dataclass(frozen=True)
class Component:
    """A resolved table that names a record or factory, from which `build` builds a part of the run.

    name: the record's full name (`core.adamw`), or the path of the factory. record: None for a factory. config: the table, an
    instance of the record's `config`, or of a `FactoryTable` with the factory's path and options.
    """

    table: ComponentTable
    name: str
    record: Record | None
    config: Any
    path: KeyPath
    document: Document = field(compare=False, repr=False)
    plugin: Plugin | None = field(default=None, compare=False, repr=False)

    @property
    def kind(self) -> RecordKind:
        return self.table.kind

    def load(self) -> Any:
        """Imports and returns the code that `build` calls. Raises the same errors as `build`."""
        try:
            if self.record:
                assert self.plugin, self.name
                return self.plugin.load_builder(self.record)
            return import_factory(self.table.build or self.name, self.path, self.document.folder)
        except SleyError as error:
            add_places(error, self.document)
            raise

    def build(self, *args: Any) -> Any:
        """Builds the live object: calls `record.build(config, *args)`, or the factory with its options.

        Raises PlanError if the user's code fails and PluginError if a plugin cannot be imported, with the place in the plan.
        """
        try:
            if self.record or self.table.build:
                return self.load()(self.config, *args)
            assert isinstance(self.config, FactoryTable), self.config
            arguments = {self.table.factory_argument: args[0]} if self.table.factory_argument else {}
            return call_factory(self.name, self.path, self.document.folder, self.config.options, arguments)
        except SleyError as error:
            add_places(error, self.document)
            raise


@dataclass(frozen=True)
class EvaluationSet:
    """A table `[evaluation.sets.NAME]`. keys: the keys that do not belong to the data."""

    data: Component
    keys: SetTable


@dataclass(frozen=True, repr=False)
class Plan:
    """A valid plan with all defaults. Equal plans give equal runs; the places of values are not compared.

    plugins: the plugins that the plan names, core first, then in order of appearance.
    """

    run: RunTable
    batch: BatchTable
    precision: PrecisionTable
    parallel: ParallelTable
    limits: LimitsTable
    evaluation: EvaluationTable | None
    evaluation_sets: Mapping[str, EvaluationSet]
    profile: ProfileTable | None
    model: Component
    adapters: Component | None
    data: Component
    loss: Component
    optimizer: Component
    learning_rate: Component
    averaging: Component | None
    activations: Component
    pipeline: Component | None
    partition: Component | None
    link: Component | None
    weights: Component | None
    sequence: Component | None
    gradient_handlers: tuple[Component, ...]
    scheduler_hooks: tuple[Component, ...]
    offload: tuple[Component, ...]
    checkpoint: Component | None
    metrics: tuple[Component, ...]
    document: Document = field(compare=False, repr=False)
    loader: Loader = field(compare=False, repr=False)
    plugins: Mapping[str, Plugin] = field(compare=False, repr=False)

    def __repr__(self) -> str:
        """Returns a one-line summary; `to_toml` returns the full plan."""
        sizes = ", ".join(
            f"{axis} {size}" for axis in ("dp", "pp", "sp", "wp") if (size := getattr(self.parallel, axis)) != 1 or axis == "dp"
        )
        steps = f"{self.run.steps:,} steps of {self.batch.global_size:,} samples"
        return f"Plan({self.run.name!r}: {self.model.name} on {self.data.name}, {steps}, {sizes})"

    def origin(self, path: KeyPath) -> str:
        """Returns the origin of the value at `path`: file, line and column, a `--set`, or "default"."""
        return str(self.document.origin(path) or "default")

    @property
    def folder(self) -> Path | None:
        """The folder in which relative paths start and factories are searched; None for a plan without a file."""
        return self.document.folder

    @cached_property
    def tables(self) -> dict[str, Any]:
        return to_tables(self)

    def to_toml(self) -> str:
        """Returns the full plan as TOML, from which `plan_from_text` loads an equal plan."""
        return "\n".join(plan_sections(self.tables))

    @cached_property
    def digest(self) -> str:
        """A hash of the plan that is the same in every process and on every machine."""
        return sha256("\n".join(plan_sections(portable_tables(self))).encode()).hexdigest()

    def call(self, hook: str, **arguments: Any) -> Iterator[tuple[Plugin, Any]]:
        """Calls `hook` of each plugin, in the plan's order, and yields the plugin and its result unless that is None.

        A hook runs when the iterator reaches it. Raises PluginError "plugin-failed" if the hook raises.
        """
        for plugin in self.plugins.values():
            for result in plugin.call(hook, **arguments):
                yield plugin, result

    def world_size(self, num_available: int | None = None) -> int:
        """Returns the number of ranks: the fixed number if `dp` is set, else `num_available`, else the smallest possible."""
        sizes = self.parallel
        if sizes.dp != "auto":
            return sizes.pp * sizes.dp * sizes.sp
        return num_available or sizes.pp * lcm(sizes.sp, sizes.wp)

    def num_micros(self, topology: Topology) -> int:
        """Returns the number of microbatches per rank and step. `check_plan` rejects a batch that does not divide."""
        return self.batch.global_size // (topology.dp * self.batch.micro_size)

    def topology(self, world: int) -> Topology:
        """Returns the layout of `world` ranks. Raises PlanError "layout" if the sizes do not divide."""
        sizes = self.parallel
        try:
            return Topology.from_sizes(world, sizes.pp, sizes.sp, sizes.wp, None if sizes.dp == "auto" else sizes.dp)
        except ValueError as error:
            axis = "wp" if "x wp" in str(error) else "dp" if sizes.dp != "auto" else "pp" if sizes.pp > 1 else "sp"
            path = ("parallel", axis)
            raise PlanError.from_diagnostics(
                [self.diagnostic("layout", str(error), path, _suggest_size(sizes, world, str(error)))]
            ) from None

    def diagnostic(self, code: str, message: str, path: KeyPath, hint: str | None = None) -> Diagnostic:
        return self.document.diagnostic(code, message, path, hint)

    def add_places(self, error: SleyError) -> SleyError:
        """Adds the places to diagnostics that have only a path; returns the same error: `raise plan.add_places(error)`."""
        return add_places(error, self.document)


def _suggest_size(sizes: ParallelTable, world: int, message: str) -> str:
    """Returns a hint with the closest world sizes that fit the layout, or with a `dp` that fits."""
    if sizes.dp != "auto" and "x wp" in message:
        unit = sizes.wp // gcd(sizes.wp, sizes.sp)
        return f"use `dp = {round_up(sizes.dp, unit)}`; `wp` shards weights over the dp x sp ranks of a stage"
    if sizes.dp != "auto":
        fixed = sizes.pp * sizes.dp * sizes.sp
        ranks = "1 rank" if fixed == 1 else f"{fixed} ranks"
        return f'use {ranks}, or set `dp = "auto"` to use all ranks'
    unit = sizes.pp * lcm(sizes.sp, sizes.wp)
    smaller = world // unit * unit
    return f"use {f'{smaller} or ' if smaller else ''}{smaller + unit} ranks"
