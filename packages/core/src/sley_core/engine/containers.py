"""Takes apart named tuples, dataclasses and registered types (transformers' ModelOutput), and puts them together again; copies
containers around the same tensors.

A type is sent by its name: `module:Class` is looked up among the modules that this process has imported, and no other code runs
than what rebuilds the value. Ranks run one program, so the receiver finds the type that the sender used.
"""

from __future__ import annotations

import copy
import json
import operator
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

Context = Any
"""What a type needs besides its parts, as JSON: names of fields, keys."""


def name_of(kind: type) -> str | None:
    """Returns the name by which `find` finds `kind`; None if it does not, as for a class defined in a function."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if find(name) is kind else None


def find(name: str) -> Any:
    """Returns the class named `name`, `module:qualname`; None if no imported module has it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    return found


def take_apart(value: Any) -> tuple[Context, list[Any]] | None:
    """Returns the parts of `value`, a container that is sent to another stage, and what `put_together` needs beside its type
    and these: None, or something that JSON can hold.

    Takes named tuples, torch's return types, what torch's pytrees know, and dataclasses that hold no more than their fields;
    returns None for any other type.
    """
    kind = type(value)
    if isinstance(value, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")):
        return None, list(value)
    if kind in SUPPORTED_NODES:
        parts, context = SUPPORTED_NODES[kind].flatten_fn(value)
        return (context, list(parts)) if _is_json(context) else None
    if not is_dataclass(value) or isinstance(value, tuple | list | dict):
        return None
    names = [each.name for each in fields(value) if hasattr(value, each.name)]
    if vars(value).keys() - names if hasattr(value, "__dict__") else False:
        return None  # it holds more than its fields
    return names, [getattr(value, name) for name in names]


def put_together(kind: Any, context: Context, parts: Sequence[Any]) -> Any:
    """Rebuilds a `kind` from its `parts`. Does not run initialisers of dataclasses or named tuples: they ran where the value
    was made.
    """
    if issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields"):
        return kind(parts)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, parts)
    if kind in SUPPORTED_NODES:
        return SUPPORTED_NODES[kind].unflatten_fn(parts, context)
    value = object.__new__(kind)
    for name, part in zip(context, parts, strict=True):
        object.__setattr__(value, name, part)
    return value


def parts_of(value: Any) -> list[Any]:
    """Returns what a container, or an object with attributes, holds; nothing for a module, a class or a function."""
    if isinstance(value, Mapping):
        return [*value.values(), *_attributes(value).values()]
    if isinstance(value, tuple | list | set | frozenset):
        return [*value, *_attributes(value).values()]
    return list(_attributes(value).values())


def copied(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Returns a copy of the containers and objects of `value` around the same tensors and modules, in which writes to the
    originals do not show. What cannot be copied is returned as it is.
    """
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, _WHOLE):
        return value
    if isinstance(value, tuple) and not _attributes(value):
        parts = [copied(part, known) for part in value]
        return value if all(map(operator.is_, parts, value)) else put_together(type(value), None, parts)
    try:
        made = known[id(value)] = copy.copy(value)
    except Exception:  # a class may refuse
        return value
    places = value.items() if isinstance(value, MutableMapping) else enumerate(value) if isinstance(value, list) else ()
    for at, part in list(places):
        new = copied(part, known)
        if new is not part:
            made[at] = new
    for name, part in _attributes(value).items():
        new = copied(part, known)
        if new is not part:
            object.__setattr__(made, name, new)
    return made


_FUNCTIONS = FunctionType, BuiltinFunctionType, MethodType
_PLAIN = str, bytes, int, float, complex, type(None), torch.dtype, torch.device, Enum
_WHOLE = Tensor, nn.Module, type, ModuleType, *_FUNCTIONS, *_PLAIN
"""What is never copied, nor looked into."""


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object by name, those in slots included."""
    if isinstance(value, _WHOLE):
        return {}
    slots = (name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ())))
    found = {name: getattr(value, name) for name in slots if name[:2] != "__" and hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _is_json(context: Context) -> bool:
    try:
        return bool(json.loads(json.dumps(context)) == context)
    except (TypeError, ValueError):
        return False
