"""Builds parameter groups and optimizers, and lists everything that an optimizer keeps besides the states of its parameters.

The parameters of a group have the same learning rate and weight decay. Frozen parameters are in no group until they are
unfrozen. A parameter belongs to the first group of the plan whose pattern matches its name; only the first name of a tied
weight counts. Names do not depend on the layout, so every layout has the same groups.

torch defines no place for a number that belongs to the whole optimizer, such as a step count, so each class stores it
elsewhere: in the options of groups, in states under other keys, or in attributes. Here each such value has a location, so that
checkpoints can contain it, and a step that updates the parameters in buckets counts only once.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from sley_core.errors import Diagnostic, PlanError, RunError, format_cause
from sley_core.optim.config import AdamWConfig, FactoryOptimizerConfig, GroupConfig, OptimizerConfig, SGDConfig
from sley_core.records import ParameterRole, import_factory

ParameterGroups = Sequence[dict[str, Any]]
"""The parameter groups that `parameter_groups` returns."""


def build_adamw(config: AdamWConfig, groups: ParameterGroups, device: torch.device) -> Optimizer:
    """Returns torch.optim.AdamW over `groups`, with torch's fused kernels if possible."""
    return _build_fastest(AdamW, groups, device, lr=config.lr, betas=tuple(config.betas), eps=config.eps)


def build_sgd(config: SGDConfig, groups: ParameterGroups, device: torch.device) -> Optimizer:
    """Returns torch.optim.SGD over `groups`, with torch's fused kernels if possible."""
    options = {"momentum": config.momentum, "dampening": config.dampening, "nesterov": config.nesterov}
    return _build_fastest(SGD, groups, device, lr=config.lr, **options)


def build_from_factory(config: FactoryOptimizerConfig, groups: ParameterGroups, _device: torch.device) -> Optimizer:
    """Returns an optimizer over `groups` of the class `config.factory`, built with `config.options`.

    Raises PlanError "factory-import" if the class does not exist, and "optimizer-factory" if it is not a subclass of
    torch.optim.Optimizer, needs a closure, or does not accept the plan's options.
    """
    path = config.factory
    optimizer_class: Any = import_factory(path, ("optimizer",), None)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise _factory_error(f"`{path}` must be a subclass of torch.optim.Optimizer", hint="use the class itself")
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        message = f"`{path}` evaluates the loss again within a step, which a run does not support"
        raise _factory_error(message, hint="choose an optimizer whose `step()` needs no closure")
    if reserved := {"params", "lr", "weight_decay"} & config.options.keys():  # the groups' values would silently replace them
        raise _factory_error(f"`{min(reserved)}` must be a key of [optimizer], not of its options", "options")
    parameters = inspect.signature(optimizer_class).parameters
    accepts_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "weight_decay" not in parameters and not accepts_any:
        if decay := max(group["weight_decay"] for group in groups):
            message = f"`{path}` has no option weight_decay, but the plan sets it to {decay}"
            raise _factory_error(message, "weight_decay", hint="remove `weight_decay` from [optimizer] and its groups")
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    try:
        optimizer: Optimizer = cast("Any", optimizer_class)(groups, lr=config.lr, **config.options)
    except Exception as error:  # any error of the user's class is about the plan's options
        raise _factory_error(f"`{path}` does not accept these parameters and options: {format_cause(error)}") from error
    return split_late_gradients(optimizer)


def _build_fastest(
    optimizer_class: type[Optimizer], groups: ParameterGroups, device: torch.device, **options: Any
) -> Optimizer:
    """Returns an optimizer with torch's fused implementation, which on a CPU takes a quarter of the time.

    Uses the foreach implementation if `device` has no fused kernels or a group sets `foreach` (see `UNIFORM_ROUNDING`), because
    a fused CPU kernel rounds the last elements of a tensor differently.
    """
    is_fused = device.type in ("cpu", "cuda") and not any(group.get("foreach") for group in groups)
    implementation: dict[str, Any] = {"fused": True} if is_fused else {"foreach": True}
    optimizer_class = compiler_free_class(optimizer_class)  # type: ignore[arg-type]  # a class can be hashed
    return split_late_gradients(optimizer_class(groups, **implementation, **options))


def _factory_error(message: str, key: str = "factory", hint: str | None = None) -> PlanError:
    return PlanError("optimizer-factory", message, path=("optimizer", key), hint=hint)


def frozen_names(names: Iterable[str], config: OptimizerConfig, aliases: Mapping[str, str] | None = None) -> set[str]:
    """Returns the subset of `names` that the plan freezes.

    names: the names of all parameters of the whole model. aliases: each further name of a tied weight, which groups cannot
    match, with the weight's first name. Raises PlanError "group-unmatched" with a diagnostic for each group without parameters,
    and "all-frozen" if all parameters are frozen.
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
    extra_options: Mapping[str, Any] | None = None,
    roles: Mapping[str, ParameterRole] | None = None,
) -> list[dict[str, Any]]:
    """Returns torch.optim's parameter groups, one for each combination of learning rate, weight decay and role, in the order of
    the parameters.

    params: objects with `name`, `parameter` and `decays` for all parameters that are not frozen. `decays` is true if the
    parameter is a matrix outside norms, to which the optimizer's weight decay applies. extra_options: options for every group.
    roles: the role of each parameter by name, if the optimizer has roles.

    A weight decay that a group of the plan sets applies to all of its parameters. `initial_lr` is the full rate; each step
    uses a fraction of it. Without parameters, returns one empty group, which torch.optim accepts.
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
        | dict(extra_options or {})
        for (lr, decay, role), parameters in groups.items()
    ]


def _first_match(name: str, groups: Sequence[GroupConfig]) -> int | None:
    """Returns the index of the first group whose pattern matches `name`, or None if no pattern does."""
    return next((index for index, group in enumerate(groups) if fnmatchcase(name, group.match)), None)


def _unmatched_diagnostic(
    index: int, names: Sequence[str], groups: Sequence[GroupConfig], aliases: Mapping[str, str]
) -> Diagnostic:
    """Returns a diagnostic that says why no parameter belongs to the group `index`."""
    pattern = groups[index].match
    path = ("optimizer", "groups", index, "match")
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if matches:
        first = _first_match(matches[0], groups)
        assert first is not None, matches[0]
        message = (
            f"all parameters that `{pattern}` matches are already in earlier groups, such as the group `{groups[first].match}`"
        )
        return Diagnostic("group-unmatched", message, path, hint="put the narrower pattern first")
    for alias in aliases:
        if fnmatchcase(alias, pattern):
            message = f"`{pattern}` matches `{alias}`, but groups must use the first name of this weight, `{aliases[alias]}`"
            return Diagnostic(
                "group-unmatched",
                message,
                path,
                hint=f"use a pattern that matches `{aliases[alias]}`; the group then applies to all names of the weight",
            )
    examples = get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names[:3])
    hint = "names of parameters look like " + ", ".join(f"`{name}`" for name in examples) if examples else None
    return Diagnostic("group-unmatched", f"`{pattern}` matches no parameter", path, hint=hint)


def split_late_gradients(optimizer: Optimizer) -> Optimizer:
    """Makes a fused SGD accept parameters whose first gradient comes late; returns the same `optimizer`.

    torch's fused SGD creates the momentum buffers of all parameters of a group in one step, and fails with a TypeError if some
    parameters already have a buffer. A hook before each step moves the parameters without a buffer into a new group. Other
    optimizers do not change.
    """
    if isinstance(optimizer, SGD):
        optimizer.register_step_pre_hook(_split_groups)
    return optimizer


def _split_groups(optimizer: Optimizer, _args: Any, _options: Any) -> None:
    """Moves parameters with a gradient but no momentum buffer into a new group if other parameters of the group have one."""
    for group in list(optimizer.param_groups):
        if not (group.get("fused") and group["momentum"]):
            continue
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        late = [parameter for parameter in with_gradient if optimizer.state[parameter].get("momentum_buffer") is None]
        if 0 < len(late) < len(with_gradient):
            late_ids = set(map(id, late))
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in late_ids]
            optimizer.param_groups.append({**group, "params": late})


def avoid_compiler_import() -> None:
    """Patches torch.optim.Optimizer in this process so that calls of its methods do not import torch's compiler.

    torch wraps functions that its compiler must not trace, such as `add_param_group`, in a function that imports the compiler
    at its first call: 850 modules, and a second of processor time on every rank. The wrapper caches the function to call in an
    attribute. If the attribute is set beforehand, the wrapper imports nothing. Only compiled code needs the import.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        wrapped = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if wrapped is not None and not hasattr(wrapped, "__dynamo_disable"):
            wrapped.__dynamo_disable = wrapped


@cache
def compiler_free_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """Returns a subclass of torch's `optimizer_class` whose `step` does not import the compiler.

    The subclass does not support the `differentiable` option. Copied or unpickled instances have the class `optimizer_class`.
    """
    unwrapped_step: Any = inspect.unwrap(optimizer_class.step)

    @torch.no_grad()
    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        loss: float | None = unwrapped_step(self, closure)
        return loss

    def reduce(self: Optimizer) -> tuple[Any, ...]:
        return object.__new__, (optimizer_class,), self.__getstate__()

    members = {name: getattr(optimizer_class, name) for name in ("__module__", "__doc__")}
    return type(optimizer_class.__name__, (optimizer_class,), {**members, "step": step, "__reduce__": reduce})


SharedValues = dict[tuple[str, Any, Any], Any]
"""Values that belong to no single parameter, by location: `("option", index of the group, key)`, `("state", "", key)`
or `("attribute", path of the optimizer, name)`.
"""


def shared_values(optimizer: Optimizer) -> SharedValues:
    """Returns, by location, the options, states and attributes of the whole optimizer that are plain data. Does not copy."""
    values: SharedValues = {}
    for number, group in enumerate(optimizer.param_groups):
        values |= {("option", number, key): value for key, value in group.items() if key != "params" and is_plain_data(value)}
    for key, state in extra_states(optimizer).items():
        if is_plain_data(state):
            values["state", "", key] = state
    for path, name, value in extra_attributes(optimizer):
        if is_plain_data(value):
            values["attribute", path, name] = value
    return values


def set_shared_values(optimizer: Optimizer, values: SharedValues) -> None:
    """Replaces all results of `shared_values` with `values`. Updates a dict in place if its new value is also a dict."""
    owners = dict(_wrapped_optimizers(optimizer))
    for location in shared_values(optimizer).keys() - values.keys():
        _find_containing_dict(optimizer, owners, location).pop(location[2])
    for location, value in values.items():
        container, key = _find_containing_dict(optimizer, owners, location), location[2]
        current = container.get(key)
        if current is not value and isinstance(current, dict) and isinstance(value, dict):
            current.clear()
            current.update(value)
        else:
            container[key] = value


def load_optimizer_state(
    optimizer: Optimizer,
    states: Mapping[int, Any],
    options: Sequence[Mapping[str, Any]],
    shared: SharedValues,
    initial: SharedValues,
    dtypes: Mapping[int, torch.dtype],
) -> None:
    """Sets the whole state of the optimizer, with its own `load_state_dict`, which moves states to the right devices.

    states: the state of each parameter, by its `id`. options: the restored options of each group. shared: the states under
    other keys, and the attributes. initial: a new optimizer's attributes, for attributes that `shared` lacks. dtypes: the dtype
    that each parameter had when its states were saved, by its `id`. States of this dtype are cast to the parameter's present
    dtype; other states keep their dtypes.
    """
    groups, state_by_key = optimizer.param_groups, optimizer.state
    packed = optimizer.state_dict()
    state_by_number: dict[int, Any] = {}
    for group, group_options, packed_group in zip(groups, options, packed["param_groups"], strict=True):
        for parameter, number in zip(group["params"], packed_group["params"], strict=True):
            if state := states.get(id(parameter)):
                state_by_number[number] = state
        packed_group |= group_options
    optimizer.load_state_dict({"state": state_by_number, "param_groups": packed["param_groups"]})
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    loaded_state = dict(optimizer.state)
    state_by_key.clear()
    state_by_key.update(loaded_state)
    optimizer.param_groups, optimizer.state = groups, state_by_key  # the same objects, to which other code may refer
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if saved := states.get(id(parameter)):
            state_by_key[parameter] = _restore_dtypes(state_by_key[parameter], saved, dtypes[id(parameter)])
    current = {location: value for location, value in shared_values(optimizer).items() if location[0] == "option"}
    set_shared_values(optimizer, current | copy.deepcopy(initial) | shared)


PLAN_OPTIONS = ("params", "lr", "initial_lr", "weight_decay", "role")
"""The options of a parameter group that always come from the present plan, not from a checkpoint."""


def _restore_dtypes(loaded: Any, saved: Any, parameter_dtype: torch.dtype) -> Any:
    """Returns the state `loaded`, which torch has cast, with the dtypes of `saved`, except for tensors of `parameter_dtype`."""

    def restore(new: Any, old: Any) -> Any:
        is_cast = isinstance(new, Tensor) and isinstance(old, Tensor) and old.dtype not in (parameter_dtype, new.dtype)
        return old.to(new.device) if is_cast else new

    return tree_map(restore, loaded, saved)


def options_to_save(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group that differ from the optimizer's defaults, except `PLAN_OPTIONS`."""
    defaults = optimizer.defaults
    return {
        key: value
        for key, value in group.items()
        if key not in PLAN_OPTIONS and (key not in defaults or not is_equal(defaults[key], value))
    }


def shared_values_to_save(optimizer: Optimizer, initial: SharedValues) -> SharedValues:
    """Returns the values to save in addition to options and the states of parameters: states under other keys, and attributes
    that differ from `initial`. Raises RunError "optimizer-state" for a state that is not plain data.
    """
    current = {location: value for location, value in shared_values(optimizer).items() if location[0] != "option"}
    for key in extra_states(optimizer):
        if ("state", "", key) not in current:
            message = (
                f"a checkpoint cannot contain the state {key!r} of {type(optimizer).__name__}, whose key is not a parameter"
            )
            hint = "store only numbers and strings under such keys, and store tensors under the parameters"
            raise RunError("optimizer-state", message, hint=hint)
    return changed_values(initial, current)


def copy_attributes(optimizer: Optimizer) -> SharedValues:
    """Returns copies of the results of `extra_attributes` that are plain data, by location."""
    return copy.deepcopy({key: value for key, value in shared_values(optimizer).items() if key[0] == "attribute"})


def _find_containing_dict(
    optimizer: Optimizer, owners: Mapping[str, Optimizer], location: tuple[str, Any, Any]
) -> dict[Any, Any]:
    """Returns the live dict that contains the value at `location`, under the key `location[2]`."""
    kind, owner_path, _ = location
    if kind == "attribute":
        return vars(owners[owner_path])
    return optimizer.param_groups[owner_path] if kind == "option" else optimizer.state


def changed_values(before: SharedValues, after: SharedValues) -> SharedValues:
    """Returns the values in `after` that are missing or different in `before`. A tensor on a device counts as different."""
    return {
        location: value for location, value in after.items() if location not in before or not is_equal(value, before[location])
    }


def is_equal(first: Any, second: Any) -> bool:
    """Returns whether two pieces of plain data are equal. Two NaN floats are equal, but tensors that are not on the CPU, or
    that contain NaN, never are.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        is_on_host = first.device.type == second.device.type == "cpu"
        return is_on_host and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(is_equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_equal(value, second[key]) for key, value in first.items())
    return type(first) is type(second) and (first == second or (first != first and second != second))


def can_compare(value: Any) -> bool:
    """Returns whether `is_equal` can compare `value`: all of its tensors are on the host."""
    return all(tensor.device.type == "cpu" for tensor in tree_leaves(value) if isinstance(tensor, Tensor))


def is_plain_data(value: Any) -> bool:
    """Returns whether `value` is None, a number, text, bytes, a tensor of at most one element, or a nested container of
    these.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter) and value.numel() <= 1
    if isinstance(value, dict):
        return all(is_plain_data(key) and not isinstance(key, Tensor) and is_plain_data(item) for key, item in value.items())
    return type(value) in (list, tuple) and all(map(is_plain_data, value))


def extra_states(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns the states that belong to no parameter, because their keys are not tensors."""
    return {key: state for key, state in optimizer.state.items() if not isinstance(key, Tensor)}


def extra_attributes(optimizer: Optimizer) -> Iterator[tuple[str, str, Any]]:
    """Yields (path, name, value) for each attribute of `optimizer` and of its wrapped optimizers that torch does not define.
    path: "" for `optimizer` itself, and `"base."` for the optimizer that it wraps in its attribute `base`.
    """
    for path, owner in _wrapped_optimizers(optimizer):
        for name, value in list(vars(owner).items()):
            if name not in _torch_attributes() and not isinstance(value, Optimizer):
                yield path, name, value


def _wrapped_optimizers(optimizer: Optimizer, path: str = "") -> Iterator[tuple[str, Optimizer]]:
    """Yields (path, optimizer) for the optimizer itself, and for each wrapped optimizer that shares its groups and states."""
    yield path, optimizer
    for name, value in list(vars(optimizer).items()):
        is_wrapped = isinstance(value, Optimizer) and value is not optimizer
        if is_wrapped and value.param_groups is optimizer.param_groups and value.state is optimizer.state:
            yield from _wrapped_optimizers(value, f"{path}{name}.")


@cache
def _torch_attributes() -> set[str]:
    """Returns the names of the attributes that torch sets on optimizers."""
    names = {"_step_count", "_opt_called", "step", "grad_scale", "found_inf"}
    names |= {"_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"}
    return names | vars(SGD([nn.Parameter(torch.zeros(()))], lr=0.0)).keys()


@dataclass(frozen=True)
class Traits:
    """Describes the behaviour of an optimizer.

    keeps_gradients: whether its states refer to gradient tensors instead of copies of them. draws_random: whether its steps
    draw random numbers. has_modes: whether it has `train()` and `eval()`, as schedule-free optimizers do. If so, runs evaluate
    and save the weights after `eval()`.
    """

    keeps_gradients: bool = False
    draws_random: bool = False
    has_modes: bool = False


TORCH_TRAITS = Traits()
"""The traits of torch's own optimizers, which need no probe."""


def has_modes(optimizer: object) -> bool:
    """Returns whether the optimizer has `train()` and `eval()`, as schedule-free optimizers do."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def set_training_mode(optimizer: Optimizer) -> Optimizer:
    """Calls `train()` if the optimizer has modes; returns the same `optimizer`."""
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def copy_gradients_first(optimizer: Optimizer, step: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that replaces each gradient with a copy and then calls `step`."""

    def step_with_copies() -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        return step()

    return step_with_copies


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Returns whether `step_if` can skip a step of `optimizer`, which is true for torch's fused optimizers.

    Even then, `step_if` cannot skip the first step, in which SGD creates its momentum buffers from the kernel's output.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_if(optimizer: Optimizer, is_allowed: Tensor) -> None:
    """Calls `optimizer.step()`, which changes nothing if the bool tensor `is_allowed` is false. Does not synchronize.

    optimizer: must support this (`can_skip_on_device`), since it has to read the `found_inf` attribute that this function sets.
    """
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = None, (~is_allowed).float()
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
