"""Models that a run refuses by name before its first step, because some layout would compute other numbers.

Autograd calls hooks on parameters (`parameter.register_hook`) once per micro-batch, with the full gradient. If only parts of
that gradient exist on any one rank, a hook that clips or masks by values would give other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.engine.shards import FACE, GRADIENT, OF_SHARD
from sley_core.errors import Diagnostic, PlanError, RunError
from sley_core.model.layers import MODEL

if TYPE_CHECKING:
    from sley_core.engine.registry import Stages
    from sley_core.engine.shards import Shards
    from sley_core.model.layers import Layer, Model


_ANSWERED = FACE | OF_SHARD | GRADIENT | {Tensor.__repr__}


class _Refusing:
    """A tensor that raises RunError "weight-unregistered" in any torch function that reads its values. left_over: message and
    hint.
    """

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
    """A parameter that no layer of this rank registers."""


class LeftResult(_Refusing, Tensor):
    """A tensor that autograd computed from parameters while the factory ran."""


def refuse_left_over(model: Model, own: Iterable[Layer]) -> None:
    """Makes the parameters of layers of other ranks, and the `unreadable` tensors of this rank's layers `own`, raise RunError
    "weight-unregistered" when they are used.

    A layer may hold such a module without registering it, in a list or a function. Whether a forward uses it cannot be known
    before.
    """
    hint = "register it in the layer that uses it: `self.weight = other.weight` or `self.part = part`, a tie"

    def refuse(tensor: Tensor, kind: type[_Refusing], message: str, hint: str = hint) -> None:
        tensor.__class__ = kind  # type: ignore[assignment]
        tensor.left_over = message, hint  # type: ignore[attr-defined]

    for layer in model.layers:
        for name, parameter in layer.module.named_parameters(layer.name):
            if parameter.is_meta:
                message = f"a forward reads the parameter {name!r} of a layer of another rank, as neither parameter nor "
                refuse(parameter, LeftParameter, message + "submodule of its own layer")
    for layer in own:
        for where, tensor in layer.unreadable.items():
            if isinstance(tensor, nn.Parameter):
                message = f"a forward reads a parameter by `{where}`, as neither parameter nor submodule of its own layer"
                refuse(tensor, LeftParameter, message)
            else:
                message = f"a forward reads `{where}`, which the factory computed from parameters once, with a graph"
                refuse(tensor, LeftResult, message, "compute it in the forward, or `.detach()` what stays as it is")


def check_hooks(stages: Stages, shards: Shards, num_slices: int) -> None:
    """Raises PlanError "model-hook", with one diagnostic per hooked parameter of which no rank computes a full gradient.

    stages: all parts of the model, on meta. num_slices: slices of a sequence, i.e. `sp`. The result is the same on all ranks.
    """
    names: dict[int, str] = {}
    parts: dict[int, set[int]] = {}
    for at, (_, layers) in enumerate(stages):
        for layer in layers:
            for name, parameter in layer.module.named_parameters(layer.name):
                if parameter._backward_hooks and parameter.requires_grad:
                    names.setdefault(id(parameter), name)
                    parts.setdefault(id(parameter), set()).add(at)
    found = []
    for key, name in names.items():
        if len(parts[key]) > 1:
            why, hint = "parts of a pipeline that each have a gradient of it", "let one part hold it"
        elif key in shards:
            why, hint = "ranks that each have a shard of it", "leave `[weights]` out, or hook the output of its module"
        elif num_slices > 1:
            why, hint = "ranks that each see a slice of a sequence", "leave `sp` at 1, or hook the output of its module"
        else:
            continue
        message = f"the parameter {name!r} has a gradient hook, and is used by {why}: no rank has what the hook would be given"
        found.append(Diagnostic("model-hook", message, path=MODEL, hint=hint))
    if found:
        raise PlanError.many(found)


DEPTH = 4
"""How far into what an object holds is looked: attributes, entries of lists and tables, what a function closes over."""


def check_no_parameters(loss: Any) -> None:
    """Raises PlanError "loss-parameters" naming the tensors reachable from `loss` that require a gradient."""
    found = sorted(dict.fromkeys(_trained(loss, "", DEPTH, set())))
    if not found:
        return
    names = ", ".join(f"`{name}`" for name in found[:4]) + (", ..." if len(found) > 4 else "")
    raise PlanError(
        "loss-parameters",
        f"the loss has parameters of its own, {names}, which no step would train",
        path=("loss",),
        hint="put them into the last layer, whose output the loss is given, or freeze them by `requires_grad_(False)`",
    )


def _trained(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[str]:
    """Yields the dotted names of the tensors that require a gradient, down to `depth` levels below `value`."""
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type)):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from (_join(name, key) for key, one in value.named_parameters() if one.requires_grad)
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield name
    elif depth:
        for key, held in _held(value):
            yield from _trained(held, _join(name, key), depth - 1, seen)


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what `value` holds, with its name there: attributes, items, closure variables."""
    if isinstance(value, Mapping):
        yield from ((str(key), held) for key, held in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((str(at), held) for at, held in enumerate(value))
    elif isinstance(value, partial):
        yield from [("func", value.func), *_held(value.args), *value.keywords.items()]
    elif isinstance(value, MethodType):
        yield "", value.__self__
    elif isinstance(value, FunctionType):
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield key, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    else:
        # A module's own registries have parameters that `_trained` has already yielded.
        own = ("_parameters", "_modules", "_buffers") if isinstance(value, nn.Module) else ()
        yield from ((key, held) for key, held in getattr(value, "__dict__", {}).items() if key not in own)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name and key else name or key
