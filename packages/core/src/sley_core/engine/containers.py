"""Takes apart named tuples, dataclasses and registered types (transformers' ModelOutput), and puts them together again.

A type is sent by its name: `module:Class` is looked up among the modules that this process has imported, and no other code runs
than what rebuilds the value. Ranks run one program, so the receiver finds the type that the sender used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

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


def _is_json(context: Context) -> bool:
    try:
        return bool(json.loads(json.dumps(context)) == context)
    except (TypeError, ValueError):
        return False
