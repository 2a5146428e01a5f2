"""A model's tensors: their number formats in a run, their memory as bytes, and what those without values stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor

CHUNK_WORDS = 1 << 20
"""How many words of 8 bytes are hashed at a time: the working memory is a few times that."""

_ODD = 2654435761


def version_of(tensor: Tensor) -> int:
    """Returns the tensor's version counter, which counts writes; 0 for a tensor of torch's inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def sum_of_bits(tensor: Tensor) -> Tensor | None:
    """Returns the `fingerprint` of the tensor, by which a write shows that no version counter counts: one through `.data`, an
    `unsafe_chunk` or a kernel of one's own. None for a tensor that is no plain memory.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    with torch.inference_mode(False), torch.no_grad():
        return fingerprint(tensor.detach())


def fingerprint(value: Tensor) -> Tensor:
    """Returns a hash of the values and their places, int64 [] on the device: equal for equal values, different for almost all
    others. Copies are compared by it without being sent.
    """
    data = value.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].clone().view(torch.int64) if data.data_ptr() % 8 else data[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, words.numel(), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        places = torch.arange(start + 1, start + 1 + chunk.numel(), device=value.device)
        total += ((chunk + 1) * (places * _ODD | 1)).sum()
    rest = data[whole:].to(torch.int64)
    return total + ((rest + 1) * (torch.arange(1, 1 + rest.numel(), device=value.device) * _ODD | 1)).sum()


def is_kept(name: str, keep: Sequence[str]) -> bool:
    """Returns whether the parameter `name` keeps fp32. keep: `[precision] keep`, patterns of names."""
    return any(fnmatchcase(name, pattern) for pattern in keep)


def parameter_format(name: str, dtype: torch.dtype, keep: Sequence[str]) -> torch.dtype:
    """Returns the dtype of a parameter where those that are not kept have `dtype`."""
    return torch.promote_types(dtype, torch.float32) if is_kept(name, keep) else dtype


def buffer_format(buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a buffer: its own, whatever `dtype` the parameters have; but fp64 beside parameters in fp64, where
    the factory gave it fp32.
    """
    return dtype if dtype is torch.float64 and buffer.dtype is torch.float32 else buffer.dtype


def formats_hint(error: BaseException) -> str:
    """Returns what to do about an error of torch's that formats do not meet; "" for any other error."""
    if not isinstance(error, RuntimeError) or not re.search(r"dtype|scalar type", str(error)):
        return ""
    return (
        'under [precision] compute = "bf16" or "fp16" parameters become narrow and buffers keep their format: let the forward '
        "cast what a buffer gives (`self.table.to(h.dtype)`), or name parameters that stay in fp32 in `[precision] keep`"
    )


T = TypeVar("T")

PLAIN: set[type] = {Tensor}
"""The types of plain tensors. While bytes are estimated it includes fake tensors, which stand for plain ones."""

_stands_for: ContextVar[str | None] = ContextVar("_stands_for", default=None)
_counters: list[Callable[[], int]] = []


def is_plain(tensor: object) -> bool:
    """Returns whether `tensor` is a plain tensor: neither a parameter nor of a subclass with behaviour of its own."""
    return type(tensor) in PLAIN


def device_kind(tensor: Tensor) -> str:
    """Returns the type of the device on which a run computes with `tensor`, such as "cpu" or "cuda": its own, or that for which
    it stands.
    """
    return _stands_for.get() or tensor.device.type


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Within the block all tensors of this thread stand for some of a device of this type."""
    before = _stands_for.set(kind)
    try:
        yield
    finally:
        _stands_for.reset(before)


def alike(pieces: Iterable[T]) -> Iterator[T]:
    """Yields `pieces`, each of which runs the same operations on the same shapes; the last may be smaller.

    While bytes are estimated (`counted`), stops once a piece leaves as many bytes in use as the one before: later ones add
    nothing.
    """
    before = None
    for piece in pieces:
        yield piece
        if _counters:
            now = _counters[-1]()
            if now == before:
                return
            before = now


@contextmanager
def counted(in_use: Callable[[], int]) -> Iterator[None]:
    """Returns a context manager in which bytes are estimated, and nothing else is. in_use: returns the number of bytes in
    use.
    """
    _counters.append(in_use)
    try:
        yield
    finally:
        _counters.pop()
