"""Makes a thing the first time that it is asked for, and raises then and later what making it raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sley_core.errors import SleyError

Key = TypeVar("Key")
Value = TypeVar("Value")


def once(known: dict[Key, Value | SleyError], key: Key, make: Callable[[], Value]) -> Value:
    """Returns `known[key]`, which `make` makes the first time; if that raises a SleyError, it is kept and raised then and
    later.
    """
    if key not in known:
        try:
            known[key] = make()
        except SleyError as error:
            known[key] = error
    found = known[key]
    if isinstance(found, SleyError):
        raise found
    return found
