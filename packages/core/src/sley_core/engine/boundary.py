"""What crosses from one layer's stage to the next: tensors in tuples, lists and dicts, described so that both ends agree.

A description is plain data: equal for equal shapes, dtypes and structure, and JSON on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sley_core.errors import RunError

Structure: TypeAlias = Any
"""None, a leaf's number, a list of structures, or {"tuple" | "dict": ...}: JSON-able."""


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

    def __str__(self) -> str:
        return ", ".join(str(leaf) for leaf in self.leaves) or "no tensor"


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of `value` in order, and its structure. Raises RunError `boundary-type` for anything else in it."""
    leaves: list[Tensor] = []
    return leaves, _structure(value, leaves)


def unflatten(leaves: Sequence[Tensor], structure: Structure) -> Any:
    """The value that `flatten` took apart, with `leaves` in the places of its tensors."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return leaves[structure]
    if isinstance(structure, list):
        return [unflatten(leaves, each) for each in structure]
    if "tuple" in structure:
        return tuple(unflatten(leaves, each) for each in structure["tuple"])
    return {key: unflatten(leaves, each) for key, each in structure["dict"].items()}


def gradients_of(description: Description) -> Description:
    """What comes back for a boundary's tensors: one gradient for each that has one, in order."""
    return Description(tuple(leaf for leaf in description.leaves if leaf.has_gradient), None)


def _structure(part: Any, leaves: list[Tensor]) -> Structure:
    """Puts the tensors of `part` into `leaves`.

    No function within `flatten`: one that calls itself is a cycle, which would keep the tensors until the next collection.
    """
    if part is None:
        return None
    if isinstance(part, Tensor):
        leaves.append(part)
        return len(leaves) - 1
    if isinstance(part, tuple):
        return {"tuple": [_structure(each, leaves) for each in part]}
    if isinstance(part, list):
        return [_structure(each, leaves) for each in part]
    if isinstance(part, dict) and all(isinstance(key, str) for key in part):
        return {"dict": {key: _structure(each, leaves) for key, each in part.items()}}
    raise RunError(
        "boundary-type",
        f"a layer's output holds a {type(part).__name__}, which cannot be sent to the next stage",
        hint="send tensors, None, and tuples, lists and dicts (with string keys) of them",
    )
