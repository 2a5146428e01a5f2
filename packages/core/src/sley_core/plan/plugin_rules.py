"""Checks what a plugin must be: importable, with hooks that exist, and records that fit their kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import pluggy

from sley_core import hookspecs
from sley_core.discovery import NEWER_CORE, Found, core_version
from sley_core.errors import PluginError
from sley_core.plan.kinds import BASES, RECORDS
from sley_core.records import GradientHandlerRecord, Record, ScheduleRecord, SchedulerHookRecord
from sley_core.table import RecordKind, Table
from sley_core.words import suggestion

HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("sley_")}
"""Every hook by its name."""

RECORD_HOOKS: dict[str, type[Record]] = {
    "sley_records": Record,
    "sley_gradient_handlers": GradientHandlerRecord,
    "sley_scheduler_hooks": SchedulerHookRecord,
}
"""The hooks that return records, and the class of what each may return."""

RESERVED = ("use", "factory")
"""Keys of every component table; a config must not have them."""

DEFAULTS_OF_SCHEDULES = ("link", "partition", "ties")
"""Fields of a schedule's record that name other records."""

RECORD_NAME = re.compile(r"[^.:\s]+\.[^\W\d]\w*")


def imported(found: Found) -> Any:
    """Imports and returns the plugin's module.

    Raises PluginError "plugin-import" with the cause, whatever it is: also SystemExit.
    """
    if found.entry_point is None:
        return found.module
    try:
        return found.entry_point.load()
    except (Exception, SystemExit) as error:
        if is_of_surroundings(error):
            raise
        hint = f"reinstall {found.dist}, or report it to its authors"
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = f"install what provides `{error.name}`, or reinstall {found.dist}"
        message = f"{found.label} cannot be imported: {said(error)}"
        raise PluginError("plugin-import", message, hint=hint) from error


class _Sound(NamedTuple):
    """Holds a module that was checked, with the names that it had then."""

    module: ModuleType
    names: dict[str, Any]
    hooks: Any


_sound: dict[str, _Sound] = {}
"""Checked modules of plugins by name: checking takes much of the time of loading a plan, so it is cached."""


def hooks_of(module: Any, found: Found) -> Any:
    """Returns callers for the hooks of one plugin, after checking that every implementation fits a hook of this core.

    A module is checked again only if one of its names has changed. Raises PluginError "plugin-hook" or "plugin-argument".
    """
    if not isinstance(module, ModuleType):
        return _looked_at(module, found)
    known = _sound.get(module.__name__)
    if known is None or known.module is not module or not _are_same(known.names, vars(module)):
        known = _sound[module.__name__] = _Sound(module, dict(vars(module)), _looked_at(module, found))
    return known.hooks


def _are_same(names: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return len(names) == len(others) and all(others.get(name, names) is value for name, value in names.items())


def _looked_at(module: Any, found: Found) -> Any:
    """Checks every hook implementation of `module`, registers it with pluggy, and returns the callers of its hooks. Raises
    PluginError.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in dir(module):
        options = manager.parse_hookimpl_opts(module, name)
        if options is None:
            if name in HOOKS and inspect.isroutine(getattr(module, name)):
                message = f"{found.label}: its `{name}` would never be called: it is not marked as a hook"
                raise PluginError("plugin-hook", message, hint="write `@hookimpl` above it, of `sley_core.hookspecs`")
            continue
        hook = options.get("specname") or name
        if hook not in HOOKS:
            hint = suggestion(hook, HOOKS, f"it may need a newer core than {core_version()}")
            raise PluginError("plugin-hook", f"{found.label}: there is no hook `{hook}`", hint=hint)
        offered = inspect.signature(HOOKS[hook]).parameters
        more = [key for key in _arguments(getattr(module, name)) if key not in offered]
        if more:
            gives = ", ".join(f"`{key}`" for key in offered) or "nothing"
            raise PluginError(
                "plugin-argument",
                f"{found.label}: its `{hook}` wants `{more[0]}`, but core {core_version()} gives {gives}",
                hint=f"it is written for a newer core: take {NEWER_CORE}, or an older {found.dist}",
            )
    try:
        manager.register(module, found.name)
    except pluggy.PluginValidationError as error:
        raise PluginError("plugin-invalid", f"{found.label}: {said(error)}") from error
    return manager.hook


def records_of(hooks: Any, found: Found) -> Mapping[RecordKind, Mapping[str, Record]]:
    """Returns the plugin's records by kind and name.

    Raises PluginError "plugin-invalid": a hook that fails, something that is no record, or none of the hook's kind, a name that
    is used twice or cannot be written in a plan, a config that is not of its kind's base or has a reserved key.
    """
    records: dict[RecordKind, dict[str, Record]] = {kind: {} for kind in RECORDS}
    for hook, types in RECORD_HOOKS.items():
        try:
            returned = [record for records in getattr(hooks, hook)() for record in records]
        except Exception as error:
            raise PluginError("plugin-invalid", f"{found.label} failed in `{hook}`: {said(error)}") from error
        for record in returned:
            kind = next((kind for kind, of_kind in RECORDS.items() if isinstance(record, of_kind)), None)
            if kind is None or not isinstance(record, types):
                wrong: str | None = f"returns a {type(record).__name__}, not a {types.__name__}"
            else:
                wrong = _wrong(record, kind, records[kind])
            if wrong or kind is None:
                hint = f"report this to the authors of {found.dist}"
                raise PluginError("plugin-invalid", f"{found.label}: `{hook}` {wrong}", hint=hint)
            records[kind][record.name] = record
    return records


def is_of_surroundings(error: BaseException) -> bool:
    """Returns whether an import failed for lack of memory or disk, or because torch is broken: then it is not the plugin's
    fault.
    """
    causes = [error]
    while (before := causes[-1].__cause__ or causes[-1].__context__) is not None and before not in causes:
        causes.append(before)
    if any(isinstance(each, MemoryError) or "Cannot allocate memory" in str(each) for each in causes):
        return True
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return True
    trace, modules = error.__traceback__, set()
    while trace is not None:
        modules.add(trace.tb_frame.f_globals.get("__name__"))
        trace = trace.tb_next
    missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    return isinstance(error, ImportError) and (missing or "torch" in modules)


def said(error: BaseException) -> str:
    """Returns type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _wrong(record: Record, kind: RecordKind, named: Iterable[str]) -> str | None:
    """Returns in words what is wrong with a record, None if nothing is. named: the names of the records before it."""
    if not record.name.isidentifier():
        return f"has the name `{record.name}`, which is none: letters, digits and `_`"
    if record.name in named:
        return f"returns two records of the name `{record.name}`"
    base = BASES.get(kind, Table)
    if not (isinstance(record.config, type) and issubclass(record.config, base)):
        return f"gives `{record.name}` a config that is no subclass of {base.__name__}"
    if getattr(record, "timer", None) is not None and "layer_costs" not in record.config.model_fields:
        return f"gives `{record.name}`, which times layers, a config without the key `layer_costs`"
    for key in DEFAULTS_OF_SCHEDULES:
        default = getattr(record, key) if isinstance(record, ScheduleRecord) else None
        if default is not None and not (isinstance(default, str) and RECORD_NAME.fullmatch(default)):
            return f"gives `{record.name}` the {key} `{default}`, which is no record's name (`plugin.record`)"
    reserved = [key for key in RESERVED if key in record.config.model_fields]
    return f"gives `{record.name}` a config with the key `{reserved[0]}`, which every table has" if reserved else None


def _arguments(implementation: Any) -> list[str]:
    """Returns the arguments that pluggy would pass: those without a default."""
    parameters = inspect.signature(implementation).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.name != "self"]
