"""Tells which layers of a model take as long and as much memory as each other: those of one class, with parameters of the same
shapes and the same settings.

What is not known to be plain makes its layer differ from all others (`model/kinds.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sley_core.engine.call import Keep
from sley_core.model.kinds import kind_of, plain

if TYPE_CHECKING:
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import ActivationPolicy


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
