"""Models that a run refuses by name before its first step, because some layout would compute other numbers.

Autograd calls hooks on parameters (`parameter.register_hook`) once per microbatch, with the full gradient. If only parts of
that gradient exist on any one rank, a hook that clips or masks by values would give other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.engine.shards import GRADIENT_FUNCTIONS, SHAPE_FUNCTIONS, SHARD_FUNCTIONS, Shards
from sley_core.errors import Diagnostic, PlanError, RunError
from sley_core.generators import iterate_leaves
from sley_core.model.layers import MODEL, Layer, Model

if TYPE_CHECKING:
    from sley_core.engine.registry import Stages


_ANSWERED = SHAPE_FUNCTIONS | SHARD_FUNCTIONS | GRADIENT_FUNCTIONS | {Tensor.__repr__}


class _UnreadableTensor:
    """A tensor whose values no torch function may read: RunError "weight-unregistered". refusal: its message and hint."""

    refusal: tuple[str, str]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _ANSWERED:
            for argument in (*args, *kwargs.values()):
                for item in argument if isinstance(argument, list | tuple) else [argument]:
                    if isinstance(item, _UnreadableTensor):
                        message, hint = item.refusal
                        raise RunError("weight-unregistered", message, hint=hint)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


class UnregisteredParameter(_UnreadableTensor, nn.Parameter):
    """A parameter that is registered in no layer of this rank."""


class ComputedTensor(_UnreadableTensor, Tensor):
    """A tensor that autograd computed from parameters while the factory ran."""


def refuse_unregistered(model: Model, local_layers: Iterable[Layer]) -> None:
    """Makes the parameters of layers of other ranks, and the `unreadable` tensors of this rank's layers `own`, raise RunError
    "weight-unregistered" when they are used, since it is unknown before whether a forward uses an unregistered tensor.
    """
    hint = "register it in the layer that uses it, as a tie: `self.weight = other.weight` or `self.part = part`"

    def refuse(tensor: Tensor, tensor_class: type[_UnreadableTensor], message: str, hint: str = hint) -> None:
        tensor.__class__ = tensor_class  # type: ignore[assignment]
        tensor.refusal = message, hint  # type: ignore[attr-defined]

    for layer in model.layers:
        for name, parameter in layer.module.named_parameters(layer.name):
            if parameter.is_meta:
                message = (
                    f"a forward reads the parameter {name!r} of a layer on another rank, which is neither a parameter nor a "
                )
                refuse(parameter, UnregisteredParameter, message + "submodule of its own layer")
    for layer in local_layers:
        for attribute, tensor in layer.unreadable.items():
            if isinstance(tensor, nn.Parameter):
                message = (
                    f"a forward reads a parameter through `{attribute}`, which is neither a parameter nor a submodule of "
                    "its own layer"
                )
                refuse(tensor, UnregisteredParameter, message)
            else:
                message = f"a forward reads `{attribute}`, which the factory computed from parameters, with its autograd graph"
                refuse(
                    tensor, ComputedTensor, message, "compute it in the forward, or `.detach()` it if it should stay constant"
                )


def check_hooks(stages: Stages, shards: Shards, num_slices: int) -> None:
    """Raises the same PlanError "model-hook" on all ranks for hooked parameters whose full gradient no rank has."""
    names: dict[int, str] = {}
    parts: dict[int, set[int]] = {}
    for index, (_, layers) in enumerate(stages):
        for layer in layers:
            for name, parameter in layer.module.named_parameters(layer.name):
                if parameter._backward_hooks and parameter.requires_grad:
                    names.setdefault(id(parameter), name)
                    parts.setdefault(id(parameter), set()).add(index)
    diagnostics = []
    for key, name in names.items():
        if len(parts[key]) > 1:
            users, hint = "several pipeline stages, each with its own gradient", "use the parameter in one stage only"
        elif key in shards:
            users, hint = "several ranks, each with a shard", "remove `[weights]`, or hook the output of its module"
        elif num_slices > 1:
            users, hint = "several ranks, each with a slice of the sequence", "set `sp = 1`, or hook the output of its module"
        else:
            continue
        message = (
            f"the parameter {name!r} has a gradient hook, but is used by {users}, so no rank has the full "
            "gradient to pass to the hook"
        )
        diagnostics.append(Diagnostic("model-hook", message, path=MODEL, hint=hint))
    if diagnostics:
        raise PlanError.from_diagnostics(diagnostics)


def check_no_parameters(loss: Any) -> None:
    """Raises PlanError "loss-parameters" for tensors reachable from `loss` that require a gradient."""
    visited, names = set[int](), list[str]()
    members = {**loss._parameters, **loss._modules} if isinstance(loss, nn.Module) else {}
    for key, value in {**members, **getattr(loss, "__dict__", {"": loss})}.items():
        for leaf in iterate_leaves(value, visited):
            if isinstance(leaf, nn.Module):
                names += [f"{key}.{name}" for name, parameter in leaf.named_parameters() if parameter.requires_grad]
            elif isinstance(leaf, Tensor) and leaf.requires_grad:
                names.append(key)
    if names:
        names_text = ", ".join(f"`{name}`" for name in names[:4]) + (", ..." if len(names) > 4 else "")
        message = f"the loss has its own parameters, {names_text}, which no step would train"
        hint = "move them into the last layer, whose output the loss receives, or freeze them with `requires_grad_(False)`"
        raise PlanError("loss-parameters", message, path=("loss",), hint=hint)
