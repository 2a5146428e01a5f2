"""Shards in e4m3 numbers, for all-gathers of fewer bytes.

    shard, in blocks of 128 elements  ──>  row of bytes  | codes, one byte per element | fp32 scales, one per block |

A scale is a power of two, so the only error is that of rounding to e4m3, which has 3 bits of mantissa: at most 2^-4 of an
element. Elements below 2^-14 of the largest of their block are subnormal, with an error of at most 2^-18 of the largest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
SCALE_BYTES = 4
MAX_CODE = 448.0
"""The largest number of e4m3."""


def encode(shard: Tensor) -> Tensor:
    """Returns the bytes of `shard`, uint8 [132 x blocks]. A block with NaN or infinity becomes NaN."""
    blocks = F.pad(shard.reshape(-1).float(), (0, -shard.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    exponents = torch.frexp(largest / MAX_CODE).exponent.clamp(-126, 127)
    scales = torch.ldexp(torch.ones_like(largest), exponents) + (largest - largest)  # NaN unless all elements are finite
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    return torch.cat([codes.view(torch.uint8).view(-1), scales.view(torch.uint8).view(-1)])


def decode(rows: Tensor, full: Tensor) -> None:
    """Writes the shards of several ranks into the full parameter.

    rows: the bytes of each rank's shard, uint8 [size, 132 x blocks]. full: [size x n, ...], contiguous.
    """
    if not full.numel():
        return
    size, num_blocks = len(rows), rows.shape[1] // (BLOCK + SCALE_BYTES)
    codes = rows[:, : num_blocks * BLOCK].view(torch.float8_e4m3fn).float().reshape(size, num_blocks, BLOCK)
    scales = rows[:, num_blocks * BLOCK :].view(torch.float32).unsqueeze(-1)
    full.view(size, -1).copy_((codes * scales).view(size, -1)[:, : full.numel() // size])
