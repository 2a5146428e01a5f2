"""Finds and imports only the plugins that a plan names, and reports a broken one by name.

Discovery reads metadata only: a broken plugin that no plan names does no harm. pluggy validates a plugin and calls its hooks;
the order in which plugins are called is the plan's, never pluggy's.
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
    NEWER_CORE,
    PluginSource,
    core_version,
    find_plugins,
    install_hint,
    unmet_requirement,
)
from sley_core.errors import PlanError, PluginError, cause
from sley_core.plan.kinds import BASES, RECORDS, kind_name
from sley_core.records import GradientHandlerRecord, Record, SchedulerHookRecord
from sley_core.table import RecordKind, Table
from sley_core.words import suggestion

FIRST_PARTY = ("checkpoint", "data", "dp", "hf", "isp", "memory", "metrics", "models", "pp")
"""Plugins of Sley's own distributions `sley-<name>`."""

BUILT_IN = EntryPoint(CORE, "sley_core.plugin", GROUP)
"""Core's own plugin, if core runs from a folder that was never installed."""


@dataclass(frozen=True)
class Plugin:
    """Holds a plugin that has been imported and checked."""

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
        """Returns what `hook` returns, as a list of at most one item; runs generators. Raises PluginError "plugin-failed"."""
        try:
            returned = getattr(self.hooks, hook)(**arguments)
            return [list(one) if hasattr(one, "__next__") else one for one in returned]
        except Exception as error:
            message = f"{self.label} failed in `{hook}`: {type(error).__name__}: {error}"
            raise PluginError("plugin-failed", message, hint="report this to the plugin's authors") from error

    def implements(self, hook: str) -> bool:
        return bool(getattr(self.hooks, hook).get_hookimpls())

    def load_builder(self, record: Record) -> Any:
        """Returns the object that the record's `build` names; raises PluginError "plugin-import" if there is none."""
        try:
            return record.load()
        except Exception as error:
            message = f"{self.label}: cannot import `{record.build}` of `{self.name}.{record.name}`: {cause(error)}"
            raise PluginError("plugin-import", message, hint=f"reinstall {self.dist}, or report it") from error


class Loader:
    """Loads plugins by name, each once. plugins: modules or objects with hooks to use instead of the installed ones; core's own
    is always there, unless this has a `core` too.
    """

    def __init__(self, plugins: Mapping[str, Any] | None = None) -> None:
        self._plugins = plugins
        self._sources: Mapping[str, list[PluginSource]] | None = None
        self._loaded: dict[str, Plugin] = {}

    def names(self) -> list[str]:
        """Returns the names of all plugins that could be loaded, core first, then sorted; imports none."""
        known = self._plugins if self._plugins is not None else self._installed()
        return [CORE, *sorted(set(known) - {CORE})]

    def sources(self, name: str) -> list[PluginSource]:
        """Returns the distributions that provide plugin `name`: one, unless something is wrong; imports nothing."""
        if self._plugins is not None and name in self._plugins:
            return [PluginSource(name, "given", "0", module=self._plugins[name])]
        if name == CORE:
            return self._installed().get(CORE) or [PluginSource(CORE, CORE_DIST, core_version(), BUILT_IN)]
        return [] if self._plugins is not None else self._installed().get(name, [])

    def load(self, name: str) -> Plugin:
        """Returns the plugin `name`, loading it at the first call.

        Raises PluginError: "plugin-missing" (one of Sley's own, not installed), "plugin-unknown", "plugin-ambiguous" (in two
        distributions), "plugin-incompatible" (needs another core), "plugin-import", "plugin-hook" (implements an unknown hook,
        or one without its mark), "plugin-argument" (wants an argument that only a newer core's hook has), "plugin-invalid" (its
        records).
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
                hint = f"take {NEWER_CORE}, or a version of {source.dist} that this core suits"
                raise PluginError("plugin-incompatible", message, hint=hint)
            hooks = load_hooks(import_plugin(source), source)
            self._loaded[name] = Plugin(name, source.dist, source.version, collect_records(hooks, source), hooks)
        return self._loaded[name]

    def record(self, kind: RecordKind, name: str) -> Record:
        """Returns the record `plugin.record`. Raises PluginError as `load` does, and PlanError "unknown-record"."""
        plugin_name, _, record_name = name.partition(".")
        plugin = self.load(plugin_name)
        known = plugin.records.get(kind, {})
        if record_name in known:
            return known[record_name]
        has = f"it has {', '.join(f'`{plugin_name}.{one}`' for one in known)}" if known else None
        message = f"{plugin.label} has no {kind_name(kind)} `{record_name}`"
        raise PlanError("unknown-record", message, hint=suggestion(name, (f"{plugin_name}.{one}" for one in known), has))

    def _installed(self) -> Mapping[str, list[PluginSource]]:
        if self._sources is None:
            self._sources = find_plugins()
        return self._sources

    def _missing_error(self, name: str) -> PluginError:
        """Returns the PluginError for a plugin that is not there: "plugin-missing" for Sley's own, else "plugin-unknown"."""
        if name in FIRST_PARTY:
            message = f"plugin `{name}` is not installed"
            return PluginError("plugin-missing", message, hint=install_hint(name))
        here = ", ".join(f"`{one}`" for one in self.names())
        have = f"install the package that has it, by custom `sley-{name.replace('_', '-')}`; the plugins here are {here}"
        message = f"there is no plugin `{name}`"
        return PluginError("plugin-unknown", message, hint=suggestion(name, {*self.names(), *FIRST_PARTY}, have))


HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("sley_")}

RECORD_HOOKS: dict[str, type[Record]] = {
    "sley_records": Record,
    "sley_gradient_handlers": GradientHandlerRecord,
    "sley_scheduler_hooks": SchedulerHookRecord,
}
"""The hooks that return records, and the class of what each may return."""


def import_plugin(source: PluginSource) -> Any:
    """Imports the plugin's module. Raises PluginError "plugin-import" with the cause, also SystemExit."""
    if source.entry_point is None:
        return source.module
    try:
        return source.entry_point.load()
    except (Exception, SystemExit) as error:
        hint = f"reinstall {source.dist}, or report it to its authors"
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = f"install what provides `{error.name}`, or reinstall {source.dist}"
        message = f"{source.label} cannot be imported: {cause(error)}"
        raise PluginError("plugin-import", message, hint=hint) from error


def load_hooks(module: Any, source: PluginSource) -> Any:
    """Returns the callers of one plugin's hooks. Raises PluginError "plugin-hook" or "plugin-argument" for an unknown one."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in dir(module):
        options = manager.parse_hookimpl_opts(module, name)
        if options is None:
            if name in HOOKS and inspect.isroutine(getattr(module, name)):
                message = f"{source.label}: its `{name}` would never be called: it is not marked as a hook"
                raise PluginError("plugin-hook", message, hint="write `@hookimpl` above it, of `sley_core.hookspecs`")
            continue
        hook = options.get("specname") or name
        if hook not in HOOKS and options["optionalhook"]:  # a hook of another package
            continue
        if hook not in HOOKS:
            hint = suggestion(hook, HOOKS, f"it may need a newer core than {core_version()}")
            raise PluginError("plugin-hook", f"{source.label}: there is no hook `{hook}`", hint=hint)
        offered = inspect.signature(HOOKS[hook]).parameters
        wanted = inspect.signature(getattr(module, name)).parameters.values()  # pluggy passes those without a default
        more = [one.name for one in wanted if one.default is one.empty and one.name not in ("self", *offered)]
        if more:
            gives = ", ".join(f"`{key}`" for key in offered) or "nothing"
            message = f"{source.label}: its `{hook}` wants `{more[0]}`, but core {core_version()} gives {gives}"
            hint = f"it is written for a newer core: take {NEWER_CORE}, or an older {source.dist}"
            raise PluginError("plugin-argument", message, hint=hint)
    try:
        manager.register(module, source.name)
    except pluggy.PluginValidationError as error:
        raise PluginError("plugin-invalid", f"{source.label}: {cause(error)}") from error
    return manager.hook


def collect_records(hooks: Any, source: PluginSource) -> Mapping[RecordKind, Mapping[str, Record]]:
    """Returns the plugin's records by kind and name. Raises PluginError "plugin-invalid": a hook that fails, something that is
    no record, or none of the hook's kind, a name that is used twice or cannot be written in a plan, a config that is not of its
    kind's base or has a reserved key.
    """
    records: dict[RecordKind, dict[str, Record]] = {kind: {} for kind in RECORDS}
    for hook, types in RECORD_HOOKS.items():
        try:
            returned = [record for records in getattr(hooks, hook)() for record in records]
        except Exception as error:
            raise PluginError("plugin-invalid", f"{source.label} failed in `{hook}`: {cause(error)}") from error
        for record in returned:
            kind = next((kind for kind, of_kind in RECORDS.items() if isinstance(record, of_kind)), None)
            if kind is None or not isinstance(record, types):
                wrong: str | None = f"returns a {type(record).__name__}, not a {types.__name__}"
            else:
                wrong = _find_record_fault(record, kind, records[kind])
            if wrong or kind is None:
                hint = f"report this to the authors of {source.dist}"
                raise PluginError("plugin-invalid", f"{source.label}: `{hook}` {wrong}", hint=hint)
            records[kind][record.name] = record
    return records


def _find_record_fault(record: Record, kind: RecordKind, named: Iterable[str]) -> str | None:
    """Returns a description of a record's fault, or None. named: the names of the previous records."""
    if not record.name.isidentifier():
        return f"has the name `{record.name}`, which is none: letters, digits and `_`"
    if record.name in named:
        return f"returns two records of the name `{record.name}`"
    base = BASES.get(kind, Table)
    if not (isinstance(record.config, type) and issubclass(record.config, base)):
        return f"gives `{record.name}` a config that is no subclass of {base.__name__}"
    reserved = [key for key in ("use", "factory") if key in record.config.model_fields]
    return f"gives `{record.name}` a config with the key `{reserved[0]}`, which every table has" if reserved else None
