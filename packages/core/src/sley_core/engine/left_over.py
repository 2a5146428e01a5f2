"""Makes tensors that are still on meta when a run begins raise an error when they are read: torch would compute arbitrary
numbers.

A module that a layer holds without registering it (in a list, in a function) may hold parameters of other ranks' layers, or of
no layer. Whether a forward uses it cannot be known before, so the error is raised at the use, as for stand-ins (`stand_in`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.engine.shards import FACE, GRADIENT, OF_SHARD
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.model.layers import Layer, Model

_ANSWERED = FACE | OF_SHARD | GRADIENT | {Tensor.__repr__}


class _Refusing:
    """Raises RunError "weight-unregistered" in any torch function that reads its values. left_over: message and hint."""

    left_over: tuple[str, str]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _ANSWERED:
            for one in (*args, *kwargs.values()):
                for each in one if isinstance(one, list | tuple) else [one]:
                    if isinstance(each, _Refusing):
                        what, hint = each.left_over
                        raise RunError("weight-unregistered", what, hint=hint)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


class LeftParameter(_Refusing, nn.Parameter):
    """Stands for a parameter that no layer of this rank registers."""


class LeftResult(_Refusing, Tensor):
    """Stands for a tensor that autograd computed from parameters while the factory ran."""


def refuse_left_over(model: Model, own: Iterable[Layer]) -> None:
    """Makes every tensor that the factory of `model` made, and that got no values, raise RunError "weight-unregistered" when it
    is used.

    own: the layers of this rank, which are materialised.
    """
    names = {id(one): name for layer in model.layers for name, one in layer.module.named_parameters(layer.name)}
    for parameter in model.built:
        if parameter.is_meta:
            known = names.get(id(parameter))
            what = (
                f"{known!r} of a layer of another rank"
                if known
                else f"of shape {list(parameter.shape)} that no layer has"
            )
            message = f"a forward reads the parameter {what}, as neither parameter nor submodule of its own layer"
            hint = "register it in the layer that uses it: `self.weight = other.weight` or `self.part = part`, a tie"
            _refuse(parameter, LeftParameter, message, hint)
    for held in (one for layer in own for one in layer.held):
        if held.tensor.is_meta and held.ref is None:
            message = f"a forward reads `{held.where}`, which the factory computed from parameters once, with a graph"
            _refuse(held.tensor, LeftResult, message, "compute it in the forward, or `.detach()` what stays as it is")


def _refuse(tensor: Tensor, kind: type[_Refusing], message: str, hint: str) -> None:
    """Changes the class of `tensor` to `kind`, whose uses raise with this message and hint."""
    tensor.__class__ = kind  # type: ignore[assignment]
    tensor.left_over = message, hint  # type: ignore[attr-defined]
