"""Replaces conversions and constructors, for parameters that are on meta, by what plain PyTorch would return.

torch's C++ code, which is not recorded, checks a tensor's real device. In plain PyTorch `.cpu()` of a host parameter is that
parameter, not a copy, and a write to it writes the parameter; `w.new_tensor([1.0])` has values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_leaves, tree_map_only

from sley_core.model.journal import HOST, Journal, unwatched

CONVERTS = {"to", "cpu", "cuda", "type", "type_as"}
MAKES = {torch.tensor, torch.as_tensor, torch.asarray}
_UNSAID: Any = object()
_PARTS = (slice, type(...), type(None), Tensor, Sequence)  # a list with one of these is an index of several dims


class Conversions:
    """Replaces torch functions on the tensors of a journal, with the results of plain PyTorch."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def convert(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `tensor.to(...)` and the like; returns `tensor` itself if plain PyTorch would."""
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if all(self._shown(one) == one.device for one in given):
            return func(*args, **kwargs)
        if func.__name__ == "type" and len(args) + len(kwargs) == 1:
            return torch.empty(0, dtype=args[0].dtype, device=self._shown(args[0])).type()
        return self._to(args[0], **self._asked(func.__name__, args[0], list(args[1:]), dict(kwargs)))

    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `torch.tensor(data, ...)`, `as_tensor` and `asarray`, also for data with tensors on meta."""
        kwargs = dict(kwargs)
        data = args[0] if args else kwargs.pop("obj" if func is torch.asarray else "data", _UNSAID)
        if isinstance(data, Tensor) and self._shown(data) != data.device:
            dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
            device = args[2] if len(args) > 2 else kwargs.get("device")
            copy = func is torch.tensor or bool(kwargs.get("copy"))
            if func is not torch.as_tensor:
                data = data.detach()
            made = self._to(data, device=device, dtype=dtype, copy=copy)
            return made.requires_grad_() if kwargs.get("requires_grad") else made
        if data is _UNSAID or not isinstance(data, list | tuple):
            return func(*args, **kwargs) if data is _UNSAID else func(data, *args[1:], **kwargs)
        try:
            return func(data, *args[1:], **kwargs)
        except RuntimeError:
            if not any(isinstance(one, Tensor) and self._shown(one) != one.device for one in tree_leaves(data)):
                raise
        return func(tree_map_only(Tensor, self._value, data), *args[1:], **kwargs)

    def new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `tensor.new_tensor(data)` and `tensor.new(data)`, with the dtype and shown device of `tensor`."""
        kwargs, like, rest = dict(kwargs), args[0], args[1:]
        data = rest[0] if rest else kwargs.pop("data", _UNSAID)
        has_data = func.__name__ == "new_tensor" or (
            (isinstance(data, Sequence) and not isinstance(data, torch.Size)) or hasattr(data, "__array_interface__")
        )
        given = [one for one in tree_leaves((like, data)) if isinstance(one, Tensor)]
        if not has_data or all(self._shown(one) == one.device for one in given):
            return func(*args, **kwargs) if rest or data is _UNSAID else func(like, data, **kwargs)
        dtype, device = kwargs.pop("dtype", None), kwargs.pop("device", None)
        kwargs |= {"dtype": dtype or like.dtype, "device": self._shown(like) if device is None else device}
        return self.make(torch.tensor, (data,), kwargs)

    def index(self, given: Any) -> Any:
        """Returns an index with lists and arrays as host tensors, which torch would make on the indexed tensor's device."""
        if isinstance(given, tuple):
            return tuple(map(self._index_of_one_dim, given))
        if isinstance(given, list) and any(isinstance(one, _PARTS) for one in given):
            return list(map(self._index_of_one_dim, given))
        return self._index_of_one_dim(given)

    def _index_of_one_dim(self, given: Any) -> Any:
        """Returns a list or array as a host tensor, bool, uint8 or int64; any other index unchanged."""
        is_array = hasattr(given, "__array_interface__") and given.ndim > 0
        if isinstance(given, Tensor | str) or not (is_array or isinstance(given, Sequence)):
            return given
        found = self.make(torch.tensor, (list(given) if isinstance(given, Sequence) else given,), {"device": HOST})
        return found if found.dtype in (torch.bool, torch.uint8) else found.long()

    def _asked(self, name: str, tensor: Tensor, rest: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a conversion by the names of `_to`'s parameters."""
        if name == "cpu":
            return {"device": "cpu", **kwargs, **dict(zip(["memory_format"], rest, strict=False))}
        if name == "cuda":
            kwargs |= dict(zip(["device", "non_blocking", "memory_format"], rest, strict=False))
            if kwargs.get("device") is None:
                kwargs["device"] = torch.cuda.current_device()
            return kwargs
        if name == "type":
            kind = rest.pop(0) if rest else kwargs.pop("dtype")
            kwargs |= dict(zip(["non_blocking"], rest, strict=False))
            if isinstance(kind, torch.dtype):
                return kwargs | {"dtype": kind}
            with unwatched():
                sample = torch.empty(0).type(kind)
            return kwargs | {"dtype": sample.dtype, "device": sample.device}
        other = rest[0] if rest and isinstance(rest[0], Tensor) else kwargs.pop("other", None)
        if other is not None:
            kwargs |= {"device": self._shown(other), "dtype": other.dtype}
            names = ["non_blocking", "copy"]
            rest = rest[1:] if rest and rest[0] is other else rest
        elif rest and isinstance(rest[0], torch.dtype):
            names = ["dtype", "non_blocking", "copy"]
        else:
            names = ["device", "dtype", "non_blocking", "copy"]
        return kwargs | dict(zip(names, rest, strict=False))

    def _to(
        self,
        tensor: Tensor,
        device: Any = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        """Converts as `Tensor.to`, judging by the shown device whether a copy is needed."""
        shown, dtype = self._shown(tensor), dtype or tensor.dtype
        place = shown if device is None else torch.device(device)
        is_there = place.type == shown.type and place.index in (None, shown.index or 0)
        layout = memory_format or torch.preserve_format
        is_laid_out = layout is torch.preserve_format or layout is suggest_memory_format(tensor)  # as torch decides it
        if is_there and dtype == tensor.dtype and is_laid_out and not copy:
            return tensor
        return tensor.to(place, dtype, non_blocking=non_blocking, copy=copy, memory_format=layout)

    def _value(self, tensor: Tensor) -> Tensor:
        """Returns the tensor with values: a recorded copy if it is on meta for the run alone, else the tensor itself."""
        if self._shown(tensor) == tensor.device:
            return tensor
        with self.journal.lock, unwatched():
            return self.journal.realised(tensor.detach())

    def _shown(self, tensor: Tensor) -> torch.device:
        """Returns the device on which plain PyTorch would have the tensor."""
        if not tensor.is_meta:
            return tensor.device
        with self.journal.lock, unwatched():
            return self.journal.shown(tensor)
