"""Makes a thing the first time that it is asked for, and raises then and later what making it raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sley_core.errors import SleyError

Key = TypeVar("Key")
Value = TypeVar("Value")

NOT_YET: Any = object()
"""What is nobody's value."""


def once(known: dict[Key, Value | SleyError], key: Key, make: Callable[[], Value]) -> Value:
    """Returns `known[key]`, which `make` makes the first time; if that raises a SleyError, it is kept and raised then and
    later.
    """
    found: Value | SleyError = known.get(key, NOT_YET)  # one look-up, as a search asks half a million times
    if found is NOT_YET:
        try:
            found = known[key] = make()
        except SleyError as error:
            found = known[key] = error
    if isinstance(found, SleyError):
        raise found
    return found
