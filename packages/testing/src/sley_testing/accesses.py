"""Tells which memory each operation reads and writes, before it runs: torch's own operations, and what Python does past them.

class Prints(MemoryWatch):
    def saw(self, name, accesses): print(name, accesses)

with Prints().watching(): ...      # forward, backward and optimizer of this thread

The backward of a CPU runs in the thread that calls it, so it is seen too; operations of other threads are not, nor what
C++ or another process does with an address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SHAPE_ONLY = {"resize_", "resize_as_", "set_", "is_same_size", "is_pinned", "record_stream", "_unsafe_view"}
"""Operations that change or ask for shapes alone; the views are found by their schema."""

_READ_BY_HOST = ("numpy", "tolist", "__dlpack__")
"""Methods of a tensor that read its values, or give them away, without an operation."""


@dataclass(frozen=True)
class Access:
    """One tensor of an operation, and whether the operation writes it."""

    tensor: Tensor
    writes: bool


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Returns the memory of `tensor`; None for what has none: meta, sparse, and subclasses that stand for others."""
    if type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__ or tensor.is_meta or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


def extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of the storage that an element of `tensor` needs, and the one after the last; (0, 0) if empty."""
    if tensor.numel() == 0:
        return 0, 0
    if tensor.is_contiguous():
        start = int(tensor.storage_offset()) * tensor.itemsize
        return start, start + tensor.numel() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + last + 1) * tensor.itemsize


def described(tensor: Tensor) -> str:
    """Returns "float32 [2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class MemoryWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Calls `saw` before each operation that reads or writes memory, `made` with the tensors that it then returned, and
    `resizes` before a storage is resized. Subclasses override them; what they raise, the operation's caller gets.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._thread = threading.get_ident()

    def saw(self, name: str, accesses: Sequence[Access]) -> None:
        """Hears what the operation `name` is about to read and write; views and questions about shapes do neither."""

    def made(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Hears what new tensors the operation `name` has filled."""

    def resizes(self, storage: torch.UntypedStorage, num_bytes: int) -> Callable[[], None] | None:
        """Hears that `storage` is about to get `num_bytes`; returns what to call when it has them, or None."""
        return None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context manager in which this thread's operations are seen."""
        with ExitStack() as stack:
            self._thread = threading.get_ident()
            stack.enter_context(self)
            for name in _READ_BY_HOST:
                stack.enter_context(replaced(torch.Tensor, name, self._before_host_reads))
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", self._around_resize))
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # an operation of higher order calls others, which come here too
            return func(*args, **kwargs)
        if func.is_view and func._can_decompose():  # in inference mode: a reshape, say, which may be a view or a copy
            with self:
                return func.decompose(*args, **kwargs)
        self.saw(str(func), list(_accesses(func, args, kwargs)))
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if func.is_view:  # some kinds torch refuses by itself where the memory is not there, without saying which tensor
                self.saw(str(func), [Access(tensor, writes=False) for tensor in _tensors([*args, *kwargs.values()])])
            raise
        returned = func._schema.returns
        parts = [result] if len(returned) == 1 else result or ()
        fresh = [
            tensor for one, part in zip(returned, parts, strict=False) if one.alias_info is None for tensor in _tensors(part)
        ]
        if fresh:
            self.made(str(func), fresh)
        return result

    def _before_host_reads(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `method` of a tensor with a call of `saw` before it, in the watched thread."""

        def told(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.saw(f"Tensor.{name}", [Access(tensor, writes=False)])
            return method(tensor, *args, **kwargs)

        return told

    def _around_resize(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `method` of a storage with a call of `resizes` before it, and of what that returns after it."""

        def told(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            ours = threading.get_ident() == self._thread
            then = self.resizes(storage, num_bytes) if ours else None
            result = method(storage, num_bytes)
            if then is not None:
                then()
            return result

        return told


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a method that torch does not dispatch, where all of Python looks it up."""
    is_own = name in vars(owner)
    method = getattr(owner, name)
    setattr(owner, name, wrap(name, method))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)


def _accesses(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Access]:
    """Yields the tensors of a call, lists' ones too, whose memory it reads or writes."""
    names, written = _arguments(func)
    if written is None:
        return
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        for tensor in _tensors(value):
            yield Access(tensor, name in written)


@cache
def _arguments(func: Any) -> tuple[list[str], set[str] | None]:
    """Returns the names of an operation's arguments and of those that it writes; None if it touches no memory at all."""
    names = [argument.name for argument in func._schema.arguments]
    operation = func._schema.name.partition("::")[2]
    written = {one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write}
    if func.namespace == "c10d":  # their schemas do not say
        written = {name for name in names if name.startswith("output") or (name == "tensors" and operation != "send")}
    if func.is_view or operation in _SHAPE_ONLY or operation.endswith("_like") or operation.startswith("new_"):
        return names, None
    return names, written


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
