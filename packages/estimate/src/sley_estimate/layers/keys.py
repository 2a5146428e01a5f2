"""Keys of layers: equal for layers that take as long and as much memory. They are of one class, with equal settings and shapes.

An attribute that is not known to be plain (a number, a text, a tensor's shape) makes its layer differ from all others: that
layer is counted on its own, which takes longer and is never wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from sley_core.engine.call import Keep

if TYPE_CHECKING:
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import ActivationPolicy

PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def kind_of(module: nn.Module, place: str) -> Any:
    """Returns nested plain values that determine the module's cost: modules with equal `repr`s cost the same.

    place: the module's name in the model, which stands for attributes that are not plain.
    """
    attributes = [
        (name, plain(value, f"{place}.{name}"))
        for name, value in sorted(vars(module).items())
        if name not in OF_EVERY_MODULE or name == "training"
    ]
    tensors = [
        (name, None if value is None else (tuple(value.shape), str(value.dtype), value.requires_grad))
        for registered in (module._parameters, module._buffers)
        for name, value in registered.items()
    ]
    hooks = [(name, place) for name in OF_EVERY_MODULE if name.endswith("hooks") and vars(module)[name]]
    inner = [(name, child and kind_of(child, f"{place}.{name}")) for name, child in module._modules.items()]
    local = place if "<" in type(module).__qualname__ else ""  # a class defined in a function depends on its arguments
    return type(module).__module__, type(module).__qualname__, local, attributes, tensors, hooks, inner


def plain(value: Any, place: str) -> Any:
    """Returns `value` as nested plain values whose `repr` determines it; else its place, which no other layer has."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return [plain(each, place) for each in value]
    if isinstance(value, Mapping):
        return [(repr(key), plain(each, place)) for key, each in value.items()]
    if isinstance(value, BaseModel):
        return type(value).__qualname__, value.model_dump_json()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, plain(asdict(value), place)
    name = getattr(value, "__qualname__", "<")
    if callable(value) and "<" not in name and not hasattr(value, "__self__"):  # a function or class of a module
        return getattr(value, "__module__", ""), name
    return place


def layer_keys(plan: Plan, model: Model, policy: ActivationPolicy, fields: Mapping[str, Tensor]) -> list[str]:
    """Returns a key of 16 hexadecimal digits for each layer of `model`, on meta.

    fields: a micro-batch, whose shapes and dtypes count; policy, precision and loss count too. `train-cli calibrate` writes the
    same keys for the plan in any layout with its `micro_size` and `sp`.
    """
    sequence = plan.sequence
    slices = slices_of(plan.parallel.sp, sequence.name, sequence.config) if sequence is not None else ()
    return LayerKinds(plan, model, policy).keys(fields, slices)


def slices_of(sp: int, attention: str, config: Any) -> tuple[Any, ...]:
    """Returns what cutting sequences over `sp` ranks adds to keys; () for whole sequences."""
    return (sp, attention, plain(config, "sequence")) if sp > 1 else ()


class LayerKinds:
    """Makes keys of a plan's layers under one policy, for any micro-batch and slices."""

    def __init__(self, plan: Plan, model: Model, policy: ActivationPolicy) -> None:
        last = len(model.layers) - 1
        precision = plan.precision.compute, plan.precision.gradients
        self._texts: list[tuple[str, str]] = []
        for at, layer in enumerate(model.layers):
            loss = (plan.loss.name, plain(plan.loss.config, "loss")) if at == last else None
            before = kind_of(layer.module, layer.name), layer.fields
            after = precision, (at == 0, loss), _treatment(plan, policy, layer)
            self._texts.append((", ".join(map(repr, before)), ", ".join(map(repr, after))))

    def keys(self, fields: Mapping[str, Tensor], slices: tuple[Any, ...] = ()) -> list[str]:
        """Returns the key of each layer for a micro-batch `fields`. slices: as `slices_of` returns."""
        shapes = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in fields.items())
        known: dict[tuple[str, str], str] = {}
        for before, after in dict.fromkeys(self._texts):
            text = f"({', '.join([before, repr(shapes), after, *map(repr, slices)])})"
            known[before, after] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return [known[text] for text in self._texts]


def _treatment(plan: Plan, policy: ActivationPolicy, layer: Layer) -> Any:
    """Returns the policy's part of a layer's key: None if it leaves the layer alone; else name, settings, and the layer's own
    name unless the policy lists its layers.
    """
    names = getattr(policy, "names", None)
    if type(policy) is Keep or (isinstance(names, frozenset) and layer.name not in names):
        return None
    chosen = None if isinstance(names, frozenset) else layer.name
    return plan.activations.name, plain(plan.activations.config, "activations"), chosen
