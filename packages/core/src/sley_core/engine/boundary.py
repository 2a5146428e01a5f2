"""Describes values that cross from one stage to the next: tensors in containers. Both ends agree on the description.

A description is plain data: equal for equal shapes, dtypes and structure, and sent as JSON. A tensor that occurs in two places
is one tensor on the other side too, even if this varies with the data: each place has a leaf, and later leaves of the same
tensor are marked `same_as`.

Containers are tuples, lists and dicts, named tuples, dataclasses and the types that torch's pytrees know (transformers'
ModelOutput). A type is sent as its name, `module:Class`, which the receiver looks up among the modules that it has imported:
all ranks run the same program. Nothing is imported, and only the code that rebuilds the value runs.
"""

import copy
import json
import operator
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import permutations
from math import prod
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from sley_core.errors import RunError

Context = Any
"""The data, such as field names or keys, that is needed to rebuild a container from its parts. It can be written as JSON."""


def find_type(name: str) -> Any:
    """Returns the class named `name`, of the form `module:qualname`, or None if no imported module has it."""
    module, _, path = name.partition(":")
    target: Any = sys.modules.get(module)
    for attribute in path.split("."):
        target = getattr(target, attribute, None)
    return target


def split_container(value: Any) -> tuple[Context, list[Any]] | None:
    """Returns the context and parts of `value`, for `rebuild_container`, or None unless `value` is a named tuple, a named
    result of a torch function, a container of torch's pytrees whose context is JSON, or a dataclass with only fields.
    """
    cls = type(value)
    if isinstance(value, tuple) and (hasattr(cls, "_fields") or hasattr(cls, "n_sequence_fields")):
        return None, list(value)
    if cls in SUPPORTED_NODES:
        parts, context = SUPPORTED_NODES[cls].flatten_fn(value)
        try:
            return (context, list(parts)) if json.loads(json.dumps(context)) == context else None
        except (TypeError, ValueError):
            return None
    if not is_dataclass(value) or isinstance(value, tuple | list | dict):
        return None
    names = [item.name for item in fields(value) if hasattr(value, item.name)]
    if vars(value).keys() - names if hasattr(value, "__dict__") else False:
        return None  # it has other attributes
    return names, [getattr(value, name) for name in names]


def rebuild_container(cls: Any, context: Context, parts: Sequence[Any]) -> Any:
    """Returns a container of type `cls` with `parts`. Does not call the initialisers of dataclasses or named tuples."""
    if issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"):
        return cls(parts)
    if issubclass(cls, tuple):
        return tuple.__new__(cls, parts)
    if cls in SUPPORTED_NODES:
        return SUPPORTED_NODES[cls].unflatten_fn(parts, context)
    value = object.__new__(cls)
    for name, part in zip(context, parts, strict=True):
        object.__setattr__(value, name, part)
    return value


def tensors_in(values: Iterable[Any], visited: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """Yields each tensor in `values` and in nested containers and objects once. Does not search modules, classes or functions.
    visited: the values to skip, by id. The search adds each value that it meets.
    """
    visited = {} if visited is None else visited
    for value in values:
        if id(value) in visited:
            continue
        visited[id(value)] = value
        if isinstance(value, Tensor):
            yield value
        else:
            parts = value.values() if isinstance(value, Mapping) else value
            parts = parts if isinstance(value, Mapping | tuple | list | set | frozenset) else ()
            yield from tensors_in([*parts, *_attributes(value).values()], visited)


def copy_containers(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Returns a copy of `value` and of nested containers and objects, with the same tensors and modules. If `copy.copy` refuses
    a value, the copy contains the value itself. copies: the existing copies, by the id of the original; new copies are added.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, _ATOMIC_TYPES):
        return value
    if isinstance(value, tuple) and not _attributes(value):
        parts = [copy_containers(part, copies) for part in value]
        return value if all(map(operator.is_, parts, value)) else rebuild_container(type(value), None, parts)
    try:
        copied = copies[id(value)] = copy.copy(value)
    except Exception:  # a class may refuse
        return value
    items = value.items() if isinstance(value, MutableMapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(items):
        copied_part = copy_containers(part, copies)
        if copied_part is not part:
            copied[key] = copied_part
    for name, part in _attributes(value).items():
        copied_part = copy_containers(part, copies)
        if copied_part is not part:
            object.__setattr__(copied, name, copied_part)
    return copied


_PLAIN_TYPES = str, bytes, int, float, complex, type(None), torch.dtype, torch.device, Enum  # types of immutable values
_ATOMIC_TYPES = Tensor, nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, *_PLAIN_TYPES
"""The types whose values `copy_containers` does not copy and `tensors_in` does not search."""


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of `value` in slots and `__dict__` by name; {} for an atomic type."""
    if isinstance(value, _ATOMIC_TYPES):
        return {}
    slots: list[str] = []
    for cls in type(value).__mro__:
        names = getattr(cls, "__slots__", ())
        slots += [names] if isinstance(names, str) else names
    in_slots = {name: getattr(value, name) for name in slots if name[:2] != "__" and hasattr(value, name)}
    return in_slots | getattr(value, "__dict__", {})


Structure: TypeAlias = Any
"""The containers of a value, with the index of a leaf in place of each tensor: None, an index, a list of structures, {"tuple" |
"dict": ...}, or {"type": name, ...}. It can be written as JSON.
"""

_HAS_GRADIENT, _OVERLAPS, _SAME_AS_FACTOR = 1, 2, 4
"""The factors of the terms of `Leaf.flags`: `has_gradient`, `overlaps`, and `same_as` + 1 (0 if `same_as` is None)."""


@dataclass(frozen=True)
class Leaf:
    """Describes one tensor of a value: its dtype and shape, and flags that may vary between microbatches. has_gradient: whether
    the receiver sends a gradient back. same_as: the index of an earlier leaf with the same tensor, or None; only the earlier
    leaf gets a gradient. overlaps: whether the sender's tensor shares memory with another leaf.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_gradient: bool
    same_as: int | None = None
    overlaps: bool = False

    FLAG_BYTES: ClassVar[int] = 4
    """The number of bytes of a leaf's flags in a message's header."""

    @property
    def num_bytes(self) -> int:
        """Returns the size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def flags(self) -> int:
        """Returns the flags as one number below 2^32."""
        first = 0 if self.same_as is None else self.same_as + 1
        return _SAME_AS_FACTOR * first + _OVERLAPS * self.overlaps + _HAS_GRADIENT * self.has_gradient

    def with_flags(self, flags: int) -> "Leaf":
        """Returns a copy of this leaf with other flags. flags: a number as the property `flags` returns it."""
        first, has_gradient = flags // _SAME_AS_FACTOR, bool(flags & _HAS_GRADIENT)
        same_as = first - 1 if first else None
        return replace(self, has_gradient=has_gradient, same_as=same_as, overlaps=bool(flags & _OVERLAPS))

    def __str__(self) -> str:
        gradient = " with gradient" if self.has_gradient else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{gradient}"


@dataclass(frozen=True)
class Description:
    """Describes a value at a boundary between stages: its leaves in order, and the structure of its containers."""

    leaves: tuple[Leaf, ...]
    structure: Structure

    @property
    def flags(self) -> bytes:
        """Returns the flags of all leaves as little-endian integers of `Leaf.FLAG_BYTES` bytes each."""
        return struct.pack(f"<{len(self.leaves)}I", *(leaf.flags for leaf in self.leaves))

    @property
    def gradients(self) -> "Description":
        """Returns the description, without a structure, of the gradients that the receiver sends back, in leaf order."""
        return Description(tuple(leaf for leaf in self.leaves if leaf.has_gradient), None)

    def with_overlaps(self, tensors: Sequence[Tensor]) -> "Description":
        """Returns this description with `overlaps` set on leaves that share memory. tensors: the sender's tensors, per leaf."""
        spans = {index: _address_range(tensors[index]) for index, leaf in enumerate(self.leaves) if leaf.same_as is None}
        pairs = permutations(spans.items(), 2)
        overlapping = {index for (index, (start, end)), (_, (first, last)) in pairs if start < last and first < end}
        if not overlapping:
            return self
        leaves = [replace(leaf, overlaps=index in overlapping) for index, leaf in enumerate(self.leaves)]
        return replace(self, leaves=tuple(leaves))

    def fits(self, other: "Description") -> bool:
        """Returns whether `other` has the same structure, shapes and dtypes. Ignores flags."""
        kinds, other_kinds = ([(leaf.dtype, leaf.shape) for leaf in description.leaves] for description in (self, other))
        return kinds == other_kinds and self.structure == other.structure

    def with_flags(self, flags: bytes) -> "Description":
        """Returns this description with other flags. flags: bytes as the property `flags` returns them."""
        if flags == self.flags:
            return self
        numbers = struct.unpack(f"<{len(self.leaves)}I", flags)
        return replace(self, leaves=tuple(map(Leaf.with_flags, self.leaves, numbers)))

    def __str__(self) -> str:
        return ", ".join(str(leaf) for leaf in self.leaves) or "no tensor"


def flatten(value: Any, layer: str = "") -> tuple[list[Tensor], Structure]:
    """Returns the tensors of `value` and its structure. Raises RunError `boundary-type` if a part has an unsupported type.
    layer: the name of the layer that returned `value`, for the error; "" if unknown.
    """
    leaves: list[Tensor] = []
    return leaves, _structure(value, leaves, layer)


def unflatten(leaves: Sequence[Tensor], structure: Structure) -> Any:
    """Returns the value that `flatten` split. Raises RunError `boundary-type` if this process has not imported a class."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return leaves[structure]
    if isinstance(structure, list):
        return [unflatten(leaves, item) for item in structure]
    if "tuple" in structure:
        return tuple(unflatten(leaves, item) for item in structure["tuple"])
    if "dict" in structure:
        return {key: unflatten(leaves, item) for key, item in structure["dict"].items()}
    cls = find_type(structure["type"])
    if cls is None:
        message = f"this stage received a {structure['type']} from another stage, but has not imported the class"
        raise RunError("boundary-type", message, hint="import the class in the module of the model's factory")
    parts = [unflatten(leaves, item) for item in structure["parts"]]
    return rebuild_container(cls, structure["context"], parts)


def _address_range(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses at which the first element of `tensor` begins and its last element ends; (0, 0) if it is empty."""
    if not tensor.numel():
        return 0, 0
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (extent + 1) * tensor.element_size()


def _structure(part: Any, leaves: list[Tensor], layer: str) -> Structure:
    """Returns the structure of `part`, and appends its tensors to `leaves`. A recursive closure would be a reference cycle."""
    if part is None:
        return None
    if isinstance(part, Tensor):
        leaves.append(part)
        return len(leaves) - 1
    cls = type(part)
    if cls is tuple:
        return {"tuple": [_structure(item, leaves, layer) for item in part]}
    if cls is list:
        return [_structure(item, leaves, layer) for item in part]
    if cls is dict and all(isinstance(key, str) for key in part):
        return {"dict": {key: _structure(item, leaves, layer) for key, item in part.items()}}
    name, container = f"{cls.__module__}:{cls.__qualname__}", split_container(part)
    if find_type(name) is not cls or container is None:  # a local class cannot be found
        owner = f"the output of the layer {layer!r}" if layer else "a layer's output"
        message = f"{owner} contains a value of type {cls.__qualname__}, which cannot be sent to another stage or returned"
        hint = (
            "return tensors (`torch.tensor(3)` for a number), None, or tuples, lists, dicts with string keys, named tuples and "
            "dataclasses of tensors; define your own classes at module level, not in a function"
        )
        raise RunError("boundary-type", message, hint=hint)
    context, parts = container
    return {"type": name, "context": context, "parts": [_structure(item, leaves, layer) for item in parts]}
