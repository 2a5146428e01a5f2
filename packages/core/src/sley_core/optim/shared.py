"""Everything that an optimizer keeps besides the states of its parameters: the options of groups, states under other keys, and
attributes; its modes and other traits; and steps that are skipped on the device.

torch defines no place for a number that belongs to the whole optimizer, such as a step count, so each class stores it
elsewhere. Here each such value has a location, so that checkpoints can contain it, and a step that updates the parameters in
buckets counts only once.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sley_core.errors import RunError

Shared: TypeAlias = dict[tuple[str, Any, Any], Any]
"""Values by location: `("option", index of the group, key)`, `("state", "", key)` or `("attribute", path of the optimizer,
name)`.
"""


def shared_values(optimizer: torch.optim.Optimizer) -> Shared:
    """Returns the optimizer's live values that are plain data, by location."""
    values: Shared = {}
    for number, group in enumerate(optimizer.param_groups):
        values |= {("option", number, key): value for key, value in group.items() if key != "params" and is_plain(value)}
    for key, state in extra_states(optimizer).items():
        if is_plain(state):
            values["state", "", key] = state
    for path, name, value in extra_attributes(optimizer):
        if is_plain(value):
            values["attribute", path, name] = value
    return values


def set_values(optimizer: torch.optim.Optimizer, values: Shared) -> None:
    """Puts `values` at their locations, and removes all other values. Dicts there stay the same objects."""
    owners = dict(_wrapped_optimizers(optimizer))
    for location in shared_values(optimizer).keys() - values.keys():
        _find_containing_dict(optimizer, owners, location).pop(location[2])
    for location, value in values.items():
        holder, key = _find_containing_dict(optimizer, owners, location), location[2]
        current = holder.get(key)
        if current is not value and isinstance(current, dict) and isinstance(value, dict):
            current.clear()
            current.update(value)
        else:
            holder[key] = value


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    states: Mapping[int, Any],
    options: Sequence[Mapping[str, Any]],
    shared: Shared,
    initial: Shared,
    dtypes: Mapping[int, torch.dtype],
) -> None:
    """Sets the whole state of the optimizer by its own `load_state_dict`, which chooses the devices.

    states: the state of each parameter, by its `id`. options: the restored options of each group. shared: the states under
    other keys, and the attributes. initial: the initial attributes, which are used where `shared` has none. dtypes: the dtype
    that each parameter had when its states were saved, by its `id`. States of this dtype are cast to the parameter's present
    dtype; other states keep their dtypes.
    """
    groups, state_by_key = optimizer.param_groups, optimizer.state
    packed = optimizer.state_dict()
    numbered: dict[int, Any] = {}
    for group, group_options, with_numbers in zip(groups, options, packed["param_groups"], strict=True):
        for parameter, number in zip(group["params"], with_numbers["params"], strict=True):
            if state := states.get(id(parameter)):
                numbered[number] = state
        with_numbers |= group_options
    optimizer.load_state_dict({"state": numbered, "param_groups": packed["param_groups"]})
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
    set_values(optimizer, current | copy.deepcopy(initial) | shared)


PLAN_OPTIONS = ("params", "lr", "initial_lr", "weight_decay", "role")
"""The options that always come from the present plan, not from a checkpoint."""


def _restore_dtypes(loaded: Any, saved: Any, parameter_dtype: torch.dtype) -> Any:
    """Returns the state `loaded`, which torch has cast, with the dtypes of `saved`, except for tensors of `parameter_dtype`."""

    def restore(new: Any, old: Any) -> Any:
        is_cast = isinstance(new, Tensor) and isinstance(old, Tensor) and old.dtype not in (parameter_dtype, new.dtype)
        return old.to(new.device) if is_cast else new

    return tree_map(restore, loaded, saved)


def options_to_save(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group that differ from the optimizer's defaults, except `PLAN_OPTIONS`."""
    defaults = optimizer.defaults
    return {
        key: value
        for key, value in group.items()
        if key not in PLAN_OPTIONS and (key not in defaults or not is_equal(defaults[key], value))
    }


def shared_to_save(optimizer: torch.optim.Optimizer, initial: Shared) -> Shared:
    """Returns the values to save in addition to options and the states of parameters: states under other keys, and attributes
    that differ from those in `initial`. Raises RunError "optimizer-state" for a state that is not plain data.
    """
    current = {location: value for location, value in shared_values(optimizer).items() if location[0] != "option"}
    for key in extra_states(optimizer):
        if ("state", "", key) not in current:
            message = (
                f"a checkpoint cannot contain the state {key!r} of {type(optimizer).__name__}, whose key is not a parameter"
            )
            hint = "store only numbers and strings there, and tensors under the parameters"
            raise RunError("optimizer-state", message, hint=hint)
    return changed_values(initial, current)


def copy_attributes(optimizer: torch.optim.Optimizer) -> Shared:
    """Returns copies of the attributes that are plain data."""
    return copy.deepcopy({key: value for key, value in shared_values(optimizer).items() if key[0] == "attribute"})


def _find_containing_dict(
    optimizer: torch.optim.Optimizer, owners: Mapping[str, torch.optim.Optimizer], location: tuple[str, Any, Any]
) -> dict[Any, Any]:
    kind, owner_path, _ = location
    if kind == "attribute":
        return vars(owners[owner_path])
    return optimizer.param_groups[owner_path] if kind == "option" else optimizer.state


def changed_values(before: Shared, after: Shared) -> Shared:
    """Returns the values in `after` that `before` lacks or that differ from it. A tensor on a device counts as different."""
    return {
        location: value for location, value in after.items() if location not in before or not is_equal(value, before[location])
    }


def is_equal(first: Any, second: Any) -> bool:
    """Returns whether two pieces of plain data are equal; False for tensors that are not on the host."""
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


def is_plain(value: Any) -> bool:
    """Returns whether `value` is None, a number, text, bytes, a tensor of at most one element, or a nest of these."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter) and value.numel() <= 1
    if isinstance(value, dict):
        return all(is_plain(key) and not isinstance(key, Tensor) and is_plain(item) for key, item in value.items())
    return type(value) in (list, tuple) and all(map(is_plain, value))


def extra_states(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return {key: state for key, state in optimizer.state.items() if not isinstance(key, Tensor)}


def extra_attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Any]]:
    """Yields (path, name, value) of each attribute that is not torch's. path: that of the optimizer with the attribute; wrapped
    optimizers are included.
    """
    for path, owner in _wrapped_optimizers(optimizer):
        for name, value in list(vars(owner).items()):
            if name not in _torch_attributes() and not isinstance(value, torch.optim.Optimizer):
                yield path, name, value


def _wrapped_optimizers(optimizer: torch.optim.Optimizer, path: str = "") -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yields (path, optimizer) for the optimizer itself, and for each wrapped optimizer that shares its groups and states."""
    yield path, optimizer
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, torch.optim.Optimizer) and value is not optimizer and _is_shared(value, optimizer):
            yield from _wrapped_optimizers(value, f"{path}{name}.")


def _is_shared(inner: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> bool:
    return inner.param_groups is outer.param_groups and inner.state is outer.state


@cache
def _torch_attributes() -> frozenset[str]:
    names = vars(torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0))
    return (
        frozenset(names)
        | {"_step_count", "_opt_called", "step", "grad_scale", "found_inf"}
        | {"_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"}
    )


@dataclass(frozen=True)
class Traits:
    """Describes the behaviour of an optimizer.

    keeps_gradients: whether its states refer to gradient tensors instead of copies of them. draws: whether its steps draw
    random numbers. has_modes: whether it has `train()` and `eval()`, as schedule-free optimizers do. The weights after `eval()`
    are then evaluated and saved.
    """

    keeps_gradients: bool = False
    draws: bool = False
    has_modes: bool = False


TORCH_TRAITS = Traits()
"""The traits of torch's own optimizers."""


def has_modes(optimizer: object) -> bool:
    """Returns whether the optimizer has `train()` and `eval()`, as schedule-free optimizers do."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def set_training_mode(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Calls `train()` if the optimizer has modes; returns the same `optimizer`."""
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def copy_gradients_first(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that replaces each gradient by a copy and then calls `step`."""

    def step_with_copies() -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        return step()

    return step_with_copies


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `step_if` can skip a step of `optimizer`, as is true of torch's fused optimizers.

    It cannot skip the first step, in which SGD creates its momentum buffers from the kernel's output.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_if(optimizer: torch.optim.Optimizer, allowed: Tensor) -> None:
    """Calls `optimizer.step()`, which changes nothing if the device's bool tensor `allowed` is false. Does not synchronise."""
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = None, (~allowed).float()
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
