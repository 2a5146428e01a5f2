"""Norms of many gradients, as accurate as one over few elements.

On a CPU torch adds the squares of a tensor one after the other in the tensor's own type: over ten million fp32 elements the
norm is off by 4e-4 (measured), and by how much depends on how gradients lie in buffers, which the layout decides. Along rows of
a matrix it adds in vectors, so a long tensor is taken as rows, whose norms are joined in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 1024
LONG = 4 * ROW
"""Elements of a tensor that is taken as rows. Of 16,384, few of them large as those of an embedding are, the error without rows
was 1.2e-6 (measured)."""


def joined_norm(tensors: Sequence[Tensor], kind: float) -> Tensor:
    """Returns the norm of everything in `tensors`, which have one device and type: a float64 scalar. kind: p; may be inf."""
    least = LONG if kind == 2 else ROW  # other powers lose more
    norms, short = [], []
    for one in tensors:
        if one.device.type != "cpu" or one.numel() < least:
            short.append(one)
        else:
            norms += _norms_of_rows(one, kind)
    if short:
        # As torch.nn.utils.get_total_norm, which would first sort the tensors by device and dtype: here they have one.
        norms.append(torch.stack(torch._foreach_norm(short, kind)))
    joined: Tensor = torch.linalg.vector_norm(torch.cat(norms), kind, dtype=torch.float64)
    return joined


def _norms_of_rows(long: Tensor, kind: float) -> list[Tensor]:
    """Returns the norms of the rows of `long`, and of what is left over."""
    left = long.numel() % ROW
    if not left:  # most weights: a call of torch costs as much as the norm of a small one
        return [torch.linalg.vector_norm(long.reshape(-1, ROW), kind, dim=1)]
    flat = long.reshape(-1)
    rows = torch.linalg.vector_norm(flat[:-left].view(-1, ROW), kind, dim=1)
    return [rows, torch.linalg.vector_norm(flat[-left:], kind).reshape(1)]
