"""Finds and imports the plugins that a plan names and no others, and refuses a broken one by name.

Discovery reads metadata only: a broken plugin that no plan names does no harm. pluggy validates a plugin and calls its hooks;
the order in which plugins are called is the plan's, never pluggy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

from sley_core.discovery import (
    CORE,
    CORE_DIST,
    GROUP,
    NEWER_CORE,
    Found,
    core_version,
    installed,
    to_install,
    unmet_requirement,
)
from sley_core.errors import PlanError, PluginError
from sley_core.plan.kinds import words
from sley_core.plan.plugin_rules import hooks_of, imported, is_of_surroundings, records_of, said
from sley_core.records import Record
from sley_core.table import RecordKind
from sley_core.words import suggestion

FIRST_PARTY = ("dp", "isp", "memory", "models", "pp")
"""Plugins of Sley's own distributions `sley-<name>`."""


MOVED = {"core.llama": "models.llama", "core.text": "data.text", "core.tokens": "data.tokens"}
"""Records that core had, and where they are."""

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
        """Plugin, distribution and version, for messages."""
        return f"plugin `{self.name}` ({self.dist} {self.version})"

    def __str__(self) -> str:
        return f"{self.dist} {self.version}"

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Returns what this plugin's `hook` returns, as a list of at most one item. A generator is run to its end.

        Raises PluginError "plugin-failed" for whatever the hook raises.
        """
        try:
            returned = getattr(self.hooks, hook)(**arguments)
            return [list(one) if hasattr(one, "__next__") else one for one in returned]
        except Exception as error:
            message = f"{self.label} failed in `{hook}`: {type(error).__name__}: {error}"
            raise PluginError("plugin-failed", message, hint="report this to the plugin's authors") from error

    def implements(self, hook: str) -> bool:
        """Returns whether this plugin has an implementation of `hook`."""
        return bool(getattr(self.hooks, hook).get_hookimpls())

    def build_of(self, record: Record) -> Any:
        """Returns the object that the record's `build` names; raises PluginError "plugin-import" if there is none."""
        try:
            return record.load()
        except Exception as error:
            if is_of_surroundings(error):
                raise
            message = f"{self.label}: cannot import `{record.build}` of `{self.name}.{record.name}`: {said(error)}"
            raise PluginError("plugin-import", message, hint=f"reinstall {self.dist}, or report it") from error


class Loader:
    """Loads plugins by name, each once.

    plugins: modules or objects with hooks to use instead of the installed ones, for tests and programs; core's own is always
    there, unless this has a `core` too.
    """

    def __init__(self, plugins: Mapping[str, Any] | None = None) -> None:
        self._given = plugins
        self._found: Mapping[str, list[Found]] | None = None
        self._loaded: dict[str, Plugin] = {}

    def names(self) -> list[str]:
        """Returns the names of all plugins that could be loaded, core first, then sorted; imports none."""
        known = self._given if self._given is not None else self._installed()
        return [CORE, *sorted(set(known) - {CORE})]

    def found(self, name: str) -> list[Found]:
        """Returns the distributions that provide plugin `name`: one, unless something is wrong; imports nothing."""
        if self._given is not None and name in self._given:
            return [Found(name, "given", "0", module=self._given[name])]
        if name == CORE:
            return self._installed().get(CORE) or [Found(CORE, CORE_DIST, core_version(), BUILT_IN)]
        return [] if self._given is not None else self._installed().get(name, [])

    def load(self, name: str) -> Plugin:
        """Returns the plugin `name`, loading it at the first call.

        Raises PluginError: "plugin-missing" (one of Sley's own, not installed), "plugin-unknown", "plugin-ambiguous" (in two
        distributions), "plugin-incompatible" (needs another core), "plugin-import", "plugin-hook" (implements an unknown hook,
        or one without its mark), "plugin-argument" (wants an argument that only a newer core's hook has), "plugin-invalid" (its
        records).
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def record(self, kind: RecordKind, name: str) -> Record:
        """Returns the record that a plan calls `plugin.record`.

        Raises PluginError as `load` does, and PlanError "unknown-record".
        """
        plugin_name, _, record_name = name.partition(".")
        plugin = self.load(plugin_name)
        known = plugin.records.get(kind, {})
        if record_name in known:
            return known[record_name]
        if name in MOVED:
            hint = f"it is `{MOVED[name]}` now; {to_install(MOVED[name].partition('.')[0])}"
            raise PlanError("unknown-record", f"{plugin.label} has no {words(kind)} `{record_name}`", hint=hint)
        has = f"it has {', '.join(f'`{plugin_name}.{one}`' for one in known)}" if known else None
        raise PlanError(
            "unknown-record",
            f"{plugin.label} has no {words(kind)} `{record_name}`",
            hint=suggestion(name, (f"{plugin_name}.{one}" for one in known), has),
        )

    def _installed(self) -> Mapping[str, list[Found]]:
        if self._found is None:
            self._found = installed()
        return self._found

    def _load(self, name: str) -> Plugin:
        """Finds, checks and imports the plugin `name`; raises PluginError as `load` describes."""
        found = self.found(name)
        if not found:
            raise self._missing(name)
        if len(found) > 1:
            dists = " and ".join(f"{one.dist} {one.version}" for one in found)
            hint = f"uninstall one of them: `pip uninstall {found[-1].dist}`"
            raise PluginError("plugin-ambiguous", f"plugin `{name}` is provided by {dists}", hint=hint)
        one = found[0]
        needed = unmet_requirement(one)
        if needed is not None:
            message = f"{one.label} needs {needed}, but sley-core {core_version()} is installed"
            hint = f"take {NEWER_CORE}, or a version of {one.dist} that this core suits"
            raise PluginError("plugin-incompatible", message, hint=hint)
        hooks = hooks_of(imported(one), one)
        return Plugin(name, one.dist, one.version, records_of(hooks, one), hooks)

    def _missing(self, name: str) -> PluginError:
        """Returns the PluginError for a plugin that is not there: "plugin-missing" for Sley's own, else "plugin-unknown"."""
        if name in FIRST_PARTY:
            message = f"plugin `{name}` is not installed"
            return PluginError("plugin-missing", message, hint=to_install(name))
        here = ", ".join(f"`{one}`" for one in self.names())
        have = (
            f"install the package that has it, by custom `sley-{name.replace('_', '-')}`; the plugins here are {here}"
        )
        return PluginError(
            "plugin-unknown",
            f"there is no plugin `{name}`",
            hint=suggestion(name, {*self.names(), *FIRST_PARTY}, have),
        )
