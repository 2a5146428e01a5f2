"""Digests of samples, by which a resumed run finds out that its data are not those of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor


def digest_of(samples: Iterable[Any]) -> str:
    """Returns a digest of names, dtypes, shapes and values of the tensors in samples."""
    digest = SamplesDigest()
    for sample in samples:
        digest.add(sample)
    return digest.text


class SamplesDigest:
    """Computes a digest of samples as they come."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, value: Any) -> None:
        """Adds a sample, or a value in it; of what is neither tensor, number nor text only the type counts."""
        if isinstance(value, Mapping):
            for key in sorted(value, key=str):
                self._hash.update(f"{key}=".encode())
                self.add(value[key])
        elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            self._hash.update(f"{value.dtype}{tuple(value.shape)}".encode())
            self._hash.update(byte_view(value))
        else:
            is_plain = isinstance(value, int | float | str | bytes)
            self._hash.update((repr(value) if is_plain else type(value).__qualname__).encode())

    @property
    def text(self) -> str:
        """The digest of what was added."""
        return self._hash.hexdigest()


def byte_view(value: Tensor) -> memoryview:
    """Returns the bytes of a tensor of any dtype and device in order; on the CPU, if it is contiguous, without a copy."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def probe(count: int, read: Callable[[int], Any]) -> str | None:
    """Returns a digest of the number of samples and of three of them, which are read twice; None if the second read gives
    others, or if one cannot be read: the run reports that when it comes there. read: returns a sample by its index.
    """
    try:
        places = (0, count // 2, count - 1)
        first, second = (digest_of(map(read, places)) for _ in range(2))
    except Exception:
        return None
    return f"{count}:{first}" if first == second else None
