"""The hook of this package, by which a plugin may say what a search tries of it, and how it reads the facts.

A plugin needs neither to import this package nor to require it: it returns plain mappings, and `optionalhook` says that nobody
may be there to ask.

    @hookimpl(optionalhook=True)
    def sley_estimate_hints():
        return {"mine.reducer": {"variants": [{}, {"bucket_mb": 50}]}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sley_core.discovery import CORE
from sley_core.errors import PluginError
from sley_core.hookspecs import hookspec

if TYPE_CHECKING:
    from sley_core.plan.loader import Loader, Plugin


@hookspec
def sley_estimate_hints() -> Mapping[str, Mapping[str, Any]]:  # type: ignore[empty-body]
    """Says of a plugin's records, by their names in a plan (`"plugin.record"`), what `train-cli search` needs to know:

    variants: tables, without `use`, with which a search tries the record where a plan leaves the choice open; `[{}]` is one
        with the defaults. Without any, a search uses the record only if the plan names it.
    copies: of an activation policy, whether it copies what the layers in its attribute `names` save to the host after their
        forward, and back before their backward.
    in_steps: of an offload manager, a function of its table (the `config` of its record) that returns whether it moves memory
        in every step, and so may be replaced by a search; every manager does of which nothing is said.
    """


@dataclass(frozen=True)
class Hint:
    """Holds what a plugin says of one record, as `sley_estimate_hints` describes it."""

    variants: Sequence[Mapping[str, Any]] = ()
    copies: bool = False
    in_steps: Callable[[Any], bool] = lambda config: True


NOTHING_SAID = Hint()

OF_CORE = {f"{CORE}.{name}": Hint(variants=({},)) for name in ("each", "keep", "recompute")}
"""Core's own records that a search tries."""


def hints_of(plugin: Plugin) -> Mapping[str, Hint]:
    """Returns what a plugin says of its records, by their full names; nothing if it does not implement the hook.

    Raises PluginError "plugin-invalid" for a hook that fails, names a record that the plugin does not have, or says what is not
    known.
    """
    if plugin.name == CORE:
        return OF_CORE
    hook = getattr(plugin.hooks, sley_estimate_hints.__name__, None)
    if hook is None:
        return {}
    names = {f"{plugin.name}.{name}" for records in plugin.records.values() for name in records}
    try:
        said = {name: Hint(**facts) for one in hook() for name, facts in one.items()}
    except Exception as error:
        message = f"{plugin.label} failed in `{sley_estimate_hints.__name__}`: {type(error).__name__}: {error}"
        raise PluginError("plugin-invalid", message) from error
    if unknown := sorted(said.keys() - names):
        message = f"{plugin.label}: `{sley_estimate_hints.__name__}` names `{unknown[0]}`, which the plugin does not have"
        raise PluginError("plugin-invalid", message)
    return said


def hint_of(loader: Loader, name: str) -> Hint:
    """Returns what is said of the record `name` of a plan; nothing of a factory. Raises as `hints_of`."""
    plugin = name.partition(".")[0]
    if ":" in name or plugin not in loader.names():
        return NOTHING_SAID
    return hints_of(loader.load(plugin)).get(name, NOTHING_SAID)
