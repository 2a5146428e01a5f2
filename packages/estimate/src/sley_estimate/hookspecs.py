"""The hook by which a plugin may tell a search what to try.

A plugin neither imports this package nor requires it: it returns plain mappings, and `optionalhook` allows the hook to be
unknown.

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
    """Returns hints for `train-cli search`, by the names of records in a plan (`"plugin.record"`):

    variants: tables, without `use`, that a search tries where the plan leaves the choice open; `[{}]` is one with the defaults.
        Without any, a search uses the record only if the plan names it.
    copies: of an activation policy, whether it copies saved tensors of the layers in its attribute `names` to the host.
    in_steps: of an offload manager, a function of its config that returns whether it moves memory in every step, and so may be
        replaced by a search; without it every manager does.
    """


@dataclass(frozen=True)
class Hint:
    """A plugin's hint for one record, as `sley_estimate_hints` describes it."""

    variants: Sequence[Mapping[str, Any]] = ()
    copies: bool = False
    in_steps: Callable[[Any], bool] = lambda config: True


NO_HINT = Hint()

CORE_HINTS = {f"{CORE}.{name}": Hint(variants=({},)) for name in ("each", "keep", "recompute")}


def hints_of(plugin: Plugin) -> Mapping[str, Hint]:
    """Returns a plugin's hints, by full names of records. Raises PluginError "plugin-invalid" for a hook that fails, an unknown
    record, or an unknown key.
    """
    if plugin.name == CORE:
        return CORE_HINTS
    hook = getattr(plugin.hooks, sley_estimate_hints.__name__, None)
    if hook is None:
        return {}
    names = {f"{plugin.name}.{name}" for records in plugin.records.values() for name in records}
    try:
        hints = {name: Hint(**facts) for each in hook() for name, facts in each.items()}
    except Exception as error:
        message = f"{plugin.label} failed in `{sley_estimate_hints.__name__}`: {type(error).__name__}: {error}"
        raise PluginError("plugin-invalid", message) from error
    if unknown := sorted(hints.keys() - names):
        message = f"{plugin.label}: `{sley_estimate_hints.__name__}` names `{unknown[0]}`, which the plugin does not have"
        raise PluginError("plugin-invalid", message)
    return hints


def hint_of(loader: Loader, name: str) -> Hint:
    """Returns the hint for the record `name` of a plan; none for a factory. Raises as `hints_of`."""
    plugin = name.partition(".")[0]
    if ":" in name or plugin not in loader.names():
        return NO_HINT
    return hints_of(loader.load(plugin)).get(name, NO_HINT)
