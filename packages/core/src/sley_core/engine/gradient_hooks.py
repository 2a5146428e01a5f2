"""Checks that hooks on parameters (`parameter.register_hook`) can be called as in a plain loop, or refuses them by name.

Autograd calls them once per micro-batch, with the full gradient. If only parts of that gradient exist on any one rank, a hook
that clips or masks by values would give other numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.errors import Diagnostic, PlanError
from sley_core.model.layers import MODEL

if TYPE_CHECKING:
    from sley_core.engine.book import Stages
    from sley_core.engine.shards import Shards


def check_hooks(stages: Stages, shards: Shards, num_slices: int) -> None:
    """Raises PlanError "model-hook", with one diagnostic per hooked parameter of which no rank computes a full gradient.

    stages: all parts of the model, on meta. num_slices: slices of a sequence, i.e. `sp`. The result is the same on all ranks.
    """
    names: dict[int, str] = {}
    parts: dict[int, set[int]] = {}
    for at, (_, layers) in enumerate(stages):
        for layer in layers:
            for name, parameter in layer.module.named_parameters(layer.name):
                if parameter._backward_hooks and parameter.requires_grad:
                    names.setdefault(id(parameter), name)
                    parts.setdefault(id(parameter), set()).add(at)
    found = []
    for key, name in names.items():
        if len(parts[key]) > 1:
            why, hint = "parts of a pipeline that each have a gradient of it", "let one part hold it"
        elif key in shards:
            why, hint = "ranks that each have a shard of it", "leave `[weights]` out, or hook the output of its module"
        elif num_slices > 1:
            why, hint = "ranks that each see a slice of a sequence", "leave `sp` at 1, or hook the output of its module"
        else:
            continue
        message = f"the parameter {name!r} has a gradient hook, and is used by {why}: no rank has what the hook would be given"
        found.append(Diagnostic("model-hook", message, path=MODEL, hint=hint))
    if found:
        raise PlanError.many(found)
