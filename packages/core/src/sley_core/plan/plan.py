"""The resolved plan: every value that a run uses, where it came from, and the records that build its parts."""

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
    Factory,
    LimitsTable,
    ParallelTable,
    PrecisionTable,
    ProfileTable,
    RunTable,
    SetTable,
)
from sley_core.plan.write import portable_tables, sections, to_tables
from sley_core.records import Record
from sley_core.sizes import round_up
from sley_core.table import RecordKind
from sley_core.topology import Topology


@dataclass(frozen=True)
class Component:
    """Holds one table that a record or a factory decides, ready to be built.

    name: `core.adamw`, or the path of the factory. record: None for a factory, whose path and options are in `config`. config:
    the table, an instance of the record's `config`.
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

    def load(self) -> None:
        """Imports the code that `build` calls; raises what the import raises."""
        try:
            if self.record:
                assert self.plugin, self.name
                self.plugin.load_builder(self.record)
            else:
                import_factory(self.table.build or self.name, self.path, self.document.folder)
        except SleyError as error:
            add_places(error, self.document)
            raise

    def build(self, *args: Any) -> Any:
        """Builds the live object: `record.build(config, *args)`, or what the factory returns for its options.

        Raises PlanError for the user's code, PluginError for a plugin's that cannot be imported, with the place in the plan.
        """
        try:
            if self.record:
                assert self.plugin, self.name
                return self.plugin.load_builder(self.record)(self.config, *args)
            if self.table.build:
                return import_factory(self.table.build, self.path, self.document.folder)(self.config, *args)
            assert isinstance(self.config, Factory), self.config
            arguments = {self.table.given: args[0]} if self.table.given else {}
            return call_factory(self.name, self.path, self.document.folder, self.config.options, arguments)
        except SleyError as error:
            add_places(error, self.document)
            raise


@dataclass(frozen=True)
class EvaluationSet:
    """Holds one table `[evaluation.sets.NAME]`: its data, and its other keys."""

    data: Component
    keys: SetTable


@dataclass(frozen=True, repr=False)
class Plan:
    """A valid plan with every default written in. Equal plans run alike; the place of values does not count.

    plugins: those that the plan names, by name, core first, then in order of appearance.
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
    activations: Component
    pipeline: Component | None
    partition: Component | None
    link: Component | None
    weights: Component | None
    sequence: Component | None
    gradient_handlers: tuple[Component, ...]
    scheduler_hooks: tuple[Component, ...]
    offload: tuple[Component, ...]
    pools: Mapping[str, Component]
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

    def build_named(self, kind: RecordKind, name: str, *args: Any) -> Any:
        """Builds the record `name` with its defaults, for a field that refers to it. Raises PluginError "plugin-import"."""
        plugin = self.loader.load(name.partition(".")[0])
        record = self.loader.record(kind, name)
        return plugin.load_builder(record)(record.config(), *args)

    def origin(self, path: KeyPath) -> str:
        """Returns where the value at `path` comes from: file, line and column, a `--set`, or "default"."""
        return str(self.document.origin(path) or "default")

    @property
    def folder(self) -> Path | None:
        """Folder in which relative paths start and factories are looked for; None for a plan that was never a file."""
        return self.document.folder

    @cached_property
    def tables(self) -> dict[str, Any]:
        return to_tables(self)

    def to_toml(self) -> str:
        """Returns the full plan as text that loads again to an equal plan."""
        return "\n".join(sections(self.tables))

    @cached_property
    def digest(self) -> str:
        """Hash that is equal for equal plans, in every process and on every machine."""
        return sha256("\n".join(sections(portable_tables(self))).encode()).hexdigest()

    def call(self, hook: str, **arguments: Any) -> Iterator[tuple[Plugin, Any]]:
        """Calls a hook of each plugin in the plan's order; yields the plugin and what it returned, unless None.

        Raises PluginError, naming the plugin, for whatever the hook raises. Hooks run only as the iterator is consumed.
        """
        for plugin in self.plugins.values():
            for result in plugin.call(hook, **arguments):
                yield plugin, result

    def world(self, available: int | None = None) -> int:
        """Returns the number of ranks: the number that `dp` fixes, else `available`, else the smallest possible number."""
        sizes = self.parallel
        if sizes.dp != "auto":
            return sizes.pp * sizes.dp * sizes.sp
        return available or sizes.pp * lcm(sizes.sp, sizes.wp)

    def num_micros(self, topology: Topology) -> int:
        """Returns the number of micro-batches per rank and step; `check_plan` refuses a batch that does not divide."""
        return self.batch.global_size // (topology.dp * self.batch.micro_size)

    def topology(self, world: int) -> Topology:
        """Returns the layout of `world` ranks; raises PlanError "layout" if they do not divide into it."""
        sizes = self.parallel
        try:
            return Topology.of(world, sizes.pp, sizes.sp, sizes.wp, None if sizes.dp == "auto" else sizes.dp)
        except ValueError as error:
            axis = "wp" if "wdp" in str(error) else "dp" if sizes.dp != "auto" else "pp" if sizes.pp > 1 else "sp"
            path = ("parallel", axis)
            raise PlanError.many(
                [self.diagnostic("layout", str(error), path, _suggest_size(sizes, world, str(error)))]
            ) from None

    def diagnostic(self, code: str, message: str, path: KeyPath, hint: str | None = None) -> Diagnostic:
        return self.document.diagnostic(code, message, path, hint)

    def located(self, error: SleyError) -> SleyError:
        """Adds places to diagnostics that have a path and no place; returns the same error: `raise plan.located(error)`."""
        return add_places(error, self.document)


def _suggest_size(sizes: ParallelTable, world: int, equation: str) -> str:
    """Returns a hint with the closest world sizes that the layout allows, or with the `dp` that would fit."""
    if sizes.dp != "auto" and "wdp" in equation:
        unit = sizes.wp // gcd(sizes.wp, sizes.sp)
        fits = round_up(sizes.dp, unit)
        return f"`wp` shares weights among the dp x sp ranks of a stage and adds none: `dp = {fits}` would do"
    if sizes.dp != "auto":
        fixed = sizes.pp * sizes.dp * sizes.sp
        ranks = "1 rank" if fixed == 1 else f"{fixed} ranks"
        return f'this plan fixes the world to {ranks}; `dp = "auto"` takes what the world leaves over'
    unit = sizes.pp * lcm(sizes.sp, sizes.wp)
    below = world // unit * unit
    return f"a world of {f'{below} or ' if below else ''}{below + unit} ranks would do"
