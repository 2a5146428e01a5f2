"""Makes tensors that are not the run's raise an error when they are read: torch would compute arbitrary numbers on meta, or the
first values of weights that have been trained since.

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
    """Makes the parameters of layers of other ranks, and the `unreadable` tensors of this rank's layers `own`, raise RunError
    "weight-unregistered" when they are used.
    """
    hint = "register it in the layer that uses it: `self.weight = other.weight` or `self.part = part`, a tie"
    for layer in model.layers:
        for name, parameter in layer.module.named_parameters(layer.name):
            if parameter.is_meta:
                message = (
                    f"a forward reads the parameter {name!r} of a layer of another rank, as neither parameter nor "
                )
                _refuse(parameter, LeftParameter, message + "submodule of its own layer", hint)
    for layer in own:
        for where, tensor in layer.unreadable.items():
            if isinstance(tensor, nn.Parameter):
                message = (
                    f"a forward reads a parameter by `{where}`, as neither parameter nor submodule of its own layer"
                )
                _refuse(tensor, LeftParameter, message, hint)
            else:
                message = f"a forward reads `{where}`, which the factory computed from parameters once, with a graph"
                _refuse(tensor, LeftResult, message, "compute it in the forward, or `.detach()` what stays as it is")


def _refuse(tensor: Tensor, kind: type[_Refusing], message: str, hint: str) -> None:
    """Changes the class of `tensor` to `kind`, whose uses raise with this message and hint."""
    tensor.__class__ = kind  # type: ignore[assignment]
    tensor.left_over = message, hint  # type: ignore[attr-defined]
