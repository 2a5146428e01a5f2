"""Finds a model's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from sley_core.errors import PlanError
from sley_isp.sites import is_plain

if TYPE_CHECKING:
    from sley_core.api.model import Layer


def find_head(layers: Sequence[Layer]) -> nn.Linear:
    """Returns the one plain linear of the last of the model's `layers`.

    Raises PlanError "head-vocabulary" if there is none, or several, or if a module that needs the full weight holds it
    too. The first forward checks that the layer returns the linear's output.
    """
    last = layers[-1]
    linears = {name: module for name, module in last.module.named_modules() if type(module) is nn.Linear}
    if len(linears) != 1:
        found = ", ".join(f"`{name}`" for name in linears) or "none"
        message = (
            f"the last layer `{last.name}` has one plain nn.Linear where its vocabulary can be shared; found: {found}"
        )
        raise _refused(message, "give the head a layer of its own")
    (head,) = linears.values()
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            for attribute, parameter in module._parameters.items():
                if parameter is head.weight and not is_plain(module, attribute):
                    message = f"`{name}` holds the head's weight too, and is no plain linear or embedding"
                    raise _refused(message, "copy the weight there, or call a linear")
    return head


def _refused(message: str, hint: str) -> PlanError:
    """Returns the PlanError "head-vocabulary"."""
    return PlanError("head-vocabulary", message, path=("weights", "head"), hint=f'{hint}; or `head = "gather"`')
