"""Describes all that a run could leave behind in a model: patched forwards, exchanged classes, attributes, hooks.

before = traces(model.layers)
...                                                  # a run of them, and its end
assert traces(model.layers) == before
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sley_core import assemble as drafts
from sley_core.assemble import draft_model
from sley_core.engine.refusals import LeftParameter
from sley_core.engine.shards import StandIn
from sley_core.model.layers import Layer, Model

Traces = dict[str, dict[str, Any]]


def traces(layers: Iterable[Layer]) -> Traces:
    """Returns, by name of each module of `layers`, its class and attributes in a form that can be compared and sent.

    Of parameters: class, attributes, hooks, whether they are trained and have a gradient; not values, dtype or device, which
    a run gives them. A stand-in of a sharded weight, or of one of another rank, is described as what it stands for.
    """
    return {
        name: {"class": type(module).__qualname__} | {key: _described(value) for key, value in vars(module).items()}
        for layer in layers
        for name, module in layer.module.named_modules(prefix=layer.name)
    }


@contextmanager
def drafts_kept() -> Iterator[list[tuple[Model, Traces]]]:
    """Gives a list to which each `assemble` within the block adds its model, whole, and the traces of it as it was built."""
    kept: list[tuple[Model, Traces]] = []

    def draft(*args: Any) -> Model:
        model = draft_model(*args)
        kept.append((model, traces(model.layers)))
        return model

    with mock.patch.object(drafts, "draft_model", draft):
        yield kept


def _described(value: Any) -> Any:
    """Returns plain data that describes a module's attribute, for comparison."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else at: _described(held) for at, (key, held) in enumerate(value.items())}
    if isinstance(value, Tensor):
        return _tensor(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__qualname__} {name}" if name else type(value).__qualname__


def _tensor(value: Tensor) -> dict[str, Any]:
    """Returns plain data that describes a tensor: class, attributes, gradient and hooks."""
    if isinstance(value, StandIn):
        value = value.shard
    kind: type[Tensor] = type(value)
    attributes = set(vars(value))
    if kind is LeftParameter:
        kind, attributes = nn.Parameter, attributes - {"left_over"}
    with torch._C.DisableTorchFunctionSubclass():  # one that refuses to be read tells all the same what hangs on it
        return {
            "class": kind.__qualname__,
            "attributes": sorted(attributes),
            "requires_grad": value.requires_grad,
            "has_gradient": value.is_leaf and value.grad is not None,
            "hooks": len(value._backward_hooks or ()),
            "accumulated_hooks": len(value._post_accumulate_grad_hooks or ()),
        }


def assert_untouched(before: Traces, layers: Iterable[Layer]) -> None:
    """Asserts that `layers` have no other traces than `before`; names each module and attribute that differs."""
    after = traces(layers)
    assert after.keys() == before.keys(), sorted(after.keys() ^ before.keys())
    differing = {
        f"{name}: {key}": (before[name].get(key, "nothing"), after[name].get(key, "nothing"))
        for name in before
        for key in before[name].keys() | after[name].keys()
        if before[name].get(key, "nothing") != after[name].get(key, "nothing")
    }
    assert not differing, "\n".join(f"{place} was {was}, is {now}" for place, (was, now) in sorted(differing.items()))
