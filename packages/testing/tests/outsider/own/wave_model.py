"""Defines the model and the data of the plans with waves: `factory = "wave_model:layers"`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataContext, DataInfo, Field

VOCAB, LENGTH, HIDDEN = 12, 5, 4


class Rows:
    """Holds samples that depend on their index; some labels are ignored."""

    info = DataInfo({"tokens": Field("int64", sequence_dim=1), "labels": Field("int64", sequence_dim=1)}, VOCAB, LENGTH)

    def __init__(self, context: DataContext) -> None:
        del context  # both splits are equal

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[: index % LENGTH] = -100
        return {"tokens": tokens[:-1].clone(), "labels": labels}


class Embed(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Block(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden).tanh()


class Head(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


def layers(data: DataInfo, depth: int = 7) -> list[tuple[str, nn.Module]]:
    """Returns layers whose head shares the weight of the embedding, and whose last block shares the bias of the first block."""
    embed, head = Embed(VOCAB, HIDDEN), Head(HIDDEN, VOCAB, bias=False)
    blocks = [Block(HIDDEN, HIDDEN) for _ in range(depth)]
    head.weight = embed.weight
    blocks[-1].bias = blocks[0].bias
    return [("embed", embed), *((f"blocks.{index}", block) for index, block in enumerate(blocks)), ("head", head)]
