"""Finds, imports and checks the plugins that a plan names.

Discovery reads only the metadata of packages, so a broken plugin does no harm unless a plan names it. pluggy validates the
hooks of a plugin. Hooks are called in the plan's order of plugins, not in pluggy's order.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from sley_core import hookspecs
from sley_core.errors import PlanError, PluginError, format_cause, install_hint, suggestion
from sley_core.plan.kinds import CONFIG_BASES, record_type_name
from sley_core.records import GradientHandlerRecord, Record, SchedulerHookRecord
from sley_core.table import Table

ENTRY_POINT_GROUP = "sley.plugins"
"""The group of entry points that name plugins."""

CORE, CORE_DIST = "core", "sley-core"
"""The names of the plugin `core` and of its distribution."""

FIRST_PARTY_PLUGINS = ("checkpoint", "data", "dp", "hf", "isp", "memory", "metrics", "models", "optim", "pp")
"""The plugins of Sley's own distributions `sley-<name>`."""

UPDATE_CORE_HINT = "update sley-core (`git pull` in the clone of Sley's repository from which it is installed)"
"""The beginning of the hint for a plugin that needs another version of core."""

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class PluginSource:
    """Describes an installed plugin. dist, version: the name and the version of its distribution. import_module: a function
    that imports the plugin and returns the object that has its hooks. requires: the distribution's `Requires-Dist` lines.
    """

    name: str
    dist: str
    version: str
    import_module: Callable[[], Any] = field(compare=False, repr=False)
    requires: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.dist} {self.version}"

    @property
    def label(self) -> str:
        """The plugin's name, distribution and version, for messages."""
        return f"plugin `{self.name}` ({self})"


def find_plugins() -> Mapping[str, list[PluginSource]]:
    """Returns the sources of all plugins on `sys.path`, by name: one for each distribution that provides the plugin. If there
    are several copies of a distribution, the first one counts, as in imports.
    """
    plugins_by_name: dict[str, list[PluginSource]] = {}
    dists: set[str] = set()
    for folder in map(Path, sys.path):
        try:
            modified_ns = folder.stat().st_mtime_ns
        except OSError:
            continue  # missing, or not readable: it has no plugins
        for dist, sources in _find_in_folder(folder.absolute(), modified_ns):
            if dist not in dists:
                dists.add(dist)
                for source in sources:
                    plugins_by_name.setdefault(source.name, []).append(source)
    return plugins_by_name


@cache  # a search of an environment's folder takes 20 ms; a folder that has changed is searched again
def _find_in_folder(folder: Path, modified_ns: int) -> list[tuple[str, list[PluginSource]]]:
    """Returns the plugins of each distribution in `folder` that has plugins, with the distribution's canonical name."""
    plugins: list[tuple[str, list[PluginSource]]] = []
    for dist in distributions(path=[str(folder)]):
        try:
            points = dist.entry_points.select(group=ENTRY_POINT_GROUP)
            name = _canonical_name(dist.name) if points else ""
        except (KeyError, OSError, TypeError, ValueError):
            continue  # an unreadable plugin is reported as missing if a plan names it
        if points:
            requires = tuple(dist.requires or ())
            sources = [PluginSource(point.name, dist.name, dist.version, point.load, requires) for point in points]
            plugins.append((name, sources))
    return plugins


def _canonical_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def core_version() -> str:
    """Returns the installed version of core, or "0" if core is not installed as a distribution."""
    try:
        return version(CORE_DIST)
    except PackageNotFoundError:
        return "0"


def find_unmet_requirement(plugin: PluginSource) -> str | None:
    """Returns the requirement of `plugin` on core if the installed core does not meet it, and None otherwise."""
    if not plugin.requires or core_version() == "0":
        return None
    # This import takes 15 ms, and only third-party plugins need it.
    from packaging.requirements import InvalidRequirement, Requirement

    for line in plugin.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        has_core = _canonical_name(requirement.name) == CORE_DIST
        is_active = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if has_core and is_active and not requirement.specifier.contains(core_version(), prereleases=True):
            return f"{CORE_DIST}{requirement.specifier}"
    return None


@dataclass(frozen=True)
class Plugin(PluginSource):
    """An imported, checked plugin. records: its records, by name. hooks: pluggy's object with a caller for each hook."""

    records: Mapping[str, Record] = field(default_factory=dict)
    hooks: Any = field(default=None, compare=False, repr=False)

    def records_of(self, record_type: type[AnyRecord]) -> dict[str, AnyRecord]:
        """Returns the records of the class `record_type` by their full names, such as "dp.bucketed"."""
        records = self.records.items()
        return {f"{self.name}.{name}": record for name, record in records if isinstance(record, record_type)}

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Calls the plugin's `hook`. Returns a list with the result, or [] if the result is None or there is no implementation.
        The result of a generator is a list. Raises PluginError "plugin-failed" if the hook raises.
        """
        try:
            results = getattr(self.hooks, hook)(**arguments)
            return [list(result) if hasattr(result, "__next__") else result for result in results]
        except Exception as error:
            message = f"{self.label} failed in `{hook}`: {type(error).__name__}: {error}"
            raise PluginError("plugin-failed", message, hint="report this to the plugin's authors") from error

    def implements(self, hook: str) -> bool:
        """Returns whether the plugin implements `hook`."""
        return bool(getattr(self.hooks, hook).get_hookimpls())

    def load_builder(self, record: Record) -> Any:
        """Imports and returns the record's builder. Raises PluginError "plugin-import" if the import fails."""
        try:
            return record.load()
        except Exception as error:
            message = f"{self.label}: cannot import `{record.build}` of `{self.name}.{record.name}`: {format_cause(error)}"
            hint = f"reinstall {self.dist}, or report this to its authors"
            raise PluginError("plugin-import", message, hint=hint) from error


class PluginLoader:
    """Loads each plugin once. plugins: objects with hooks, by name, which replace all installed plugins except `core`."""

    def __init__(self, plugins: Mapping[str, Any] | None = None) -> None:
        self._plugins = plugins
        self._loaded: dict[str, Plugin] = {}

    def names(self) -> list[str]:
        """Returns the names of all available plugins: first `core`, then the others alphabetically. Imports no plugin."""
        plugins: Mapping[str, Any] = find_plugins() if self._plugins is None else self._plugins
        return [CORE, *sorted(set(plugins) - {CORE})]

    def sources(self, name: str) -> list[PluginSource]:
        """Returns a source for each distribution that provides the plugin `name`; [] if there is none. Imports no plugin."""
        if name == CORE:
            return [PluginSource(CORE, CORE_DIST, core_version(), EntryPoint(CORE, "sley_core.plugin", ENTRY_POINT_GROUP).load)]
        plugins = self._plugins
        if plugins is None:
            return find_plugins().get(name, [])
        return [PluginSource(name, "given", "0", lambda: plugins[name])] if name in plugins else []

    def load(self, name: str) -> Plugin:
        """Returns the plugin `name`. The first call for a name imports and checks the plugin. Raises PluginError
        "plugin-missing" (a Sley plugin that is not installed), "plugin-unknown", "plugin-ambiguous" (several distributions have
        it), "plugin-incompatible" (it needs another version of core), and the errors of `load_hooks` and `collect_records`.
        """
        if name not in self._loaded:
            sources = self.sources(name)
            if not sources:
                raise self._missing_error(name)
            if len(sources) > 1:
                dists = " and ".join(map(str, sources))
                hint = f"uninstall one of them: `pip uninstall {sources[-1].dist}`"
                raise PluginError("plugin-ambiguous", f"plugin `{name}` is provided by {dists}", hint=hint)
            source = sources[0]
            if (needed := find_unmet_requirement(source)) is not None:
                message = f"{source.label} needs {needed}, but sley-core {core_version()} is installed"
                hint = f"{UPDATE_CORE_HINT}, or install a version of {source.dist} that supports this core"
                raise PluginError("plugin-incompatible", message, hint=hint)
            hooks = load_hooks(source)
            self._loaded[name] = Plugin(**vars(source), records=collect_records(hooks, source), hooks=hooks)
        return self._loaded[name]

    def record(self, record_type: type[AnyRecord], name: str) -> AnyRecord:
        """Returns the record of the class `record_type` with the full name `name`, such as "dp.bucketed". Raises PlanError
        "unknown-record" if the plugin has no such record, and the errors of `load`.
        """
        plugin = self.load(name.partition(".")[0])
        records = plugin.records_of(record_type)
        if name in records:
            return records[name]
        hint = f"it has {', '.join(f'`{record}`' for record in records)}" if records else None
        message = f"{plugin.label} has no {record_type_name(record_type)} `{name.partition('.')[2]}`"
        raise PlanError("unknown-record", message, hint=suggestion(name, records, hint))

    def _missing_error(self, name: str) -> PluginError:
        if name in FIRST_PARTY_PLUGINS:
            return PluginError("plugin-missing", f"plugin `{name}` is not installed", hint=install_hint(name))
        installed = ", ".join(f"`{plugin}`" for plugin in self.names())
        hint = f"install its package, usually `sley-{name.replace('_', '-')}`; the installed plugins are {installed}"
        choices = {*self.names(), *FIRST_PARTY_PLUGINS}
        return PluginError("plugin-unknown", f"there is no plugin `{name}`", hint=suggestion(name, choices, hint))


HOOKS = frozenset(name for name in vars(hookspecs) if name.startswith("sley_"))
"""The names of all hooks."""

RECORD_HOOKS: dict[str, type[Record]] = {
    "sley_records": Record,
    "sley_gradient_handlers": GradientHandlerRecord,
    "sley_scheduler_hooks": SchedulerHookRecord,
}
"""The hooks that return records, each with the class of its records."""


def load_hooks(source: PluginSource) -> Any:
    """Imports a plugin, registers its hooks with pluggy and returns their callers. Raises PluginError "plugin-import" if the
    import fails or exits, and "plugin-hook" for a hook without `@hookimpl`, an unknown hook or an unknown argument.
    """
    try:
        module = source.import_module()
    except (Exception, SystemExit) as error:
        hint = f"reinstall {source.dist}, or report this to its authors"
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = f"install the package that provides `{error.name}`, or reinstall {source.dist}"
        message = f"{source.label} cannot be imported: {format_cause(error)}"
        raise PluginError("plugin-import", message, hint=hint) from error
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    for name in dir(module):
        if name in HOOKS and inspect.isroutine(getattr(module, name)) and manager.parse_hookimpl_opts(module, name) is None:
            message = f"{source.label}: its `{name}` would never be called, because it is not marked as a hook"
            raise PluginError("plugin-hook", message, hint="add `@hookimpl` from `sley_core.hookspecs` above the function")
    try:
        manager.register(module, source.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        lines = str(error).splitlines()
        message = f"{source.label} does not fit core {core_version()}: {lines[0]}{f': {lines[-1]}' if lines[1:] else ''}"
        hint = f"correct the hook, {UPDATE_CORE_HINT}, or install another version of {source.dist}"
        raise PluginError("plugin-hook", message, hint=hint) from error
    return manager.hook


def collect_records(hooks: Any, source: PluginSource) -> Mapping[str, Record]:
    """Returns the plugin's records by name. Raises PluginError "plugin-invalid" if a hook raises, or returns an object that is
    not a valid record of the class that `RECORD_HOOKS` has for this hook.
    """
    records: dict[str, Record] = {}
    for hook, record_type in RECORD_HOOKS.items():
        try:
            results = [record for hook_records in getattr(hooks, hook)() for record in hook_records]
        except Exception as error:
            raise PluginError("plugin-invalid", f"{source.label} failed in `{hook}`: {format_cause(error)}") from error
        for record in results:
            if fault := _find_record_fault(record, record_type, records):
                hint = f"report this to the authors of {source.dist}"
                raise PluginError("plugin-invalid", f"{source.label}: `{hook}` returns {fault}", hint=hint)
            records[record.name] = record
    return records


def _find_record_fault(record: Any, record_type: type[Record], records: Mapping[str, Record]) -> str | None:
    """Returns a description of the fault of `record`, or None if it has none. records: the plugin's records before it."""
    if not isinstance(record, record_type):
        return f"a {type(record).__name__}, not a {record_type.__name__}"
    if not record.name.isidentifier():
        return f"a record whose name must consist of letters, digits and `_`, but is `{record.name}`"
    if record.name in records:
        return f"two records with the name `{record.name}`"
    base = next((base for base_type, base in CONFIG_BASES.items() if isinstance(record, base_type)), Table)
    if not (isinstance(record.config, type) and issubclass(record.config, base)):
        return f"`{record.name}` with a config that is not a subclass of {base.__name__}"
    reserved = [key for key in ("use", "factory") if key in record.config.model_fields]
    return f"`{record.name}` with a config that has the reserved key `{reserved[0]}`" if reserved else None
