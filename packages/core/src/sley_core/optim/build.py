"""Core's optimizers: torch.optim's own, in the fastest form that the device has."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from sley_core.errors import PlanError
from sley_core.factory import cause, import_factory
from sley_core.optim.config import AdamWConfig, FactoryOptimizerConfig, SGDConfig
from sley_core.optim.late import with_late_gradients
from sley_core.uncompiled import stepping_without

Groups = Sequence[dict[str, Any]]
"""What `parameter_groups` returns."""

FUSED_ON = ("cpu", "cuda")
"""Devices with fused kernels. torch looks for them in the first step only, too late to choose another form."""

RESERVED = {"params", "lr", "weight_decay"}
"""What a factory's `options` must not hold: the groups carry it, and would win without a word."""


def adamw(config: AdamWConfig, groups: Groups, device: torch.device) -> torch.optim.Optimizer:
    """Builds torch.optim.AdamW over `groups`; fused if `device` supports it (a CPU does), else foreach."""
    return _fastest(torch.optim.AdamW, groups, device, lr=config.lr, betas=tuple(config.betas), eps=config.eps)


def sgd(config: SGDConfig, groups: Groups, device: torch.device) -> torch.optim.Optimizer:
    """Builds torch.optim.SGD over `groups`; fused if `device` supports it (a CPU does), else foreach."""
    return _fastest(
        torch.optim.SGD,
        groups,
        device,
        lr=config.lr,
        momentum=config.momentum,
        dampening=config.dampening,
        nesterov=config.nesterov,
    )


def factory(config: FactoryOptimizerConfig, groups: Groups, _device: torch.device) -> torch.optim.Optimizer:
    """Builds the optimizer class that the plan names over `groups`, with the plan's options.

    Raises PlanError "factory-import" if there is no such class, and "optimizer-factory" if it is not an optimizer that
    can be stepped without a closure, or does not take what the plan gives it.
    """
    kind = _optimizer_class(config.factory)
    if reserved := RESERVED & config.options.keys():
        raise _refused(f"`{min(reserved)}` belongs into [optimizer] itself", "options")
    if not _takes(kind, "weight_decay"):
        groups = [_without_decay(group, config.factory) for group in groups]
    try:
        optimizer: torch.optim.Optimizer = kind(groups, lr=config.lr, **config.options)
    except Exception as error:  # whatever the user's class raises is about what the plan gave it
        raise _refused(f"`{config.factory}` does not take these parameters and options: {cause(error)}") from error
    return with_late_gradients(optimizer)


def _fastest(
    kind: type[torch.optim.Optimizer], groups: Groups, device: torch.device, **options: Any
) -> torch.optim.Optimizer:
    """Builds `kind(groups, **options)`, fused if `device` supports it, else foreach; foreach too where groups say so.

    On a CPU a fused kernel rounds the last elements of a tensor otherwise than the others, which vectors hold.
    On a CPU a fused AdamW takes a quarter of the time of foreach, and 0.4 of that of torch's default, the loop.
    """
    is_fused = device.type in FUSED_ON and not any(group.get("foreach") for group in groups)
    form: dict[str, Any] = {"fused": True} if is_fused else {"foreach": True}
    kind = stepping_without(kind)  # type: ignore[arg-type]  # a class can be hashed
    return with_late_gradients(kind(groups, **form, **options))


def _optimizer_class(path: str) -> Any:
    """Imports the class at `path`; raises PlanError unless it is a torch optimizer that steps without a closure."""
    found: Any = import_factory(path, ("optimizer",), None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise _refused(f"`{path}` is no subclass of torch.optim.Optimizer", hint="name the class itself")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise _refused(
            f"`{path}` evaluates the loss again within a step, which a run cannot do",
            hint="choose an optimizer whose `step()` needs no closure",
        )
    return found


def _takes(kind: type, option: str) -> bool:
    parameters = inspect.signature(kind).parameters
    return option in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _without_decay(group: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns `group` without `weight_decay`, for a class without that option; raises PlanError if it is not 0."""
    if group["weight_decay"]:
        raise _refused(
            f"`{path}` takes no weight_decay, but the plan gives {group['weight_decay']}",
            "weight_decay",
            hint="leave `weight_decay` out, of [optimizer] and of its groups",
        )
    return {key: value for key, value in group.items() if key != "weight_decay"}


def _refused(message: str, key: str = "factory", hint: str | None = None) -> PlanError:
    return PlanError("optimizer-factory", message, path=("optimizer", key), hint=hint)
