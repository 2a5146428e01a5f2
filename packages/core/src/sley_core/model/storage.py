"""Accesses memory as bytes, and detects cheaply whether it was written."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

SMALL_BYTES = 2**16
"""Memory from outside is copied up to this size; larger memory is held by reference and compared again when it is used."""

_SAMPLES = 16


def looks(storage: torch.UntypedStorage) -> Tensor:
    """Returns a fingerprint of `storage`: if it differs later, the memory was written.

    All bytes if it is small; a checksum of memory that is not torch's own (numpy's, which unseen code may write); a few
    bytes spread over anything else, mapped files too, so that some writes go unnoticed.
    """
    every = bytes_of(storage)
    if storage.nbytes() <= SMALL_BYTES:
        return every.cpu().clone()
    if storage.device.type == "cpu" and storage.filename is None and not storage.resizable():
        return torch.tensor([zlib.crc32(every.numpy().data)])
    places = torch.linspace(0, storage.nbytes() - 1, _SAMPLES, dtype=torch.float64).long()
    return every[places.to(storage.device)].cpu()


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns a uint8 view of all of `storage`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def blank(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """Fills all of `storage` with NaN if `dtype` has NaN, else with zero."""
    every = bytes_of(storage)
    if (dtype.is_floating_point or dtype.is_complex) and every.numel() % dtype.itemsize == 0:
        every.view(dtype).fill_(torch.nan)
    else:
        every.zero_()
