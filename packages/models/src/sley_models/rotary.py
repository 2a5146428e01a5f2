"""Rotary positions (Su et al. 2021) in Hugging Face's pairing, optionally with Llama 3's frequencies for longer contexts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sley_core.api.model import once_per_field

if TYPE_CHECKING:
    from sley_models.config import RopeScaling


class Rotary(nn.Module):
    """Rotates pairs of channels by an angle that grows with the position.

    Channel i of the first half is rotated with channel i of the second by position / theta^(2 i / head_dim), or as
    `scaling` changes these frequencies.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        # On the host, since blocks are made on meta.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / theta**exponents
        self.key = head_dim, theta, scaling
        self.register_buffer("frequencies", frequencies if scaling is None else scaled(frequencies, scaling), persistent=False)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns q and k, rotated, in their shapes and dtypes.

        q, k: [b, s, heads, d]. positions: [b, s] integers; None counts each row from 0.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        if positions is None:
            cos, sin = self._tables(torch.arange(q.shape[1], device=q.device, dtype=dtype)[None], dtype)
        else:
            fixed = positions  # the tables are shared by all blocks of a forward
            cos, sin = once_per_field(fixed, ("rotary", dtype, *self.key), lambda: self._tables(fixed, dtype))
        return _turned(q, cos, sin), _turned(k, cos, sin)

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, the sines of the first half negative: [b, s, 1, d] of `dtype`, which is fp32, or
        fp64 for a model in fp64.
        """
        angles = (positions[:, :, None].to(dtype) * self.frequencies.to(dtype))[:, :, None]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Returns the frequencies of Llama 3.1: slow ones divided by `factor`, fast ones unchanged, those between interpolated.

    Slow and fast refers to how often a channel turns within the context on which the model was first trained.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [b, s, heads, d], rotated: all channels at once, with two thirds of the kernels that halves take. A small
    model is as slow as the host that starts its kernels.
    """
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)
