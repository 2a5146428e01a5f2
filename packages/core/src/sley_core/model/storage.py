"""Memory as bytes, and how to see cheaply that somebody wrote to it."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

SMALL_BYTES = 2**16
"""What comes from outside is copied up to this size, and above it held by reference and looked at again when it is used."""

_SAMPLES = 16


def looks(storage: torch.UntypedStorage) -> Tensor:
    """Of `storage`, so that another one means that it was written: its bytes if it is small, a checksum of memory that is not
    torch's own (numpy's, to which code may write unseen), and of the rest, mapped files too, a few bytes spread over it."""
    every = bytes_of(storage)
    if storage.nbytes() <= SMALL_BYTES:
        return every.cpu().clone()
    if storage.device.type == "cpu" and storage.filename is None and not storage.resizable():
        return torch.tensor([zlib.crc32(every.numpy().data)])
    places = torch.linspace(0, storage.nbytes() - 1, _SAMPLES, dtype=torch.float64).long()
    return every[places.to(storage.device)].cpu()


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of `storage`, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def blank(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Makes all of `storage` NaN where `dtype` has such a number, else zero."""
    every = bytes_of(storage)
    if (dtype.is_floating_point or dtype.is_complex) and every.numel() % dtype.itemsize == 0:
        every.view(dtype).fill_(torch.nan)
    else:
        every.zero_()
