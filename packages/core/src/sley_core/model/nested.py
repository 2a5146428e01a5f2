"""Looks through arguments and results of operations as the dispatcher passes them: in tuples, lists and dictionaries alone.

torch's pytree knows every container that somebody registered, and takes a third of the time in which a small model is made
without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(nested: Any) -> Iterator[Any]:
    """Yields what is not a tuple, list or dictionary, in order."""
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
    """Returns a copy of the containers in which `change` was called on each `wanted`; everything else is the same object."""
    kind = type(nested)
    if kind is tuple or kind is list:
        return kind([map_only(wanted, change, one) for one in nested])
    if kind is dict:
        return {name: map_only(wanted, change, one) for name, one in nested.items()}
    return change(nested) if isinstance(nested, wanted) else nested
