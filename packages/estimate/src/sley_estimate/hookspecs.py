"""The hook with which a plugin suggests variants for a search.

A plugin neither imports nor requires this package: it returns plain mappings, and `optionalhook` allows an unknown hook.

    @hookimpl(optionalhook=True)
    def sley_estimate_hints():
        return {"mine.reducer": {"variants": [{}, {"bucket_mb": 50}]}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sley_core.errors import PluginError
from sley_core.hookspecs import hookspec
from sley_core.plan.loader import CORE

if TYPE_CHECKING:
    from sley_core.plan.loader import Loader, Plugin


@hookspec
def sley_estimate_hints() -> Mapping[str, Mapping[str, Any]]:  # type: ignore[empty-body]
    """Returns hints for `train-cli search`, by the names of records in a plan (`"plugin.record"`):

    variants: tables, without `use`, that a search tries if the plan does not fix the choice. `[{}]` is one with the defaults.
        Without variants, a search uses the record only if the plan names it.
    copies: whether an activation policy copies saved tensors of the layers in its attribute `names` to the host.
    in_steps: for an offload manager, a function from its config to whether it moves optimizer states in every step. The default
        returns True.
    """


@dataclass(frozen=True)
class Hint:
    """A plugin's hint for one record; `sley_estimate_hints` describes the fields."""

    variants: Sequence[Mapping[str, Any]] = ()
    copies: bool = False
    in_steps: Callable[[Any], bool] = lambda config: True


NO_HINT = Hint()

CORE_HINTS = {f"{CORE}.{name}": Hint(variants=({},)) for name in ("each", "keep", "recompute")}


def plugin_hints(plugin: Plugin) -> Mapping[str, Hint]:
    """Returns the hints of a plugin by full record name. Raises PluginError "plugin-invalid" if the hook fails or names an
    unknown record or key.
    """
    if plugin.name == CORE:
        return CORE_HINTS
    hook = getattr(plugin.hooks, sley_estimate_hints.__name__, None)
    if hook is None:
        return {}
    names = {f"{plugin.name}.{name}" for name in plugin.records}
    try:
        hints = {name: Hint(**options) for mapping in hook() for name, options in mapping.items()}
    except Exception as error:
        message = f"{plugin.label} failed in `{sley_estimate_hints.__name__}`: {type(error).__name__}: {error}"
        raise PluginError("plugin-invalid", message) from error
    if unknown := sorted(hints.keys() - names):
        message = f"{plugin.label}: `{sley_estimate_hints.__name__}` names `{unknown[0]}`, which the plugin does not have"
        raise PluginError("plugin-invalid", message)
    return hints


def record_hint(loader: Loader, name: str) -> Hint:
    """Returns the hint for the record `name` of a plan, or `NO_HINT` for a factory. Raises the errors of `plugin_hints`."""
    plugin = name.partition(".")[0]
    if ":" in name or plugin not in loader.names():
        return NO_HINT
    return plugin_hints(loader.load(plugin)).get(name, NO_HINT)
