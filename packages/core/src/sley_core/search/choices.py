"""What a search of layouts may put into a plan's tables: every installed plugin's records that declare `variants`.

The plan's own choice comes first, whatever it is; a record without variants is taken only where the plan names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sley_core.errors import PluginError
from sley_core.loader import Loader, Plugin
from sley_core.plan.plan import Component, Plan
from sley_core.records import GradientHandlerRecord, Record
from sley_core.table import RecordKind

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """One way to fill a table. name: of the record. options: the table's other keys, as a plan would have them."""

    name: str
    options: Options

    @property
    def table(self) -> dict[str, Any]:
        """The table, as plain data."""
        return {"use": self.name, **self.options}

    def __str__(self) -> str:
        options = ", ".join(f"{key} = {value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(frozen=True)
class Choices:
    """What may stand in each table that decides a layout.

    offload: lists of managers, of which the first is the plan's own. weights, attention: empty where nothing that is installed
    shards weights, or attends over slices of sequences. skipped: plugins that could not be loaded, with the reason.
    """

    schedules: tuple[Choice, ...]
    policies: tuple[Choice, ...]
    reducers: tuple[Choice, ...]
    offload: tuple[tuple[Choice, ...], ...]
    weights: tuple[Choice, ...]
    attention: tuple[Choice, ...]
    skipped: tuple[str, ...] = ()


def choices_of(plan: Plan) -> Choices:
    """Returns what `plan` and the installed plugins offer. Imports these plugins; one that is broken is skipped, by name."""
    plugins, skipped = _plugins(plan.loader)
    reducers = [one for one in plan.gradient_handlers if _is_reducer(one.record)]
    managers = tuple(_own(one) for one in plan.offload)
    others = [(one,) for one in _offered(plugins, "offload_managers") if (one,) != managers]
    return Choices(
        _with_own(plan.pipeline, _offered(plugins, "schedules")),
        _with_own(plan.activations, _offered(plugins, "activation_policies")),
        _with_own(reducers[0] if reducers else None, _reducers(plugins)),
        (managers, *([()] if managers else []), *others),
        _with_own(plan.weights, _offered(plugins, "weight_communicators")),
        _with_own(plan.sequence, _offered(plugins, "sequence_attentions")),
        skipped,
    )


def _plugins(loader: Loader) -> tuple[list[Plugin], tuple[str, ...]]:
    found, skipped = [], []
    for name in loader.names():
        try:
            found.append(loader.load(name))
        except PluginError as error:
            skipped.append(f"{name}: {error.diagnostics[0].message}")
    return found, tuple(skipped)


def _records(plugins: list[Plugin], kind: RecordKind) -> Iterator[tuple[str, Record]]:
    for plugin in plugins:
        for name, record in plugin.records.get(kind, {}).items():
            yield f"{plugin.name}.{name}", record


def _offered(plugins: list[Plugin], kind: RecordKind) -> list[Choice]:
    return [Choice(name, options) for name, record in _records(plugins, kind) for options in record.variants]


def _reducers(plugins: list[Plugin]) -> list[Choice]:
    """Returns the reducers among the gradient handlers that plugins offer."""
    found = _records(plugins, "gradient_handlers")
    return [Choice(name, options) for name, record in found if _is_reducer(record) for options in record.variants]


def _is_reducer(record: object) -> bool:
    return isinstance(record, GradientHandlerRecord) and record.role == "reducer"


def _with_own(own: Component | None, offered: list[Choice]) -> tuple[Choice, ...]:
    """Returns the plan's own choice, if it made one, and after it those that are offered and say something else."""
    if own is None:
        return tuple(offered)
    first = _own(own)
    return (first, *(one for one in offered if one != first))


def _own(component: Component) -> Choice:
    """Returns a plan's table as a choice, without what its record's table has by default."""
    given: Any = component.document.tables
    for part in component.path:
        if isinstance(given, dict) and part not in given:  # a default that the plan does not write
            given = {}
            break
        given = given[part]
    options = {key: value for key, value in given.items() if key not in ("use", "factory")}
    return Choice(component.name, options)
