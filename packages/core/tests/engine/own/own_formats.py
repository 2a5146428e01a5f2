"""A model with tensors of several formats: a router in fp32, tables and quantized weights as buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo

FORMATS = {"table": torch.float32, "narrow": torch.float16, "quantized": torch.float8_e4m3fn, "counts": torch.int8}


class Embed(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Routed(nn.Module):
    def __init__(self, hidden: int, casts: bool) -> None:
        super().__init__()
        self.casts = casts
        self.router = nn.Linear(hidden, hidden)
        self.inner = nn.Linear(hidden, hidden)
        for name, dtype in FORMATS.items():
            self.register_buffer(name, torch.linspace(-1, 1, hidden).to(dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        assert {name: getattr(self, name).dtype for name in FORMATS} == FORMATS
        weights = self.router(hidden.float()).softmax(-1)
        table = self.table.to(hidden.dtype) if self.casts else self.table
        made: Tensor = hidden + self.inner(hidden + table) * weights.to(hidden.dtype)
        return made


def layers(data: DataInfo, casts: bool = True) -> list[tuple[str, nn.Module]]:
    assert data.vocab_size is not None
    blocks = [(f"blocks.{at}", Routed(8, casts)) for at in range(2)]
    return [("embed", Embed(data.vocab_size, 8)), *blocks, ("head", nn.Linear(8, data.vocab_size))]
