"""Defines the dataset and the model of the contracts for weight communicators and sequence attentions.

The model has tied weights and odd sizes. Each row consists of two documents.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field
from sley_core.model.attention import Attention
from sley_testing.contract import SQUARES, Samples, UnevenBlock, contract_plan

VOCABULARY, WIDTH, LENGTH = 11, 6, 8
"""The sizes of the model. VOCABULARY is not divisible by 2 and WIDTH not by 4, so that weight shards are padded."""

HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 3


class Data(Samples):
    """Provides rows of two documents, whose boundary depends on the index. The targets `y` are [LENGTH, VOCABULARY]."""

    info = DataInfo(
        {
            "tokens": Field("int64", 0, 1, "token"),
            "y": Field("float64", 0, 1),
            "positions": Field("int64", 0, 1),
            "cu_seqlens": Field("int32", 0, None),
        },
        vocab_size=VOCABULARY,
        sequence=LENGTH,
    )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = self.generator(index)
        bound = 1 + index % (LENGTH - 1)
        return {
            "tokens": torch.randint(VOCABULARY, (LENGTH,), generator=generator),
            "y": torch.randn(LENGTH, VOCABULARY, generator=generator, dtype=torch.float64),
            "positions": torch.cat([torch.arange(bound), torch.arange(LENGTH - bound)]),
            "cu_seqlens": torch.tensor([0, bound, LENGTH], dtype=torch.int32),
        }


class Embed(nn.Module):
    """Sums the embeddings of tokens and positions, both int64 [b, s]. Returns [b, s, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Any:
        return self.table(tokens) + self.positions(positions)


class Block(UnevenBlock):
    """Combines a norm, attention with two query heads per key head, dropout, `UnevenBlock`, and two linears."""

    def __init__(self, dropout: float) -> None:
        super().__init__(WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_WIDTH)
        self.attention = Attention()
        self.out = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.wide = nn.Linear(WIDTH, 9, bias=False)
        self.narrow = nn.Linear(9, WIDTH)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Any:  # type: ignore[override]  # also takes document bounds
        normed = self.norm(hidden)
        q = self.q(normed).unflatten(-1, (HEADS, HEAD_WIDTH))
        k, v = self.kv(normed).unflatten(-1, (2, KV_HEADS, HEAD_WIDTH)).unbind(2)
        context = self.attention(q, k, v, cu_seqlens=cu_seqlens)
        hidden = hidden + self.dropout(self.out(context.flatten(-2)))
        normed = super().forward(normed).tanh()
        return hidden + self.narrow(self.wide(normed).tanh())


class Head(nn.Module):
    """Applies a norm and a linear. Returns logits [b, s, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Any:
        return self.out(self.norm(hidden))


def layers(dropout: float = 0.0) -> list[tuple[str, nn.Module]]:
    """Returns the layers by name. The embedding of the tokens and the head share their weight."""
    embed, head = Embed(), Head()
    head.out.weight = embed.table.weight
    return [("embed", embed), ("first", Block(dropout)), ("second", Block(dropout)), ("head", head)]


def model_plan(dropout: float = 0.0, **tables: Any) -> dict[str, Any]:
    """Returns a one-process plan that trains this model, extended by `tables`."""
    model = {"factory": f"{__name__}:layers", "options": {"dropout": dropout}}
    return contract_plan(__name__, model=model, loss=SQUARES, evaluation={"every": 99, "steps": 2}, **tables)
