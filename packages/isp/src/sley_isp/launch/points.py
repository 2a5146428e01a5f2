"""The modules of layers before whose forward the gathers ahead start."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from sley_core.errors import PlanError
from sley_core.plan.words import suggestion
from sley_isp.config import ANYWHERE

if TYPE_CHECKING:
    from sley_core.model.layers import Layer

MOST_NAMES = 20
"""How many names a message lists."""


def launch_points(layer: Layer, pattern: str) -> list[nn.Module]:
    """The modules of `layer` whose names within it match; none where any sharded one will do."""
    if pattern == ANYWHERE:
        return []
    return [module for name, module in _callable(layer).items() if fnmatchcase(name, pattern)]


def check_points(layers: Sequence[Layer], pattern: str) -> None:
    """Some layer of the model has a launch point. Raises PlanError "launch-point" where none has."""
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
    """The modules of `layer` by their names within it; a list of modules, which nobody can call, is not among them."""
    return {
        name: module
        for name, module in layer.module.named_modules()
        if name and type(module).forward is not nn.Module.forward
    }
