"""Writes a resolved plan as plain data, as text, and as a digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli
import tomli_w

from sley_core.errors import Diagnostic, KeyPath, PlanError, format_path
from sley_core.plan.document import to_plain_data
from sley_core.plan.kinds import COMPONENTS
from sley_core.plan.tables import FORMAT, OPTIONAL, TABLES
from sley_core.table import NAMED_TABLES, Table, escape_path

if TYPE_CHECKING:
    from sley_core.plan.plan import Component, Plan


def to_tables(plan: Plan) -> dict[str, Any]:
    """Returns the full plan as plain data for TOML. A key whose value is None is absent; paths are as they were given."""
    folder = plan.folder
    tables: dict[str, Any] = {"plan": FORMAT}

    def dumped(table: Table) -> Any:
        return to_plain_data(table.model_dump(exclude_none=True, context={"folder": folder}))

    def component(item: Component) -> dict[str, Any]:
        return {**({"use": item.name} if item.record else {}), **dumped(item.config)}

    if folder:
        tables["source_folder"] = escape_path(str(folder))
    for name in (*TABLES, *OPTIONAL):
        table = getattr(plan, name)
        if table is not None:
            tables[name] = dumped(table)
    if tables.get("evaluation", {}).pop("sets", None):
        sets = plan.evaluation_sets.items()
        tables["evaluation"]["sets"] = {name: {**component(one.data), **dumped(one.keys)} for name, one in sets}
    for spec in COMPONENTS:
        components = getattr(plan, spec.key)
        if components is None:
            continue
        if spec.many:
            tables[spec.key] = [component(one) for one in components]
        elif not spec.named:
            tables[spec.key] = component(components)
        elif components:
            tables[spec.key] = {name: component(one) for name, one in components.items()}
    return tables


def portable_tables(plan: Plan) -> dict[str, Any]:
    """Returns all tables of a plan except its source folder, which may differ between machines."""
    return {key: value for key, value in plan.tables.items() if key != "source_folder"}


def digest_values(plan: Plan) -> dict[str, str]:
    """Returns every value that the digest covers as text, by its key, to compare if digests differ."""
    return {format_path(path): repr(value) for path, value in iterate_values(portable_tables(plan))}


def iterate_values(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields path and value below the tables; an array of anything but tables is one value, as is an empty table."""
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from iterate_values(inner, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for number, inner in enumerate(value):
            yield from iterate_values(inner, (*path, number))
    else:
        yield path, value


def sections(tables: Mapping[str, Any]) -> Iterator[str]:
    """Yields the text of the plan: top-level keys first, then each table under its header, with one line per key."""
    plain_keys = {key: value for key, value in tables.items() if not value or not _is_section(value)}
    yield _format_table(plain_keys)
    for key, value in tables.items():
        if key not in plain_keys:
            if key in NAMED_TABLES.values():
                headed = [(f"[{key}.{_format_key(name)}]", one) for name, one in value.items()]
            elif key == "evaluation" and "sets" in value:
                own = {inner: one for inner, one in value.items() if inner != "sets"}
                headed = [
                    (f"[{key}]", own),
                    *((f"[{key}.sets.{_format_key(name)}]", one) for name, one in value["sets"].items()),
                ]
            elif isinstance(value, list):
                headed = [(f"[[{key}]]", one) for one in value]
            else:
                headed = [(f"[{key}]", value)]
            yield from (f"{header}\n{_format_table(one)}" for header, one in headed)


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
"""Keys that must not change, since the run would compute other numbers; the layout and the learning rates may."""

UNREPORTED_KEYS = (("source_folder",), ("run", "name"), ("run", "folder"), ("model", "compile"), ("model", "weights"))
"""Keys whose changes are not reported: names, how layers are called, and where the first weights came from."""

_NAMES = (("use",), ("factory",))
"""Keys of a table that name the record or factory to which its other keys belong."""

_ABSENT = "nothing"
_SAMPLES = ("data", "samples_per_epoch")


class Change(NamedTuple):
    """Describes one changed value of the plan. before, now: as TOML; "nothing" if the plan does not have the key."""

    path: KeyPath
    before: str
    now: str

    def __str__(self) -> str:
        return f"{format_path(self.path)}: {self.before} -> {self.now}"

    @property
    def is_refused(self) -> bool:
        """Whether a run cannot be resumed with this change."""
        return _is_below(self.path, FIXED_KEYS)


def compare_plans(before: str, now: str) -> list[Change]:
    """Returns the differences between two resolved plans, given as TOML, in the order of their keys."""
    return list(_iterate_changes(tomli.loads(before), tomli.loads(now)))


def check_changes(compare_plans: list[Change]) -> None:
    """Raises PlanError "resume-differs" that names each change with which a run cannot be resumed, with both values."""
    refused = [one for one in compare_plans if one.is_refused]
    # Another record has other keys: if a table's record changed, only that is reported.
    others = {one.path[0] for one in refused if one.path[1:] in _NAMES}
    if first_causes := [one for one in refused if one.path[0] not in others or one.path[1:] in _NAMES]:
        raise PlanError.many(map(_change_diagnostic, first_causes))


def _change_diagnostic(change: Change) -> Diagnostic:
    path, before, now = change
    hint = "put it back, or begin a run of another name; `run.load_weights` takes weights alone"
    if path == _SAMPLES and _ABSENT not in (before, now):  # the run writes this key, not its user
        message = f"the data have changed: they give {now} samples per epoch, and gave the checkpoint's run {before}"
        return Diagnostic("data-changed", message, path=path[:1], hint=hint.replace("it", "them", 1))
    had = f"no `{format_path(path)}`" if before == _ABSENT else f"`{format_path(path)} = {before}`"
    message = f"the checkpoint's run had {had}, the plan has {now}"
    return Diagnostic("resume-differs", message, path=path, hint=hint)


def _iterate_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    values = [{path: format_value(value) for path, value in iterate_values(tables)} for tables in (before, now)]
    for path in dict.fromkeys([*values[0], *values[1]]):
        old, new = (every.get(path, _ABSENT) for every in values)
        if old != new and not _is_below(path, UNREPORTED_KEYS):
            yield Change(path, old, new)


def _is_below(path: KeyPath, places: tuple[KeyPath, ...]) -> bool:
    return any(path[: len(place)] == place for place in places)
