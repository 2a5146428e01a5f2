"""Detects cheaply whether a tensor was written."""

from __future__ import annotations

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
