"""The resolved plan: all values of a run, their origins, and the records that build the run's parts. Also writes a plan as
TOML, and compares two plans.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import gcd, lcm
from pathlib import Path
from typing import Any, NamedTuple

import tomli
import tomli_w

from sley_core.errors import Diagnostic, KeyPath, PlanError, SleyError, format_path
from sley_core.plan.document import Document, add_locations, to_plain_data
from sley_core.plan.kinds import COMPONENTS, ComponentTable
from sley_core.plan.loader import Plugin, PluginLoader
from sley_core.plan.tables import (
    FORMAT,
    OPTIONAL_TABLES,
    TABLES,
    BatchTable,
    EvaluationSetTable,
    EvaluationTable,
    FactoryTable,
    LimitsTable,
    ParallelTable,
    PrecisionTable,
    ProfileTable,
    RunTable,
)
from sley_core.records import Record, call_factory, import_factory
from sley_core.table import Table, escape_path
from sley_core.topology import Topology


@dataclass(frozen=True)
class Component:
    """A resolved table that names a record or factory, from which `build` builds a part of the run. name: the record's full
    name (`core.adamw`), or `"module:attribute"` of the factory. record, plugin: None for a factory. config: an instance of the
    record's `config`, or of the table's factory model. path: the path of the table in the plan. document: locates errors.
    """

    table: ComponentTable
    name: str
    record: Record | None
    config: Any
    path: KeyPath
    document: Document = field(compare=False, repr=False)
    plugin: Plugin | None = field(default=None, compare=False, repr=False)

    def load(self) -> Any:
        """Imports and returns the code that `build` calls. Raises the same errors as `build`."""
        with self.document.locate_errors():
            if self.record:
                assert self.plugin, self.name
                return self.plugin.load_builder(self.record)
            return import_factory(self.table.build or self.name, self.path, self.document.folder)

    def build(self, *args: Any) -> Any:
        """Returns the part: the result of the record's builder for the config and `args`, or of the factory for its options.
        Raises PlanError with a place if the user's code fails, and PluginError if the plugin's builder cannot be imported.
        """
        with self.document.locate_errors():
            if self.record or self.table.build:
                return self.load()(self.config, *args)
            assert isinstance(self.config, FactoryTable), self.config
            arguments = {self.table.factory_argument: args[0]} if self.table.factory_argument else {}
            return call_factory(self.name, self.path, self.document.folder, self.config.options, arguments)


@dataclass(frozen=True)
class EvaluationSet:
    """An `[evaluation.sets.NAME]` table. data: the dataset. settings: the keys that do not belong to the dataset."""

    data: Component
    settings: EvaluationSetTable


@dataclass(frozen=True, repr=False)
class Plan:
    """A valid plan with all defaults. Plans are equal if their values are equal, wherever those values were set.

    Optional tables that the plan lacks are None. plugins: the plugins that the plan names, by name: first `core`, then the
    others in the order of their first use.
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
    loader: PluginLoader = field(compare=False, repr=False)
    plugins: Mapping[str, Plugin] = field(compare=False, repr=False)

    def __repr__(self) -> str:
        """Returns a one-line summary; `to_toml` returns the full plan."""
        sizes = {axis: getattr(self.parallel, axis) for axis in ("dp", "pp", "sp", "wp")}
        layout = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1 or axis == "dp")
        steps = f"{self.run.steps:,} steps of {self.batch.global_size:,} samples"
        return f"Plan({self.run.name!r}: {self.model.name} on {self.data.name}, {steps}, {layout})"

    def origin(self, path: KeyPath) -> str:
        """Returns the origin of the value at `path` as text: file, line and column; the number of a `--set`; or "default"."""
        return str(self.document.origin(path) or "default")

    @property
    def folder(self) -> Path | None:
        """The folder in which relative paths start and factories are searched; None for the current directory."""
        return self.document.folder

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The whole plan as TOML types, without keys whose value is None. Paths inside the plan's folder are relative to it."""
        tables: dict[str, Any] = {"plan": FORMAT}

        def dump(table: Table) -> Any:
            return to_plain_data(table.model_dump(exclude_none=True, context={"folder": self.folder}))

        def dump_component(component: Component) -> dict[str, Any]:
            return {**({"use": component.name} if component.record else {}), **dump(component.config)}

        if self.folder:
            tables["source_folder"] = escape_path(str(self.folder))
        for name in (*TABLES, *OPTIONAL_TABLES):
            table = getattr(self, name)
            if table is not None:
                tables[name] = dump(table)
        if tables.get("evaluation", {}).pop("sets", None):
            tables["evaluation"]["sets"] = {
                name: {**dump_component(evaluation_set.data), **dump(evaluation_set.settings)}
                for name, evaluation_set in self.evaluation_sets.items()
            }
        for spec in COMPONENTS:
            value = getattr(self, spec.key)
            if value is not None:
                tables[spec.key] = [dump_component(item) for item in value] if spec.is_list else dump_component(value)
        return tables

    def to_toml(self) -> str:
        """Returns the whole plan as TOML text, from which `plan_from_text` loads an equal plan."""
        return "\n".join(plan_sections(self.tables))

    @cached_property
    def digest(self) -> str:
        """A hash of the plan's values, which is the same in every process and on every machine."""
        return sha256("\n".join(plan_sections(portable_tables(self))).encode()).hexdigest()

    def call(self, hook: str, **arguments: Any) -> Iterator[tuple[Plugin, Any]]:
        """Calls `hook` of each plugin in the plan's order, when the iterator reaches it. Yields each plugin with its result,
        unless the result is None. Raises PluginError "plugin-failed" if the hook raises.
        """
        for plugin in self.plugins.values():
            for result in plugin.call(hook, **arguments):
                yield plugin, result

    def world_size(self, num_available: int | None = None) -> int:
        """Returns the number of ranks, `pp x dp x sp`, if `dp` is a number. If `dp` is "auto", returns `num_available`, the
        number of available devices, or the smallest possible number of ranks if `num_available` is None.
        """
        sizes = self.parallel
        if sizes.dp != "auto":
            return sizes.pp * sizes.dp * sizes.sp
        return num_available or sizes.pp * lcm(sizes.sp, sizes.wp)

    def num_microbatches(self, topology: Topology) -> int:
        """Returns the number of microbatches per rank and step, rounded down; `check_plan` rejects plans with a remainder."""
        return self.batch.global_size // (topology.dp * self.batch.micro_size)

    def topology(self, world_size: int) -> Topology:
        """Returns the layout of `world_size` ranks. Raises PlanError "layout" if the sizes of [parallel] do not fit."""
        sizes = self.parallel
        try:
            return Topology.from_sizes(world_size, sizes.pp, sizes.sp, sizes.wp, None if sizes.dp == "auto" else sizes.dp)
        except ValueError as error:
            axis = "wp" if "x wp" in str(error) else "dp" if sizes.dp != "auto" else "pp" if sizes.pp > 1 else "sp"
            hint = _suggest_size(sizes, world_size, str(error))
            raise self.add_locations(PlanError("layout", str(error), path=("parallel", axis), hint=hint)) from None

    def diagnostic(self, code: str, message: str, path: KeyPath, hint: str | None = None) -> Diagnostic:
        """Returns a diagnostic with the place of the value at `path`, or else of the closest enclosing table."""
        return self.document.diagnostic(code, message, path, hint)

    def add_locations(self, error: SleyError) -> SleyError:
        """Adds places to diagnostics of `error` that have only a path. Returns the same error, to be raised."""
        return add_locations(error, self.document)


def _suggest_size(sizes: ParallelTable, world_size: int, message: str) -> str:
    """Returns a hint with sizes that fit. message: the error of `Topology.from_sizes` for the present sizes."""
    if sizes.dp != "auto" and "x wp" in message:
        unit = sizes.wp // gcd(sizes.wp, sizes.sp)
        return f"use `dp = {-(-sizes.dp // unit) * unit}`; `wp` shards weights over the dp x sp ranks of a stage"
    if sizes.dp != "auto":
        num_ranks = sizes.pp * sizes.dp * sizes.sp
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        return f'use {ranks}, or set `dp = "auto"` to use all ranks'
    unit = sizes.pp * lcm(sizes.sp, sizes.wp)
    smaller = world_size // unit * unit
    return f"use {f'{smaller} or ' if smaller else ''}{smaller + unit} ranks"


def portable_tables(plan: Plan) -> dict[str, Any]:
    """Returns `plan.tables` without the source folder, which depends on the machine."""
    return {key: value for key, value in plan.tables.items() if key != "source_folder"}


def format_values(plan: Plan) -> dict[str, str]:
    """Returns the `repr` of each value in `portable_tables(plan)`, by the path of its key, such as "run.steps"."""
    return {format_path(path): repr(value) for path, value in iterate_values(portable_tables(plan))}


def iterate_values(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the path and value of every key at any depth. An empty table or an array without tables is one value."""
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from iterate_values(inner, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for number, inner in enumerate(value):
            yield from iterate_values(inner, (*path, number))
    else:
        yield path, value


def plan_sections(tables: Mapping[str, Any]) -> Iterator[str]:
    """Yields the sections of the plan's text: first the top-level keys, then each table with its header."""
    yield _format_table({key: value for key, value in tables.items() if not _is_section(value)})
    for key, value in tables.items():
        if not _is_section(value):
            continue
        header, items = (f"[[{key}]]", value) if isinstance(value, list) else (f"[{key}]", [value])
        sets: dict[str, Any] = value.get("sets", {}) if key == "evaluation" else {}
        for table in items:
            yield f"{header}\n{_format_table({name: inner for name, inner in table.items() if inner is not sets})}"
        for name, table in sets.items():
            yield f"[{key}.sets.{_format_key(name)}]\n{_format_table(table)}"


def _is_section(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return bool(value) and all(isinstance(item, dict) for item in items)


def _format_table(table: Mapping[str, Any]) -> str:
    return "".join(f"{_format_key(key)} = {format_value(value)}\n" for key, value in table.items())


def format_value(value: Any) -> str:
    """Returns the TOML text of a value."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_key(key)} = {format_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(format_value, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def _format_key(key: str) -> str:
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


FIXED_KEYS = (("model",), ("adapters",), ("data",), ("loss",), ("run", "seed"), ("optimizer", "use"), ("optimizer", "factory"))
"""Tables and keys that must not change when a run is resumed. All other keys, such as the layout and the learning rate, may."""

UNREPORTED_KEYS = (
    *(("source_folder",), ("run", "name"), ("run", "folder")),
    *(("model", "compile"), ("model", "attention"), ("model", "weights")),
)
"""Keys whose changes are not reported, because they do not affect the results of a resumed run."""

_ABSENT = "nothing"  # the text of a missing value in a `PlanChange`


class PlanChange(NamedTuple):
    """A value that differs between two plans. old, new: the values as TOML; "nothing" if a plan does not have the key."""

    path: KeyPath
    old: str
    new: str

    def __str__(self) -> str:
        return f"{format_path(self.path)}: {self.old} -> {self.new}"

    @property
    def is_refused(self) -> bool:
        """Whether a run cannot be resumed with this change."""
        return _has_prefix(self.path, FIXED_KEYS)


def compare_plans(old: str, new: str) -> list[PlanChange]:
    """Returns the differences of two resolved TOML plans in the order of keys, without `UNREPORTED_KEYS`."""
    old_values, new_values = (
        {path: format_value(value) for path, value in iterate_values(tomli.loads(text))} for text in (old, new)
    )
    changes = [
        PlanChange(path, old_values.get(path, _ABSENT), new_values.get(path, _ABSENT))
        for path in dict.fromkeys([*old_values, *new_values])
        if not _has_prefix(path, UNREPORTED_KEYS)
    ]
    return [change for change in changes if change.old != change.new]


def check_changes(changes: list[PlanChange]) -> None:
    """Raises a PlanError with "resume-differs" or "data-changed" for every change that a resumed run must not have."""
    refused = [change for change in changes if change.is_refused]
    # If the record of a table changed, its other keys differ as well, so only the record is reported.
    record_keys = (("use",), ("factory",))
    changed_records = {change.path[0] for change in refused if change.path[1:] in record_keys}
    if causes := [change for change in refused if change.path[0] not in changed_records or change.path[1:] in record_keys]:
        raise PlanError.from_diagnostics(map(_change_diagnostic, causes))


def _change_diagnostic(change: PlanChange) -> Diagnostic:
    """Returns a diagnostic for a refused change: "data-changed" for another number of samples, or else "resume-differs"."""
    path, old, new = change
    new_run = "or start a run with another name; `run.load_weights` loads only weights"
    if path == ("data", "samples_per_epoch") and _ABSENT not in (old, new):  # the run writes this key, not its user
        message = f"the data has changed: an epoch has {new} samples, but had {old} in the checkpoint's run"
        return Diagnostic("data-changed", message, path=path[:1], hint=f"restore the data, {new_run}")
    old_text = f"no `{format_path(path)}`" if old == _ABSENT else f"`{format_path(path)} = {old}`"
    message = f"the checkpoint's run had {old_text}, but the plan has {new}"
    return Diagnostic("resume-differs", message, path=path, hint=f"restore the value, {new_run}")


def _has_prefix(path: KeyPath, prefixes: tuple[KeyPath, ...]) -> bool:
    return any(path[: len(prefix)] == prefix for prefix in prefixes)
