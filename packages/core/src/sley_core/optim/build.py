"""Builds parameter groups, and optimizers over them. Optimizers of torch.optim get their fastest implementation for the device.

The parameters of a group have the same learning rate and weight decay. Frozen parameters are in no group until they are
unfrozen. A parameter belongs to the first group of the plan whose pattern matches its name; only the first name of a tied
weight counts. Names do not depend on the layout, so every layout has the same groups.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, cast

import torch
from torch.optim import Optimizer

from sley_core.errors import Diagnostic, PlanError, format_cause
from sley_core.optim.config import AdamWConfig, FactoryOptimizerConfig, GroupConfig, OptimizerConfig, SGDConfig
from sley_core.records import ParameterRole, import_factory

Groups = Sequence[dict[str, Any]]
"""The parameter groups from `parameter_groups`."""

FUSED_DEVICES = ("cpu", "cuda")
"""The types of devices with fused kernels. torch itself checks this only in the first step."""

RESERVED_OPTIONS = {"params", "lr", "weight_decay"}
"""Keys that a factory's `options` must not have, because the values of the groups would silently replace them."""


def adamw(config: AdamWConfig, groups: Groups, device: torch.device) -> torch.optim.Optimizer:
    """Builds torch.optim.AdamW over `groups` by `_build_fastest`."""
    return _build_fastest(torch.optim.AdamW, groups, device, lr=config.lr, betas=tuple(config.betas), eps=config.eps)


def sgd(config: SGDConfig, groups: Groups, device: torch.device) -> torch.optim.Optimizer:
    """Builds torch.optim.SGD over `groups` by `_build_fastest`."""
    options = {"momentum": config.momentum, "dampening": config.dampening, "nesterov": config.nesterov}
    return _build_fastest(torch.optim.SGD, groups, device, lr=config.lr, **options)


def build_from_factory(config: FactoryOptimizerConfig, groups: Groups, _device: torch.device) -> torch.optim.Optimizer:
    """Builds an optimizer of the class that the plan names over `groups`, with the plan's options.

    Raises PlanError "factory-import" if the class does not exist, and "optimizer-factory" if it is no subclass of
    torch.optim.Optimizer, needs a closure, or does not accept the plan's options.
    """
    path = config.factory
    optimizer_class: Any = import_factory(path, ("optimizer",), None)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise _factory_error(f"`{path}` must be a subclass of torch.optim.Optimizer", hint="use the class itself")
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        message = f"`{path}` evaluates the loss again within a step, which a run cannot do"
        raise _factory_error(message, hint="choose an optimizer whose `step()` needs no closure")
    if reserved := RESERVED_OPTIONS & config.options.keys():
        raise _factory_error(f"`{min(reserved)}` belongs into [optimizer] itself", "options")
    parameters = inspect.signature(optimizer_class).parameters
    accepts_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "weight_decay" not in parameters and not accepts_any:
        if decay := max(group["weight_decay"] for group in groups):
            message = f"`{path}` has no option weight_decay, but the plan sets it to {decay}"
            raise _factory_error(message, "weight_decay", hint="remove `weight_decay` from [optimizer] and its groups")
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    try:
        optimizer: torch.optim.Optimizer = cast("Any", optimizer_class)(groups, lr=config.lr, **config.options)
    except Exception as error:  # any error of the user's class is about the plan's options
        raise _factory_error(f"`{path}` does not accept these parameters and options: {format_cause(error)}") from error
    return split_late_gradients(optimizer)


def _build_fastest(
    kind: type[torch.optim.Optimizer], groups: Groups, device: torch.device, **options: Any
) -> torch.optim.Optimizer:
    """Builds `kind(groups, **options)` with torch's fused implementation, which on a CPU takes a quarter of the time.

    Uses the foreach implementation if `device` has no fused kernels, or if a group sets `foreach`, as plans do whose results
    must not depend on the layout: a fused CPU kernel rounds the last elements of a tensor differently.
    """
    is_fused = device.type in FUSED_DEVICES and not any(group.get("foreach") for group in groups)
    form: dict[str, Any] = {"fused": True} if is_fused else {"foreach": True}
    kind = compiler_free_class(kind)  # type: ignore[arg-type]  # a class can be hashed
    return split_late_gradients(kind(groups, **form, **options))


def _factory_error(message: str, key: str = "factory", hint: str | None = None) -> PlanError:
    return PlanError("optimizer-factory", message, path=("optimizer", key), hint=hint)


def frozen_names(names: Iterable[str], config: OptimizerConfig, aliases: Mapping[str, str] | None = None) -> set[str]:
    """Returns the subset of `names` that the plan freezes.

    names: the names of all parameters of the whole model. aliases: each further name of a tied weight, which groups cannot
    match, with the weight's first name. Raises PlanError "group-unmatched" with every group that no parameter belongs to, and
    "all-frozen" if all parameters are frozen.
    """
    all_names = list(names)
    group_index = {name: _first_match(name, config.groups) for name in all_names}
    unmatched = [index for index in range(len(config.groups)) if index not in set(group_index.values())]
    if unmatched:
        raise PlanError.from_diagnostics(
            _unmatched_diagnostic(index, all_names, config.groups, aliases or {}) for index in unmatched
        )
    frozen = {name for name, index in group_index.items() if index is not None and config.groups[index].freeze}
    if all_names and len(frozen) == len(all_names):
        message = f"all {len(all_names)} parameters are frozen, so there is nothing to train"
        hint = "narrow the pattern of a group with `freeze = true`"
        raise PlanError("all-frozen", message, path=("optimizer", "groups"), hint=hint)
    return frozen


UNIFORM_ROUNDING = {"foreach": True}
"""The option that every group gets if the bits of an updated element must not depend on its position in a tensor."""


def parameter_groups(
    params: Iterable[Any],
    config: OptimizerConfig,
    more: Mapping[str, Any] | None = None,
    roles: Mapping[str, ParameterRole] | None = None,
) -> list[dict[str, Any]]:
    """Returns torch.optim's parameter groups, one for each combination of learning rate, weight decay and role, in the order of
    the parameters.

    params: objects with `name`, `parameter` and `decays`, none of them frozen. `decays` says whether the optimizer's weight
    decay applies: whether the parameter is a matrix and belongs to no norm. more: additional options for every group. roles:
    the role of each parameter by name, if the optimizer has roles.

    A weight decay that a group of the plan sets applies to all of its parameters. `initial_lr` is the full rate, which
    `scale_learning_rate` scales. Without parameters, returns one empty group, which torch.optim accepts.
    """
    groups: dict[tuple[float, float, str | None], list[torch.Tensor]] = {}
    for param in params:
        index = _first_match(param.name, config.groups)
        group = GroupConfig(match="*") if index is None else config.groups[index]
        role = None if roles is None else roles[param.name]
        defaults = config if role is None else role
        lr = defaults.lr if group.lr is None else group.lr
        decay = defaults.weight_decay if param.decays else 0.0
        decay = decay if group.weight_decay is None else group.weight_decay
        groups.setdefault((lr, decay, role and role.name), []).append(param.parameter)
    if not groups:
        groups[config.lr, config.weight_decay, None] = []
    return [
        {"params": parameters, "lr": lr, "initial_lr": lr, "weight_decay": decay}
        | ({} if role is None else {"role": role})
        | dict(more or {})
        for (lr, decay, role), parameters in groups.items()
    ]


def scale_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets the learning rate of every group to `factor` times its full rate (`initial_lr`)."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def _first_match(name: str, groups: Sequence[GroupConfig]) -> int | None:
    for index, group in enumerate(groups):
        if fnmatchcase(name, group.match):
            return index
    return None


def _unmatched_diagnostic(
    index: int, names: Sequence[str], groups: Sequence[GroupConfig], aliases: Mapping[str, str]
) -> Diagnostic:
    pattern = groups[index].match
    path = ("optimizer", "groups", index, "match")
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if matches:
        first = _first_match(matches[0], groups)
        assert first is not None, matches[0]
        message = f"all parameters that `{pattern}` matches are already in an earlier group, such as `{groups[first].match}`"
        return Diagnostic("group-unmatched", message, path, hint="put the narrower pattern first")
    for alias in aliases:
        if fnmatchcase(alias, pattern):
            message = f"`{pattern}` matches `{alias}`, which is tied to `{aliases[alias]}` and has that name in groups"
            return Diagnostic("group-unmatched", message, path, hint=f"write `{aliases[alias]}`: copies have one rate")
    close = get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names[:3])
    hint = "names look like " + ", ".join(f"`{name}`" for name in close) if close else None
    return Diagnostic("group-unmatched", f"`{pattern}` matches no parameter", path, hint=hint)


def split_late_gradients(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes a fused SGD accept parameters whose first gradient comes late; returns the same `optimizer`.

    torch's fused SGD creates the momentum buffers of all parameters of a group in one step, and fails with a TypeError if some
    of them already have one. A hook before each step moves the parameters without one into a new group. Does not change other
    optimizers.
    """
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.register_step_pre_hook(_split_groups)
    return optimizer


def _split_groups(optimizer: torch.optim.Optimizer, _args: Any, _options: Any) -> None:
    """Moves parameters with a gradient but no momentum buffer into a new group if others in their group have a buffer."""
    for group in list(optimizer.param_groups):
        if not (group.get("fused") and group["momentum"]):
            continue
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        late = {id(parameter) for parameter in with_gradient if optimizer.state[parameter].get("momentum_buffer") is None}
        if 0 < len(late) < len(with_gradient):
            late_parameters = [parameter for parameter in group["params"] if id(parameter) in late]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in late]
            optimizer.param_groups.append({**group, "params": late_parameters})


COMPILER_WRAPPED_METHODS: tuple[Callable[..., Any], ...] = (
    Optimizer.add_param_group,
    Optimizer.zero_grad,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
)


def avoid_compiler_import() -> None:
    """Lets a run call the methods of optimizers without importing torch's compiler.

    torch wraps functions that its compiler must not trace, such as `add_param_group`, in a function that imports the compiler
    at its first call: 850 modules, and a second of processor time on every rank. The wrapper caches the function to call in an
    attribute. If the attribute is set beforehand, the wrapper imports nothing. The difference matters only to compiled code.
    """
    for function in COMPILER_WRAPPED_METHODS:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and not hasattr(wrapped, "__dynamo_disable"):
            wrapped.__dynamo_disable = wrapped


@cache
def compiler_free_class(kind: type[Optimizer]) -> type[Optimizer]:
    """Returns a subclass of torch's optimizer class `kind` whose `step` does not import the compiler.

    The subclass does not support the option `differentiable`. Its instances are pickled and copied as instances of `kind`.
    """
    unwrapped_step: Any = inspect.unwrap(kind.step)

    @torch.no_grad()
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        loss: float | None = unwrapped_step(self, closure)
        return loss

    def reduce(self: Optimizer) -> tuple[Any, ...]:
        return object.__new__, (kind,), self.__getstate__()

    named = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {"step": step, "__reduce__": reduce, **named})
