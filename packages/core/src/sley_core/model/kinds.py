"""Compares modules by what determines their shapes and cost: equal for modules of one class, with parameters of the same shapes
and the same settings.

An attribute that is not known to be plain (a number, a text, a tensor's shape) makes its module differ from all others: it is
then counted on its own, which takes longer and is never wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has; of these, hooks and the training mode are compared separately."""


def kind_of(module: nn.Module, place: str) -> Any:
    """Returns what determines the module's cost, as nested plain values; equal `repr`s mean equal modules.

    place: its name in the model, used for what is not plain, so that it differs from other modules.
    """
    own = [
        (name, plain(value, f"{place}.{name}"))
        for name, value in sorted(vars(module).items())
        if name not in OWN or name == "training"
    ]
    tensors = [
        (name, None if value is None else (tuple(value.shape), str(value.dtype), value.requires_grad))
        for held in (module._parameters, module._buffers)
        for name, value in held.items()
    ]
    hooks = [(name, place) for name in OWN if name.endswith("hooks") and vars(module)[name]]  # a program's: for itself
    inner = [(name, one and kind_of(one, f"{place}.{name}")) for name, one in module._modules.items()]
    made = (
        place if "<" in type(module).__qualname__ else ""
    )  # a class defined in a function may depend on the function's arguments
    return type(module).__module__, type(module).__qualname__, made, own, tensors, hooks, inner


def plain(value: Any, place: str) -> Any:
    """Returns `value` as nested plain values whose `repr` determines it; else its place, which no other layer has."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return [plain(one, place) for one in value]
    if isinstance(value, Mapping):
        return [(repr(key), plain(one, place)) for key, one in value.items()]
    if isinstance(value, BaseModel):
        return type(value).__qualname__, value.model_dump_json()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, plain(asdict(value), place)
    name = getattr(value, "__qualname__", "<")
    # A module-level function or a class; one defined in a function, or bound to an object, is not determined by its name.
    if callable(value) and "<" not in name and not hasattr(value, "__self__"):
        return getattr(value, "__module__", ""), name
    return place
