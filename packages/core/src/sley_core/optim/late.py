"""Handles parameters whose first gradient comes later than others' of their group: frozen at first, unfrozen later.

torch's fused SGD makes the momentum of a group's parameters in one step, for all or for none, and fails with a TypeError where
some have it. Its other forms begin each where its first gradient comes, with that gradient as it is, undampened.
"""

from __future__ import annotations

from typing import Any

import torch


def with_late_gradients(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes a fused SGD accept parameters whose first gradient comes late; returns the same `optimizer`.

    A step hook moves them into a group of their own, with the same options. Other optimizers need nothing.
    """
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.register_step_pre_hook(_split_groups)
    return optimizer


def _split_groups(optimizer: torch.optim.Optimizer, _args: Any, _options: Any) -> None:
    """Moves parameters with a gradient but no momentum yet into a new group, if others of their group have momentum."""
    for group in list(optimizer.param_groups):
        if not (group.get("fused") and group["momentum"]):
            continue
        given = [parameter for parameter in group["params"] if parameter.grad is not None]
        late = {id(parameter) for parameter in given if optimizer.state[parameter].get("momentum_buffer") is None}
        if 0 < len(late) < len(given):
            apart = [parameter for parameter in group["params"] if id(parameter) in late]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in late]
            optimizer.param_groups.append({**group, "params": apart})
