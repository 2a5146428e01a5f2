"""Iterates over arguments and results of operations as the dispatcher passes them: nested tuples, lists and dicts only.

torch's pytree supports every registered container, and would take a third of the time of building a small model on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(nested: Any) -> Iterator[Any]:
    """Yields the values that are not tuples, lists or dicts, in order."""
    kind = type(nested)
    if kind is tuple or kind is list:
        for one in nested:
            yield from leaves(one)
    elif kind is dict:
        for one in nested.values():
            yield from leaves(one)
    else:
        yield nested


def map_only(wanted: type, change: Callable[[Any], Any], nested: Any) -> Any:
    """Returns a copy of `nested`, arguments of an operation, in which `change` has replaced each value of type `wanted`.

    Looks into tuples, lists and dicts themselves, not into subclasses such as named tuples; other values are the same objects.
    """
    kind = type(nested)
    if kind is tuple or kind is list:
        return kind([map_only(wanted, change, one) for one in nested])
    if kind is dict:
        return {name: map_only(wanted, change, one) for name, one in nested.items()}
    return change(nested) if isinstance(nested, wanted) else nested
