"""Core's optimizers: torch.optim's own, in the fastest form that the device has."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from sley_core.errors import PlanError
from sley_core.optim.config import AdamWConfig, FactoryOptimizerConfig, SGDConfig

Groups = Sequence[dict[str, Any]]
"""What `parameter_groups` returns."""

PATH = ("optimizer", "factory")


def adamw(config: AdamWConfig, groups: Groups, device: torch.device) -> torch.optim.Optimizer:
    """torch.optim.AdamW over `groups`; fused where `device` has it (CPU too), else foreach."""
    return _fastest(torch.optim.AdamW, groups, device, lr=config.lr, betas=tuple(config.betas), eps=config.eps)


def sgd(config: SGDConfig, groups: Groups, device: torch.device) -> torch.optim.Optimizer:
    """torch.optim.SGD over `groups`; fused where `device` has it (CPU too), else foreach."""
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
    """The optimizer class that the plan names, over `groups`, with the plan's options.

    Raises PlanError "factory-import" where there is no such class, and "optimizer-factory" where it is no optimizer
    that can be stepped without a closure, or does not take what the plan gives it.
    """
    kind = _optimizer_class(config.factory)
    if not _takes(kind, "weight_decay"):
        groups = [_without_decay(group, config.factory) for group in groups]
    try:
        optimizer: torch.optim.Optimizer = kind(groups, lr=config.lr, **config.options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            "optimizer-factory",
            f"`{config.factory}` does not take these parameters and options: {error}",
            path=PATH,
            hint=f"it is called as {kind.__name__}(groups, lr=..., **options); see its arguments",
        ) from error
    return optimizer


def _fastest(
    kind: type[torch.optim.Optimizer], groups: Groups, device: torch.device, **options: Any
) -> torch.optim.Optimizer:
    """`kind(groups, **options)`, fused if torch has a kernel for `device` and the parameters' types, else foreach.

    On CPU a fused AdamW takes a quarter of the for-loop's time, and foreach is slower than the loop.
    """
    try:
        return kind(groups, fused=True, **options)  # type: ignore[call-arg]
    except RuntimeError:
        # torch refuses `fused` with a RuntimeError where a parameter's device or type has no such kernel.
        return kind(groups, foreach=device.type != "cpu", **options)  # type: ignore[call-arg]


def _optimizer_class(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise PlanError(
            "factory-import",
            f"cannot import `{path}`: {type(error).__name__}: {error}",
            path=PATH,
            hint='write `factory = "package.module:Name"`; the folder of the plan is searched too',
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise PlanError(
            "optimizer-factory",
            f"`{path}` is no subclass of torch.optim.Optimizer",
            path=PATH,
            hint="an optimizer's factory is the class itself",
        )
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            "optimizer-factory",
            f"`{path}` evaluates the loss again within a step, which a run cannot do",
            path=PATH,
            hint="choose an optimizer whose `step()` needs no closure",
        )
    return found


def _takes(kind: type, option: str) -> bool:
    parameters = inspect.signature(kind).parameters
    return option in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _without_decay(group: dict[str, Any], path: str) -> dict[str, Any]:
    if group["weight_decay"]:
        raise PlanError(
            "optimizer-factory",
            f"`{path}` takes no weight_decay, but the plan gives {group['weight_decay']}",
            path=("optimizer", "weight_decay"),
            hint="leave `weight_decay` out",
        )
    return {key: value for key, value in group.items() if key != "weight_decay"}
