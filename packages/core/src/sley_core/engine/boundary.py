"""What crosses from one layer's stage to the next: tensors in containers, described so that both ends agree.

A description is plain data: equal for equal shapes, dtypes and structure, and JSON on the wire. Containers are tuples, lists
and dicts, and types that `containers` takes apart. A tensor that stands in two places crosses once, and is one on the other
side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sley_core.engine.containers import find, name_of, put_together, take_apart
from sley_core.errors import RunError

Structure: TypeAlias = Any
"""None, a leaf's number, a list of structures, {"tuple" | "dict": ...}, or {"type": name, ...}: JSON-able."""


@dataclass(frozen=True)
class Leaf:
    """One tensor: its dtype, its shape, and whether a gradient comes back for it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_gradient: bool

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        gradient = " with gradient" if self.has_gradient else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{gradient}"


@dataclass(frozen=True)
class Description:
    """The leaves in order, and how they hang together."""

    leaves: tuple[Leaf, ...]
    structure: Structure

    @property
    def flags(self) -> bytes:
        """Of each leaf, whether a gradient comes back: a byte of 0 or 1."""
        return bytes(leaf.has_gradient for leaf in self.leaves)

    def fits(self, other: Description) -> bool:
        """Whether it is `other` but for the flags."""
        if self.structure != other.structure or len(self.leaves) != len(other.leaves):
            return False
        pairs = zip(self.leaves, other.leaves, strict=True)
        return all(one.dtype == two.dtype and one.shape == two.shape for one, two in pairs)

    def flagged(self, flags: bytes) -> Description:
        """This description with other flags."""
        if flags == self.flags:
            return self
        pairs = zip(self.leaves, flags, strict=True)
        return replace(self, leaves=tuple(replace(leaf, has_gradient=bool(flag)) for leaf, flag in pairs))

    def __str__(self) -> str:
        return ", ".join(str(leaf) for leaf in self.leaves) or "no tensor"


def flatten(value: Any, layer: str = "") -> tuple[list[Tensor], Structure]:
    """The tensors of `value` in order, and its structure. layer: whose output it is, for the error.

    Raises RunError `boundary-type` for anything else in it.
    """
    leaves: list[Tensor] = []
    return leaves, _structure(value, leaves, {}, layer)


def unflatten(leaves: Sequence[Tensor], structure: Structure) -> Any:
    """The value that `flatten` took apart, with `leaves` in the places of its tensors.

    Raises RunError `boundary-type` for a type that no module imported here has.
    """
    if structure is None:
        return None
    if isinstance(structure, int):
        return leaves[structure]
    if isinstance(structure, list):
        return [unflatten(leaves, each) for each in structure]
    if "tuple" in structure:
        return tuple(unflatten(leaves, each) for each in structure["tuple"])
    if "dict" in structure:
        return {key: unflatten(leaves, each) for key, each in structure["dict"].items()}
    kind = find(structure["type"])
    if kind is None:
        message = f"a {structure['type']} came from another stage, and nothing here has imported it"
        raise RunError("boundary-type", message, hint="import it in the module of the model's factory")
    parts = [unflatten(leaves, each) for each in structure["parts"]]
    return put_together(kind, structure["context"], parts)


def gradients_of(description: Description) -> Description:
    """What comes back for a boundary's tensors: one gradient for each that has one, in order."""
    return Description(tuple(leaf for leaf in description.leaves if leaf.has_gradient), None)


def _structure(part: Any, leaves: list[Tensor], known: dict[int, int], layer: str) -> Structure:
    """Puts the tensors of `part` into `leaves`. known: by id, the numbers of those that are there.

    No function within `flatten`: one that calls itself is a cycle, which would keep the tensors until the next collection.
    """
    if part is None:
        return None
    if isinstance(part, Tensor):
        number = known.setdefault(id(part), len(leaves))
        if number == len(leaves):
            leaves.append(part)
        return number
    kind = type(part)
    if kind is tuple:
        return {"tuple": [_structure(each, leaves, known, layer) for each in part]}
    if kind is list:
        return [_structure(each, leaves, known, layer) for each in part]
    if kind is dict and all(isinstance(key, str) for key in part):
        return {"dict": {key: _structure(each, leaves, known, layer) for key, each in part.items()}}
    name, apart = name_of(kind), take_apart(part)
    if name is None or apart is None:
        raise _cannot_cross(kind, layer)
    context, parts = apart
    return {"type": name, "context": context, "parts": [_structure(each, leaves, known, layer) for each in parts]}


def _cannot_cross(kind: type, layer: str) -> RunError:
    whose = f"the output of the layer {layer!r}" if layer else "a layer's output"
    return RunError(
        "boundary-type",
        f"{whose} holds a value of type {kind.__qualname__}, which cannot be sent to the next stage",
        hint="send tensors (`torch.tensor(3)` for a number), None, and tuples, lists, dicts (with string keys), named tuples "
        "and dataclasses of them; a class of yours is made in a module, not in a function",
    )
