"""Which layers of a model cost the same: those of one class, with parameters of the same shapes and the same settings.

Whatever of a module is not known to be plain (a number, a text, a tensor's shape) makes its layer differ from all others: it is
counted for itself, which takes longer and is never wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from sley_core.engine.activations import Keep

if TYPE_CHECKING:
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import ActivationPolicy

PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has; hooks and modes of them are looked at apart."""


def layer_keys(plan: Plan, model: Model, policy: ActivationPolicy, fields: Mapping[str, Tensor]) -> list[str]:
    """Returns a key of 16 hexadecimal digits for each layer of `model`, on meta; equal for layers that cost the same.

    fields: a micro-batch. The keys of a plan are those that `train-cli calibrate` found, in any layout with its `micro_size`.
    """
    last = len(model.layers) - 1
    shapes = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in fields.items())
    precision = plan.precision.compute, plan.precision.gradients
    found = []
    for at, layer in enumerate(model.layers):
        loss = (plan.loss.name, _plain(plan.loss.config, "loss")) if at == last else None
        ends = at == 0, loss
        treatment = _treatment(plan, policy, layer)
        text = repr((_module(layer.module, layer.name), layer.fields, shapes, precision, ends, treatment))
        found.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return found


def _treatment(plan: Plan, policy: ActivationPolicy, layer: Layer) -> Any:
    """What the activation policy does to the layer: nothing to those that it does not name; else for itself."""
    names = getattr(policy, "names", None)
    if type(policy) is Keep or (isinstance(names, frozenset) and layer.name not in names):
        return None
    chosen = None if isinstance(names, frozenset) else layer.name
    return plan.activations.name, _plain(plan.activations.config, "activations"), chosen


def _module(module: nn.Module, place: str) -> Any:
    own = [
        (name, _plain(value, f"{place}.{name}"))
        for name, value in sorted(vars(module).items())
        if name not in OWN or name == "training"
    ]
    tensors = [
        (name, None if value is None else (tuple(value.shape), str(value.dtype), value.requires_grad))
        for held in (module._parameters, module._buffers)
        for name, value in held.items()
    ]
    hooks = [(name, place) for name in OWN if name.endswith("hooks") and vars(module)[name]]  # a program's: for itself
    inner = [(name, one and _module(one, f"{place}.{name}")) for name, one in module._modules.items()]
    return type(module).__module__, type(module).__qualname__, own, tensors, hooks, inner


def _plain(value: Any, place: str) -> Any:
    """The value as something whose text says all about it; else its place, which no other layer has."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return [_plain(one, place) for one in value]
    if isinstance(value, Mapping):
        return [(repr(key), _plain(one, place)) for key, one in value.items()]
    if isinstance(value, BaseModel):
        return type(value).__qualname__, value.model_dump_json()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, _plain(asdict(value), place)
    if isinstance(value, Callable) and hasattr(value, "__qualname__"):  # type: ignore[arg-type]  # a class to isinstance
        return getattr(value, "__module__", ""), value.__qualname__
    return place
