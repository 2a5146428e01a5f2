"""Chooses the layers that a policy works on: all blocks, the first ones, or those that are named."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from sley_core.api.plan import suggestion
from sley_core.errors import Diagnostic, PlanError


def chosen(layers: int | Sequence[str] | None, layer_names: Sequence[str]) -> frozenset[str]:
    """Returns the names of the layers that `layers` chooses of `layer_names`, the whole model's in order.

    layers: None for all blocks (all layers but the first and the last), a number for the first ones of these, or names and
    patterns of any layers. Raises PlanError `unknown-layer` for a pattern that no layer matches.
    """
    if layers is None or isinstance(layers, int):
        return frozenset(layer_names[1:-1][:layers])
    found: set[str] = set()
    for number, pattern in enumerate(layers):
        matching = [name for name in layer_names if fnmatchcase(name, pattern)]
        if not matching:
            first = ", ".join(f"`{name}`" for name in layer_names[:4])
            hint = suggestion(pattern, layer_names, f"the model's layers are {first}, ...")
            path = ("activations", "layers", number)
            raise PlanError.many([Diagnostic("unknown-layer", f"no layer has the name `{pattern}`", path, hint=hint)])
        found.update(matching)
    return frozenset(found)
