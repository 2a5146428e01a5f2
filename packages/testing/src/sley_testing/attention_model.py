"""Makes the model, data and plan with which `attention_contract` tries a sequence attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field
from sley_core.model.attention import Attention
from sley_testing.contract_model import Samples, contract_plan

VOCABULARY, LENGTH, HEADS, KV_HEADS, WIDTH = 13, 8, 4, 2, 3


class Data(Samples):
    """Rows of two documents, the second of which begins at another place in each row."""

    info = DataInfo(
        {
            "tokens": Field("int64", 0, 1, "token"),
            "labels": Field("int64", 0, 1, "label"),
            "positions": Field("int64", 0, 1),
            "cu_seqlens": Field("int32", 0, None),
        },
        vocab_size=VOCABULARY,
        sequence=LENGTH,
    )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=self.generator(index))
        bound = 1 + index % (LENGTH - 1)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "positions": torch.cat([torch.arange(bound), torch.arange(LENGTH - bound)]),
            "cu_seqlens": torch.tensor([0, bound, LENGTH], dtype=torch.int32),
        }


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HEADS * WIDTH)
        self.places = nn.Embedding(LENGTH, HEADS * WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.tokens(tokens) + self.places(positions)
        return hidden


class Block(nn.Module):
    """Attention with two query heads to a key head, and dropout behind it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HEADS * WIDTH)
        self.q = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.kv = nn.Linear(HEADS * WIDTH, 2 * KV_HEADS * WIDTH)
        self.attention = Attention()
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        own = self.norm(hidden)
        q = self.q(own).unflatten(-1, (HEADS, WIDTH))
        k, v = self.kv(own).unflatten(-1, (2, KV_HEADS, WIDTH)).unbind(2)
        context = self.attention(q, k, v, cu_seqlens=cu_seqlens)
        output: Tensor = hidden + self.dropout(self.out(context.flatten(-2)))
        return output


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HEADS * WIDTH, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(hidden)
        return logits


def layers(dropout: float = 0.0) -> list[tuple[str, nn.Module]]:
    """Returns the layers of the contract's model, by name."""
    return [("embed", Embed()), ("first", Block(dropout)), ("second", Block(dropout)), ("head", Head())]


def tables(sequence: dict[str, Any] | None, dropout: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Returns the contract's plan, as tables, whose sequences two ranks share by the attention `sequence`;
    None has them whole.
    """
    found = contract_plan(
        __name__,
        model={"factory": f"{__name__}:layers", "options": {"dropout": dropout}},
        batch={"global_size": 4, "micro_size": 2},
        optimizer={"use": "core.sgd", "lr": 0.1},
        evaluation={"every": 99, "steps": 2},
    )
    return found | ({"parallel": {"sp": 2, "dp": 1}, "sequence": sequence} if sequence else {}) | changes
