"""Memory as bytes, and how to see cheaply that somebody wrote to it."""

from __future__ import annotations

import torch
from torch import Tensor

SMALL_BYTES = 2**16
"""What comes from outside is copied up to this size, and above it held by reference and looked at again when it is used."""

_SAMPLES = 16


def looks(storage: torch.UntypedStorage) -> Tensor:
    """A few bytes of `storage`, spread over it, or all of them if it is small: other bytes mean that it was written."""
    every = bytes_of(storage)
    if storage.nbytes() <= SMALL_BYTES:
        return every.cpu().clone()
    places = torch.linspace(0, storage.nbytes() - 1, _SAMPLES, dtype=torch.float64).long()
    return every[places.to(storage.device)].cpu()


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of `storage`, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
