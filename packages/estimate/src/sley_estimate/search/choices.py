"""Finds what a search of layouts may put into a plan's tables: every installed plugin's records of which it names
variants (`hookspecs.py`).

The plan's own choice comes first, whatever it is; a record without variants is taken only where the plan names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from sley_core.errors import PluginError, SleyError
from sley_core.plan.check import check_offload
from sley_core.plan.load import with_tables
from sley_core.plan.loader import Loader, Plugin
from sley_core.plan.plan import Component, Plan
from sley_core.records import GradientHandlerRecord, OffloadManagerRecord, Record
from sley_core.table import RecordKind
from sley_estimate.hookspecs import Hint, hint_of, hints_of

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """One way to fill a table.

    name: of the record. options: the table's other keys, as a plan would have them. record, config: what the name stands for,
    and the whole table; None of a factory. copies: whether it is a policy that copies what layers save to the host.
    """

    name: str
    options: Options
    record: Record | None = field(default=None, compare=False, repr=False)
    config: Any = field(default=None, compare=False, repr=False)
    copies: bool = field(default=False, compare=False, repr=False)

    @property
    def table(self) -> dict[str, Any]:
        """Returns the table as plain data: `use`, and the options."""
        return {"use": self.name, **self.options}

    def __str__(self) -> str:
        return self._words

    @cached_property
    def _words(self) -> str:  # made once: a search asks for it with every layout
        options = ", ".join(f"{key} = {value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name


@dataclass(frozen=True)
class Choices:
    """What may stand in each table that decides a layout.

    weights, attention: empty where nothing that is installed shards weights, or attends over slices of sequences. offload: how
    optimizer states leave the device in a step; the plan's own way comes first, and None is that they stay. skipped: plugins
    that could not be loaded, and variants that are no tables of their records, with the reason.
    """

    schedules: tuple[Choice, ...]
    policies: tuple[Choice, ...]
    reducers: tuple[Choice, ...]
    weights: tuple[Choice, ...]
    attention: tuple[Choice, ...]
    offload: tuple[Choice | None, ...] = (None,)
    skipped: tuple[str, ...] = ()


def choices_of(plan: Plan) -> Choices:
    """Imports the installed plugins and returns what `plan` and they offer for each table, the plan's own first. A plugin that
    is broken is skipped, and named in `skipped`.
    """
    offered = _Offered(plan.loader)
    reducers = [one for one in plan.gradient_handlers if _is_reducer(one.record)]
    handlers = [one for one in offered.of("gradient_handlers") if _is_reducer(one.record)]
    return Choices(
        _with_own(plan, plan.pipeline, offered.of("schedules")),
        _with_own(plan, plan.activations, offered.of("activation_policies")),
        _with_own(plan, reducers[0] if reducers else None, handlers),
        _with_own(plan, plan.weights, offered.of("weight_communicators")),
        _with_own(plan, plan.sequence, offered.of("sequence_attentions")),
        _offload(plan, offered),
        tuple(offered.skipped),
    )


class _Offered:
    """What installed plugins declare. skipped: what of it cannot be taken, and why."""

    def __init__(self, loader: Loader) -> None:
        self.skipped: list[str] = []
        self._plugins: list[tuple[Plugin, Mapping[str, Hint]]] = []
        for name in loader.names():
            try:
                plugin = loader.load(name)
                self._plugins.append((plugin, hints_of(plugin)))
            except PluginError as error:
                self.skipped.append(f"{name}: {error.diagnostics[0].message}")

    def of(self, kind: RecordKind) -> list[Choice]:
        """Returns the variants of all records of a kind; one that is no table of its record is added to `skipped` instead."""
        found = []
        for name, record, hint in _records(self._plugins, kind):
            for options in hint.variants:
                try:
                    config = record.config.model_validate(options)
                    found.append(Choice(name, options, record, config, hint.copies))
                except ValidationError as error:
                    self.skipped.append(f"{name}: its variant {dict(options)} is no table of it: {error.errors()[0]['msg']}")
        return found


def _records(plugins: list[tuple[Plugin, Mapping[str, Hint]]], kind: RecordKind) -> Iterator[tuple[str, Record, Hint]]:
    """Yields all records of a kind of which a plugin says something, each with its full name, `plugin.record`."""
    for plugin, hints in plugins:
        for name, record in plugin.records.get(kind, {}).items():
            if hint := hints.get(f"{plugin.name}.{name}"):
                yield f"{plugin.name}.{name}", record, hint


def _offload(plan: Plan, offered: _Offered) -> tuple[Choice | None, ...]:
    """Returns the ways in which optimizer states may be kept off the device in a step, the plan's own first; None stands for
    staying on it. Left out are those that the plan's optimizer cannot be stepped with.
    """
    found: list[Choice | None] = [next((_own(plan, one) for one in plan.offload if _works_in_steps(plan, one)), None)]
    for choice in (None, *offered.of("offload_managers")):
        if choice in found or (choice is not None and not _works_in_steps(plan, choice)):
            continue
        try:
            other = with_tables(plan, {"offload": offload_tables(plan, choice) or None})
        except SleyError as error:
            offered.skipped.append(f"{choice}: {error.diagnostics[0].message}")
            continue
        if not any(check_offload(other)):
            found.append(choice)
    return tuple(found)


def offload_tables(plan: Plan, choice: Choice | None) -> list[dict[str, Any]]:
    """Returns the plan's list `[[offload]]` with `choice` (None: nothing) in place of the manager that moves memory in every
    step; managers that move one of its parts by call are left out too.
    """
    taken = _moved_by(choice) if choice is not None else set()
    given = plan.document.tables.get("offload", ())
    kept = [
        dict(table)
        for component, table in zip(plan.offload, given, strict=True)
        if not _works_in_steps(plan, component) and not taken & _moved_by(component)
    ]
    return [*kept, choice.table] if choice is not None else kept


def _works_in_steps(plan: Plan, manager: Component | Choice) -> bool:
    """Returns whether a manager of `[[offload]]` moves memory in every step; also if nothing is said of it."""
    return hint_of(plan.loader, manager.name).in_steps(manager.config)


def _moved_by(manager: Component | Choice) -> set[str]:
    """Returns the parts of a run's memory that a manager moves."""
    record = manager.record
    assert isinstance(record, OffloadManagerRecord), manager
    return set(record.parts(manager.config))


def _is_reducer(record: object) -> bool:
    """Returns whether a record is that of a gradient handler that sums gradients."""
    return isinstance(record, GradientHandlerRecord) and record.role == "reducer"


def _with_own(plan: Plan, own: Component | None, offered: list[Choice]) -> tuple[Choice, ...]:
    """Returns the plan's own choice, if it made one, and after it those that are offered and say something else: an option
    that is left out is as one with the value of its default.
    """
    if own is None:
        return tuple(offered)
    return (_own(plan, own), *(one for one in offered if (one.name, one.config) != (own.name, own.config)))


def _own(plan: Plan, component: Component) -> Choice:
    """Returns a plan's table as a choice: its options are those that the plan writes, not its record's defaults."""
    given: Any = component.document.tables
    for part in component.path:
        if isinstance(given, dict) and part not in given:  # a default that the plan does not write
            given = {}
            break
        given = given[part]
    options = {key: value for key, value in given.items() if key not in ("use", "factory")}
    copies = hint_of(plan.loader, component.name).copies
    return Choice(component.name, options, component.record, component.config, copies)
