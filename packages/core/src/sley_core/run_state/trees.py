"""Flattens the states that an optimizer keeps for a parameter, which may be nested, into leaves, and rebuilds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sley_core.errors import RunError


class StateLeaf(NamedTuple):
    """Holds a value in a state. path: the containers that lead to it, each as its kind and the key or index in it."""

    path: tuple[tuple[str, str | int], ...]
    value: Any

    @property
    def name(self) -> str:
        return ".".join(str(key) for _, key in self.path)


def leaves(state: Any, path: tuple[tuple[str, str | int], ...] = ()) -> Iterator[StateLeaf]:
    """Yields the values in dicts, lists and tuples. Raises RunError `optimizer-state` for a key that cannot be part of a
    name.
    """
    if isinstance(state, Mapping):
        for key, value in state.items():
            if not isinstance(key, str) or "/" in key:
                raise RunError(
                    "optimizer-state", f"the optimizer's states have the key {key!r}, which cannot be a name"
                )
            yield from leaves(value, (*path, ("dict", key)))
    elif type(state) in (list, tuple) and state:
        for number, value in enumerate(state):
            yield from leaves(value, (*path, (type(state).__name__, number)))
    else:
        yield StateLeaf(path, state)


def joined(found: Iterable[StateLeaf]) -> Any:
    """Rebuilds the state from its leaves, in their order."""
    root: dict[str | int, Any] = {}
    kinds: dict[tuple[str | int, ...], str] = {}
    for path, value in found:
        inside = root
        for depth, (kind, key) in enumerate(path):
            kinds[tuple(one for _, one in path[:depth])] = kind
            if depth == len(path) - 1:
                inside[key] = value
            else:
                inside = inside.setdefault(key, {})
    return _built(root, (), kinds)


def _built(node: Any, place: tuple[str | int, ...], kinds: Mapping[tuple[str | int, ...], str]) -> Any:
    """Returns `node` with dicts turned back into lists and tuples where `kinds` says so. place: the path of `node`."""
    if place not in kinds:
        return node if place else {}
    inside = {key: _built(value, (*place, key), kinds) for key, value in node.items()}
    if kinds[place] == "dict":
        return inside
    every = [inside[number] for number in sorted(inside)]
    return tuple(every) if kinds[place] == "tuple" else every
