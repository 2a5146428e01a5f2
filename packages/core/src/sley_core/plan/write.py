"""Converts a resolved plan to plain data and TOML, and compares two plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli
import tomli_w

from sley_core.errors import Diagnostic, KeyPath, PlanError, format_path
from sley_core.plan.document import to_plain_data
from sley_core.plan.kinds import COMPONENTS
from sley_core.plan.tables import FORMAT, OPTIONAL_TABLES, TABLES
from sley_core.table import Table, escape_path

if TYPE_CHECKING:
    from sley_core.plan.plan import Component, Plan


def to_tables(plan: Plan) -> dict[str, Any]:
    """Returns the full plan as TOML types, without keys whose value is None. Relative paths stay relative."""
    folder = plan.folder
    tables: dict[str, Any] = {"plan": FORMAT}

    def dump(table: Table) -> Any:
        return to_plain_data(table.model_dump(exclude_none=True, context={"folder": folder}))

    def dump_component(component: Component) -> dict[str, Any]:
        return {**({"use": component.name} if component.record else {}), **dump(component.config)}

    if folder:
        tables["source_folder"] = escape_path(str(folder))
    for name in (*TABLES, *OPTIONAL_TABLES):
        table = getattr(plan, name)
        if table is not None:
            tables[name] = dump(table)
    if tables.get("evaluation", {}).pop("sets", None):
        tables["evaluation"]["sets"] = {
            name: {**dump_component(evaluation_set.data), **dump(evaluation_set.keys)}
            for name, evaluation_set in plan.evaluation_sets.items()
        }
    for spec in COMPONENTS:
        value = getattr(plan, spec.key)
        if value is None:
            continue
        if spec.is_list:
            tables[spec.key] = [dump_component(component) for component in value]
        else:
            tables[spec.key] = dump_component(value)
    return tables


def portable_tables(plan: Plan) -> dict[str, Any]:
    """Returns all tables of a plan except its source folder, which depends on the machine."""
    return {key: value for key, value in plan.tables.items() if key != "source_folder"}


def digest_values(plan: Plan) -> dict[str, str]:
    """Returns the plan's portable values as text by key, to compare plans with different digests."""
    return {format_path(path): repr(value) for path, value in iterate_values(portable_tables(plan))}


def iterate_values(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the path and value of every key. An empty table and an array without tables count as one value."""
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
    plain_keys = {key: value for key, value in tables.items() if not value or not _is_section(value)}
    yield _format_table(plain_keys)
    for key, value in tables.items():
        if key not in plain_keys:
            if key == "evaluation" and "sets" in value:
                pairs = [
                    (f"[{key}]", {inner_key: inner for inner_key, inner in value.items() if inner_key != "sets"}),
                    *((f"[{key}.sets.{_format_key(name)}]", table) for name, table in value["sets"].items()),
                ]
            elif isinstance(value, list):
                pairs = [(f"[[{key}]]", table) for table in value]
            else:
                pairs = [(f"[{key}]", value)]
            yield from (f"{header}\n{_format_table(table)}" for header, table in pairs)


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def _format_table(table: Mapping[str, Any]) -> str:
    return "".join(f"{_format_key(key)} = {format_value(value)}\n" for key, value in table.items())


def format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_key(key)} = {format_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(format_value, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def _format_key(key: str) -> str:
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


FIXED_KEYS = (("model",), ("adapters",), ("data",), ("loss",), ("run", "seed"), ("optimizer", "use"), ("optimizer", "factory"))
"""Keys that must not change in a resumed run. The layout and the learning rates may change."""

UNREPORTED_KEYS = (
    *(("source_folder",), ("run", "name"), ("run", "folder")),
    *(("model", "compile"), ("model", "attention"), ("model", "weights")),
)
"""Keys whose changes are not reported, because they do not affect the results of a resumed run."""

_DECIDING_KEYS = (("use",), ("factory",))
"""The keys that determine a table's other keys."""

_ABSENT = "nothing"
_SAMPLES = ("data", "samples_per_epoch")


class PlanChange(NamedTuple):
    """A changed value of the plan. old, new: the values as TOML; "nothing" if the plan does not have the key."""

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
    """Returns the differences between two resolved plans in TOML, in the order of the keys."""
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
    """Raises PlanError "resume-differs" with every change that a resumed run must not have."""
    refused = [change for change in changes if change.is_refused]
    # If the record of a table changed, its other keys differ as well, so only the record is reported.
    changed_records = {change.path[0] for change in refused if change.path[1:] in _DECIDING_KEYS}
    if causes := [change for change in refused if change.path[0] not in changed_records or change.path[1:] in _DECIDING_KEYS]:
        raise PlanError.from_diagnostics(map(_change_diagnostic, causes))


def _change_diagnostic(change: PlanChange) -> Diagnostic:
    path, old, new = change
    new_run = "or start a run with another name; `run.load_weights` loads only weights"
    if path == _SAMPLES and _ABSENT not in (old, new):  # the run writes this key, not its user
        message = f"the data have changed: an epoch has {new} samples, but had {old} in the checkpoint's run"
        return Diagnostic("data-changed", message, path=path[:1], hint=f"restore the data, {new_run}")
    old_text = f"no `{format_path(path)}`" if old == _ABSENT else f"`{format_path(path)} = {old}`"
    message = f"the checkpoint's run had {old_text}, but the plan has {new}"
    return Diagnostic("resume-differs", message, path=path, hint=f"restore the value, {new_run}")


def _has_prefix(path: KeyPath, prefixes: tuple[KeyPath, ...]) -> bool:
    return any(path[: len(prefix)] == prefix for prefix in prefixes)
