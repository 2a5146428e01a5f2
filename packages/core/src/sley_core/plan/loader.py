"""Imports and checks the plugins that a plan names.

Discovery reads only metadata, so a broken plugin does no harm if no plan names it. pluggy validates a plugin's hooks. Hooks are
called in the plan's order of plugins, not in pluggy's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from sley_core import hookspecs
from sley_core.discovery import (
    CORE,
    CORE_DIST,
    GROUP,
    UPDATE_CORE,
    PluginSource,
    core_version,
    find_plugins,
    install_hint,
    unmet_requirement,
)
from sley_core.errors import PlanError, PluginError, format_cause
from sley_core.plan.kinds import BASES, RECORDS, kind_name
from sley_core.records import GradientHandlerRecord, Record, SchedulerHookRecord
from sley_core.table import RecordKind, Table
from sley_core.words import suggestion

FIRST_PARTY = ("checkpoint", "data", "dp", "hf", "isp", "memory", "metrics", "models", "pp")
"""The plugins of Sley's own distributions `sley-<name>`."""

BUILT_IN = EntryPoint(CORE, "sley_core.plugin", GROUP)
"""The entry point of core's plugin, used if core is not installed as a distribution."""


@dataclass(frozen=True)
class Plugin:
    """An imported and checked plugin."""

    name: str
    dist: str
    version: str
    records: Mapping[RecordKind, Mapping[str, Record]]
    hooks: Any = field(compare=False, repr=False)

    @property
    def label(self) -> str:
        return f"plugin `{self.name}` ({self.dist} {self.version})"

    def __str__(self) -> str:
        return f"{self.dist} {self.version}"

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Calls `hook` and returns its result in a list, which is empty if the result is None; consumes generators.

        Raises PluginError "plugin-failed" if the hook raises.
        """
        try:
            results = getattr(self.hooks, hook)(**arguments)
            return [list(result) if hasattr(result, "__next__") else result for result in results]
        except Exception as error:
            message = f"{self.label} failed in `{hook}`: {type(error).__name__}: {error}"
            raise PluginError("plugin-failed", message, hint="report this to the plugin's authors") from error

    def implements(self, hook: str) -> bool:
        return bool(getattr(self.hooks, hook).get_hookimpls())

    def load_builder(self, record: Record) -> Any:
        """Imports and returns the record's builder. Raises PluginError "plugin-import"."""
        try:
            return record.load()
        except Exception as error:
            message = f"{self.label}: cannot import `{record.build}` of `{self.name}.{record.name}`: {format_cause(error)}"
            hint = f"reinstall {self.dist}, or report this to its authors"
            raise PluginError("plugin-import", message, hint=hint) from error


class Loader:
    """Loads each plugin once. plugins: objects with hooks by name, which replace the installed plugins; the plugin `core`
    remains available.
    """

    def __init__(self, plugins: Mapping[str, Any] | None = None) -> None:
        self._plugins = plugins
        self._sources: Mapping[str, list[PluginSource]] | None = None
        self._loaded: dict[str, Plugin] = {}

    def names(self) -> list[str]:
        """Returns the names of all available plugins, core first, then sorted. Imports nothing."""
        plugins = self._plugins if self._plugins is not None else self._installed()
        return [CORE, *sorted(set(plugins) - {CORE})]

    def sources(self, name: str) -> list[PluginSource]:
        """Returns the distributions that provide the plugin `name`. Imports nothing."""
        if self._plugins is not None and name in self._plugins:
            return [PluginSource(name, "given", "0", module=self._plugins[name])]
        if name == CORE:
            return self._installed().get(CORE) or [PluginSource(CORE, CORE_DIST, core_version(), BUILT_IN)]
        return [] if self._plugins is not None else self._installed().get(name, [])

    def load(self, name: str) -> Plugin:
        """Returns the plugin `name`, which the first call imports and checks.

        Raises PluginError: "plugin-missing" (a Sley plugin that is not installed), "plugin-unknown", "plugin-ambiguous" (in two
        distributions), "plugin-incompatible" (needs another core), "plugin-import", "plugin-hook" (an unknown hook or
        argument, or a hook without `@hookimpl`), "plugin-invalid" (invalid records).
        """
        if name not in self._loaded:
            sources = self.sources(name)
            if not sources:
                raise self._missing_error(name)
            if len(sources) > 1:
                dists = " and ".join(f"{source.dist} {source.version}" for source in sources)
                hint = f"uninstall one of them: `pip uninstall {sources[-1].dist}`"
                raise PluginError("plugin-ambiguous", f"plugin `{name}` is provided by {dists}", hint=hint)
            source = sources[0]
            needed = unmet_requirement(source)
            if needed is not None:
                message = f"{source.label} needs {needed}, but sley-core {core_version()} is installed"
                hint = f"{UPDATE_CORE}, or install a version of {source.dist} that supports this core"
                raise PluginError("plugin-incompatible", message, hint=hint)
            hooks = load_hooks(import_plugin(source), source)
            self._loaded[name] = Plugin(name, source.dist, source.version, collect_records(hooks, source), hooks)
        return self._loaded[name]

    def record(self, kind: RecordKind, name: str) -> Record:
        """Returns the record `plugin.record`. Raises PlanError "unknown-record", or the errors of `load`."""
        plugin_name, _, record_name = name.partition(".")
        plugin = self.load(plugin_name)
        records = plugin.records.get(kind, {})
        if record_name in records:
            return records[record_name]
        names = [f"{plugin_name}.{record}" for record in records]
        hint = f"it has {', '.join(f'`{record}`' for record in names)}" if names else None
        message = f"{plugin.label} has no {kind_name(kind)} `{record_name}`"
        raise PlanError("unknown-record", message, hint=suggestion(name, names, hint))

    def _installed(self) -> Mapping[str, list[PluginSource]]:
        if self._sources is None:
            self._sources = find_plugins()
        return self._sources

    def _missing_error(self, name: str) -> PluginError:
        """Returns the PluginError for a plugin that is not installed: "plugin-missing" for Sley's own, else
        "plugin-unknown".
        """
        if name in FIRST_PARTY:
            message = f"plugin `{name}` is not installed"
            return PluginError("plugin-missing", message, hint=install_hint(name))
        installed = ", ".join(f"`{plugin}`" for plugin in self.names())
        hint = f"install its package, usually `sley-{name.replace('_', '-')}`; the installed plugins are {installed}"
        message = f"there is no plugin `{name}`"
        return PluginError("plugin-unknown", message, hint=suggestion(name, {*self.names(), *FIRST_PARTY}, hint))


HOOKS = frozenset(name for name in vars(hookspecs) if name.startswith("sley_"))

RECORD_HOOKS: dict[str, type[Record]] = {
    "sley_records": Record,
    "sley_gradient_handlers": GradientHandlerRecord,
    "sley_scheduler_hooks": SchedulerHookRecord,
}
"""The hooks that return records, with the class of the records."""


def import_plugin(source: PluginSource) -> Any:
    """Imports and returns the plugin's module. Raises PluginError "plugin-import", even if the module exits."""
    if source.entry_point is None:
        return source.module
    try:
        return source.entry_point.load()
    except (Exception, SystemExit) as error:
        hint = f"reinstall {source.dist}, or report this to its authors"
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = f"install the package with `{error.name}`, or reinstall {source.dist}"
        message = f"{source.label} cannot be imported: {format_cause(error)}"
        raise PluginError("plugin-import", message, hint=hint) from error


def load_hooks(module: Any, source: PluginSource) -> Any:
    """Registers one plugin's hooks with pluggy and returns their callers.

    Raises PluginError "plugin-hook" for an unmarked or unknown hook, or for an argument that the hook does not have.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in dir(module):
        if name in HOOKS and inspect.isroutine(getattr(module, name)) and manager.parse_hookimpl_opts(module, name) is None:
            message = f"{source.label}: its `{name}` would never be called, because it is not marked as a hook"
            raise PluginError("plugin-hook", message, hint="add `@hookimpl` of `sley_core.hookspecs` above the function")
    try:
        manager.register(module, source.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        lines = str(error).splitlines()
        message = f"{source.label} does not fit core {core_version()}: {lines[0]}{f': {lines[-1]}' if lines[1:] else ''}"
        hint = f"correct the hook, {UPDATE_CORE}, or install another version of {source.dist}"
        raise PluginError("plugin-hook", message, hint=hint) from error
    return manager.hook


def collect_records(hooks: Any, source: PluginSource) -> Mapping[RecordKind, Mapping[str, Record]]:
    """Returns the plugin's records by kind and name.

    Raises PluginError "plugin-invalid" if a hook raises or returns anything except valid records of its class.
    """
    records: dict[RecordKind, dict[str, Record]] = {kind: {} for kind in RECORDS}
    for hook, types in RECORD_HOOKS.items():
        try:
            results = [record for hook_records in getattr(hooks, hook)() for record in hook_records]
        except Exception as error:
            raise PluginError("plugin-invalid", f"{source.label} failed in `{hook}`: {format_cause(error)}") from error
        for record in results:
            kind = next((kind for kind, record_type in RECORDS.items() if isinstance(record, record_type)), None)
            if kind is None or not isinstance(record, types):
                fault: str | None = f"returns a {type(record).__name__}, not a {types.__name__}"
            else:
                fault = _find_record_fault(record, kind, records[kind])
            if fault or kind is None:
                hint = f"report this to the authors of {source.dist}"
                raise PluginError("plugin-invalid", f"{source.label}: `{hook}` {fault}", hint=hint)
            records[kind][record.name] = record
    return records


def _find_record_fault(record: Record, kind: RecordKind, previous_names: Iterable[str]) -> str | None:
    """Describes why a record is invalid; returns None for a valid record."""
    if not record.name.isidentifier():
        return f"returns a record whose name must consist of letters, digits and `_`, but is `{record.name}`"
    if record.name in previous_names:
        return f"returns two records with the name `{record.name}`"
    base = BASES.get(kind, Table)
    if not (isinstance(record.config, type) and issubclass(record.config, base)):
        return f"returns `{record.name}` with a config that is not a subclass of {base.__name__}"
    reserved = [key for key in ("use", "factory") if key in record.config.model_fields]
    return f"returns `{record.name}` with a config that has the reserved key `{reserved[0]}`" if reserved else None
