"""Launch points: the modules of layers before whose forward prefetches start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from sley_core.api.plan import suggestion
from sley_core.errors import PlanError
from sley_isp.config import ANYWHERE

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from sley_core.api.model import Layer
    from sley_isp.sites import Site
    from sley_isp.units import Unit

MOST_NAMES = 20
"""How many names a message lists."""


class Launches:
    """Registers the launch points of a model. start: called with a layer's unit just before a launch point that is no site
    runs.

    pattern: of module names within a layer. The forward-pre hooks run in recomputations too.
    """

    def __init__(self, pattern: str, start: Callable[[Unit], None]) -> None:
        self.pattern = pattern
        self.start = start
        self.hooks: dict[nn.Module, RemovableHandle] = {}

    def take(self, layer: Layer, unit: Unit, sites: Sequence[Site]) -> None:
        """Marks the launch points of `layer` among its `sites`, and hooks the other ones. unit: the layer's; may be empty."""
        points = set(launch_points(layer, self.pattern) if unit.entries else ())
        for site in sites:
            site.launches = not points or site.module in points
        for module in points - {site.module for site in sites} - self.hooks.keys():
            self.hooks[module] = module.register_forward_pre_hook(self._hook(unit))

    def close(self) -> None:
        """Removes all hooks."""
        for handle in self.hooks.values():
            handle.remove()
        self.hooks.clear()

    def _hook(self, unit: Unit) -> Callable[..., None]:
        """Returns a forward-pre hook that starts the prefetches of `unit`."""

        def before(*_: Any) -> None:
            self.start(unit)

        return before


def launch_points(layer: Layer, pattern: str) -> list[nn.Module]:
    """Returns the modules of `layer` whose names within it match; an empty list if any sharded module may start prefetches."""
    if pattern == ANYWHERE:
        return []
    return [module for name, module in _callable(layer).items() if fnmatchcase(name, pattern)]


def check_points(layers: Sequence[Layer], pattern: str) -> None:
    """Raises PlanError "launch-point" if no layer has a launch point."""
    if pattern == ANYWHERE or any(launch_points(layer, pattern) for layer in layers):
        return
    names = list(dict.fromkeys(name for layer in layers for name in _callable(layer)))
    listed = ", ".join(f"`{name}`" for name in names[:MOST_NAMES]) or "none"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    raise PlanError(
        "launch-point",
        f"`{pattern}` matches no module of any layer; within layers there are {listed}{more}",
        path=("weights", "launch"),
        hint=suggestion(pattern, names, "write a name as it is within its layer, or a pattern of some"),
    )


def _callable(layer: Layer) -> dict[str, nn.Module]:
    """Returns the modules of `layer` with a forward, by their names within it; containers such as ModuleList are left out."""
    return {
        name: module
        for name, module in layer.module.named_modules()
        if name and type(module).forward is not nn.Module.forward
    }
