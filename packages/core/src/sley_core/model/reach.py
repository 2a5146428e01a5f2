"""Finds the tensors that a layer holds besides its parameters and buffers: in attributes, lists, functions, classes, hooks.

A run replaces the parameters that a module registered. No module lists the other places that hold them, or tensors made from
them, so these are searched, and named by the attribute through which they were found.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from sley_core.model.layers import Layer

MOST = 100_000
"""How many objects are searched behind one attribute; the limit is for attributes such as a tokenizer or a dataset."""

_REGISTERED = {"_parameters", "_buffers", "_modules"}
_ENDS: tuple[type, ...] = (str, bytes, int, float, complex, type, ModuleType, BuiltinFunctionType, CodeType, FrameType)
_ENDS += (torch.dtype, torch.device, torch.Generator, type(None))
_EMPTY = (dict, OrderedDict)


class HeldTensor(NamedTuple):
    """Holds a tensor that was found. where: the attribute through which it was found. in_module: whether it is a parameter of a
    module that belongs to no layer.
    """

    where: str
    tensor: Tensor
    in_module: bool


def held_tensors(layer: Layer, registered: set[int]) -> Iterator[HeldTensor]:
    """Yields the tensors that `layer` holds, each under the first place found. registered: ids of all layers' modules."""
    seen: set[int] = set()
    for where, root in _roots(layer):
        if issubclass(type(root), _ENDS) or (type(root) in _EMPTY and not root):
            continue  # fast path for most attributes: flags, names, and empty dicts of hooks
        for tensor, in_module in _behind(root, seen, registered):
            yield HeldTensor(where, tensor, in_module)


def _roots(layer: Layer) -> Iterator[tuple[str, Any]]:
    """Yields the places to search, with their names: module and parameter attributes, hooks, and class attributes."""
    kinds: dict[type, None] = {}
    for prefix, module in layer.module.named_modules(prefix=layer.name):
        for name, value in vars(module).items():
            if name not in _REGISTERED and not _is_kept_up(module, name):
                yield f"{prefix}.{name}", value
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}.register_hook", parameter._backward_hooks
                yield f"{prefix}.{name}", parameter.__dict__
        kinds.update(dict.fromkeys(type(module).__mro__))
    for kind in kinds:
        if not _is_torchs(kind):
            for name, value in list(vars(kind).items()):
                if name == "__init__":
                    continue  # its globals, such as a registry of instances, are not needed by any forward
                yield f"{kind.__name__}.{name}", value


def _is_kept_up(module: nn.Module, name: str) -> bool:
    """Returns whether torch itself updates the attribute when a parameter is replaced, or before each forward."""
    return (isinstance(module, nn.RNNBase) and name == "_flat_weights") or f"{name}_orig" in module._parameters


def _is_torchs(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).partition(".")[0] in ("torch", "builtins")


def _behind(root: Any, seen: set[int], registered: set[int]) -> Iterator[tuple[Tensor, bool]]:
    """Yields the tensors reachable from `root` through at most `MOST` objects; True: a parameter of an unregistered module."""
    ahead = [root]
    looked_at = 0
    while ahead and looked_at < MOST:
        one = ahead.pop()
        kind = type(one)
        if issubclass(kind, _ENDS) or id(one) in seen:
            continue
        seen.add(id(one))
        looked_at += 1
        if issubclass(kind, Tensor):
            yield one, False
        elif issubclass(kind, nn.Module):
            if id(one) not in registered:
                yield from ((each, True) for each in one._parameters.values() if each is not None)
                ahead += [value for name, value in vars(one).items() if name != "_parameters"]
        elif issubclass(kind, FunctionType):
            if not _is_torchs(one):
                ahead += _of_function(one)
        else:
            ahead += gc.get_referents(one)


def _of_function(function: FunctionType) -> list[Any]:
    """Returns what a function closes over, its defaults, and the tensors, containers and functions it uses as globals."""
    found = [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, function.__dict__]
    known = (function.__globals__.get(name) for name in function.__code__.co_names)
    return found + [one for one in known if isinstance(one, Tensor | list | tuple | dict | set | FunctionType)]
