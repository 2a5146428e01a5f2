"""Refuses a loss with parameters of its own: nothing would reduce, count, step or save them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from sley_core.errors import PlanError

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
        yield from (
            (key, held) for key, held in getattr(value, "__dict__", {}).items() if not _is_of_a_module(value, key)
        )


def _is_of_a_module(value: Any, key: str) -> bool:
    """Returns whether `key` is an nn.Module's own registry, whose parameters `_trained` has already yielded."""
    return isinstance(value, nn.Module) and key in ("_parameters", "_modules", "_buffers")


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name and key else name or key
