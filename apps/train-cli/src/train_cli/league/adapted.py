"""A frozen model with low-rank adapters: `factory = "train_cli.league.adapted:layers"`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo

_WIDTH, _RANK = 16, 3


class Embed(nn.Embedding):
    """Looks tokens up: [b, s] int64 -> [b, s, width]."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Adapted(nn.Module):
    """Adds to a frozen linear the product of two small ones that are trained; the second begins as zeros."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(inputs, _RANK, bias=False)
        self.up = nn.Linear(_RANK, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        adapted: Tensor = self.base(hidden) + self.up(self.down(self.drop(hidden)))
        return adapted


class AdaptedBlock(nn.Module):
    """Adds to its input two adapted linears with an activation between them: [b, s, width] -> [b, s, width]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH).requires_grad_(False)
        self.wide = Adapted(_WIDTH, 2 * _WIDTH, dropout)
        self.narrow = Adapted(2 * _WIDTH, _WIDTH, dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.narrow(F.silu(self.wide(self.norm(hidden))))
        return out


def layers(data: DataInfo, dropout: float = 0.0, trained: Sequence[int] = (0, 1, 2, 3)) -> list[tuple[str, nn.Module]]:
    """Returns an embedding, four blocks and a head, of which the adapters alone are trained, in the blocks `trained`."""
    assert data.vocab_size is not None, data
    embed = Embed(data.vocab_size, _WIDTH).requires_grad_(False)
    head = nn.Linear(_WIDTH, data.vocab_size, bias=False).requires_grad_(False)
    blocks = [AdaptedBlock(dropout) for _ in range(4)]
    for at, block in enumerate(blocks):
        if at not in trained:
            block.requires_grad_(False)
    return [("embed", embed), *((f"blocks.{at}", block) for at, block in enumerate(blocks)), ("head", head)]
