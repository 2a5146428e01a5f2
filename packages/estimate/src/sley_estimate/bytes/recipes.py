"""Remembers what an operation makes of tensors of known shapes: a model's layers do the same again and again.

torch's own cache of fake results makes a thorough key of each call, which takes longer than all else. Here a call is known by
operation, sizes, strides, offsets and types; what it made is new memory, a view of an argument, or an argument itself. Whatever
is more than that is not remembered: results with numbers, arguments that are no fake tensors, changes of a tensor's own shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from sley_estimate.bytes.fake_tensors import FakeTensors

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_aten = torch.ops.aten
_NEVER = {_aten._local_scalar_dense.default, _aten.resize_.default}


class _UnknownError(Exception):
    """The call is of no kind that is remembered."""


class Recipes:
    """Remembers what operations make, in any mode of fake tensors. num_used: how many calls were made again from memory."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self.num_used = 0

    def learn(self, other: Recipes) -> None:
        """Takes over what `other` remembers; where both know a call, as `other` does."""
        self._made |= other._made

    def key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
        """Returns what a call is known by: its operator's name, and sizes, strides, offsets, dtypes and devices of its tensors,
        and its plain arguments. None for a call that is never remembered. It can be pickled.
        """
        name = _name(func)
        if name is None:
            return None
        try:
            named = tuple((name, _key(value)) for name, value in kwargs.items()) if kwargs else ()
            return name, tuple(map(_key, args)), named
        except _UnknownError:
            return None

    def make(
        self, mode: FakeTensors, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Sequence[Tensor], int] | None:
        """Returns None if the call `key` is not remembered; else its result, made anew of fake tensors of `mode`, the tensors
        of it that have memory of their own, which the caller has to count, and the bytes that the operator takes while it runs.

        args, kwargs: of this call; views are of these, and what was returned as given is. Counts in `num_used`.
        """
        made = self._made.get(key)
        if made is None:
            return None
        self.num_used += 1
        given = _tensors(args, kwargs)
        new: list[Tensor] = []
        results = [_result(mode, one, given, new) for one in made[1]]
        return (made[0](results) if made[0] is not None else results[0]), new, made[2]

    def remember(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any], found: Any, scratch: int) -> None:
        """Remembers that the call `key` made `found` of `args` and `kwargs`, unless it cannot be made again.

        Can be: None, and fake tensors without numbers that are an argument, a view of one, or memory of their own; and tuples
        and lists of those. scratch: bytes that the operator took while it ran.
        """
        given = _tensors(args, kwargs)
        kind = type(found) if isinstance(found, tuple | list) else None
        try:
            made = [_recipe(one, given) for one in (found if kind else [found])]
        except _UnknownError:
            return
        places = [one.untyped_storage()._cdata for one in (found if kind else [found]) if isinstance(one, Tensor)]
        news = [place for place, one in zip(places, [one for one in made if one is not None], strict=True) if one[0] == "new"]
        if kind in (None, tuple, list) and len(set(news)) == len(news):
            self._made[key] = kind, made, scratch


@cache
def _name(func: Any) -> str | None:
    """Returns the name of an operator, by which another process knows it too; None for one whose calls are never
    remembered.
    """
    if func in _NEVER or torch.Tag.inplace_view in func.tags or torch.Tag.data_dependent_output in func.tags:
        return None
    name: str = func.name()
    return name


def _result(mode: FakeTensors, made: Any, given: Sequence[FakeTensor], new: list[Tensor]) -> Any:
    """Returns one result as a recipe of `_recipe` says: an argument of `given`, a view of one, or a new tensor of `mode`, which
    is also added to `new`.
    """
    if made is None:
        return None
    kind, what, size, stride, dtype, device = made
    if kind == "same":
        return given[what]
    elem = torch.empty_strided(size if kind == "new" else (0,), stride if kind == "new" else (1,), dtype=dtype, device="meta")
    if kind == "view":
        at, offset = what
        elem.set_(given[at].untyped_storage(), offset, size, stride)
    fake = mode.made(elem, device)
    if kind == "new":
        new.append(fake)
    return fake


def _key(value: Any) -> Hashable:
    """Returns what an argument is known by: shape, strides, offset, dtype and device of a fake tensor, type and value of a
    plain one, and of each in a list or tuple.

    Raises _UnknownError for any other, and for fake tensors that have numbers or are not strided.
    """
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            raise _UnknownError
        special = value.is_conj() or value.is_neg()
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, special
    if kind is list or kind is tuple:
        return kind, tuple(map(_key, value))
    if kind in _PLAIN:
        return kind, value
    raise _UnknownError


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[FakeTensor]:
    """Returns the fake tensors of a call in the order of its arguments, those in lists and tuples included."""
    found: list[FakeTensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, FakeTensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, FakeTensor)]
    return found


def _recipe(found: Any, given: Sequence[FakeTensor]) -> Any:
    """Returns how to make `found` again of arguments like `given`: kind, which argument and offset, sizes, strides, dtype,
    device. Its kind is "same" for an argument itself, "view" for a view of one, "new" for memory of its own. None for None.

    Raises _UnknownError for what is more than memory and a shape.
    """
    if found is None:
        return None
    if type(found) is not FakeTensor or found.constant is not None or found.layout is not torch.strided:
        raise _UnknownError
    if found.is_conj() or found.is_neg() or found.requires_grad:
        raise _UnknownError
    for at, one in enumerate(given):
        if found is one:
            return "same", at, None, None, None, None
    place = found.untyped_storage()._cdata
    size, stride, dtype, device = tuple(found.shape), found.stride(), found.dtype, found.fake_device
    for at, one in enumerate(given):
        if one.untyped_storage()._cdata == place:
            return "view", (at, found.storage_offset()), size, stride, dtype, device
    needed = torch.empty_strided(size, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
    if found.storage_offset() or found.untyped_storage().nbytes() != needed:
        raise _UnknownError
    return "new", None, size, stride, dtype, device
