"""Tells which layers of a model take as long and as much memory as each other: those of one class, with parameters of the same
shapes and the same settings.

What is not known to be plain makes its layer differ from all others (`kind_of`).
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
OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has; of these, hooks and the training mode are compared separately."""


def kind_of(module: nn.Module, place: str) -> Any:
    """Returns what determines the module's cost, as nested plain values; equal `repr`s mean equal modules.

    place: its name in the model, used for what is not plain, so that it differs from other modules.

    An attribute that is not known to be plain (a number, a text, a tensor's shape) makes its module differ from all others: it
    is then counted on its own, which takes longer and is never wrong.
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


def layer_keys(plan: Plan, model: Model, policy: ActivationPolicy, fields: Mapping[str, Tensor]) -> list[str]:
    """Returns a key of 16 hexadecimal digits for each layer of `model`, on meta; equal for layers that take as long and as much
    memory as each other.

    fields: a micro-batch, whose shapes and dtypes count; the policy, precision and loss count too. `train-cli calibrate` writes
    the same keys for the same plan, in any layout with its `micro_size` and `sp`.
    """
    sequence = plan.sequence
    slices = slices_of(plan.parallel.sp, sequence.name, sequence.config) if sequence is not None else ()
    return LayerKinds(plan, model, policy).keys(fields, slices)


def slices_of(sp: int, attention: str, config: Any) -> tuple[Any, ...]:
    """Returns what slicing sequences adds to layers' keys: number of ranks, name and settings of the attention; () for whole
    sequences.
    """
    return (sp, attention, plain(config, "sequence")) if sp > 1 else ()


class LayerKinds:
    """Holds what of a plan's layers under a policy is the same for all micro-batches and slices, looked at once."""

    def __init__(self, plan: Plan, model: Model, policy: ActivationPolicy) -> None:
        last = len(model.layers) - 1
        precision = plan.precision.compute, plan.precision.gradients
        self._texts: list[tuple[str, str]] = []
        for at, layer in enumerate(model.layers):
            loss = (plan.loss.name, plain(plan.loss.config, "loss")) if at == last else None
            before = kind_of(layer.module, layer.name), layer.fields
            after = precision, (at == 0, loss), _treatment(plan, policy, layer)
            self._texts.append((_listed(before), _listed(after)))

    def keys(self, fields: Mapping[str, Tensor], slices: tuple[Any, ...] = ()) -> list[str]:
        """Returns the key of each layer: a digest of its class, settings and treatment, and of the shapes and dtypes of
        `fields`, a micro-batch. Runs no layer.

        slices: number of ranks that share a sequence, name and settings of the attention; () for whole sequences.
        """
        shapes = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in fields.items())
        known: dict[tuple[str, str], str] = {}
        for before, after in dict.fromkeys(self._texts):
            text = f"({', '.join([before, repr(shapes), after, *map(repr, slices)])})"
            known[before, after] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return [known[text] for text in self._texts]


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, values))


def _treatment(plan: Plan, policy: ActivationPolicy, layer: Layer) -> Any:
    """Returns what the activation policy adds to a layer's key: None if it leaves the layer alone, else its name and settings,
    and the layer's own name unless the policy says which layers it works on.
    """
    names = getattr(policy, "names", None)
    if type(policy) is Keep or (isinstance(names, frozenset) and layer.name not in names):
        return None
    chosen = None if isinstance(names, frozenset) else layer.name
    return plan.activations.name, plain(plan.activations.config, "activations"), chosen
