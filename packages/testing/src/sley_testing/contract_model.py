"""The data and the model of the contracts of weights and of sequences: odd sizes, ties, documents, and a place to fail."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field
from sley_core.model.attention import Attention
from sley_testing.contract import SQUARES, Samples, Uneven, contract_plan

VOCABULARY, WIDTH, LENGTH = 11, 6, 8
"""Neither of the first two divides by 4, nor VOCABULARY by 2: shards of weights are padded."""

HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 3


class Data(Samples):
    """Rows of two documents, whose border moves from row to row; and what the model should say of each token."""

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


class Fragile(nn.Module):
    """Hands on what it is given, and raises where it is asked to."""

    breaks_in: ClassVar[Literal["forward", "backward"] | None] = None

    def forward(self, hidden: Tensor) -> Tensor:
        if Fragile.breaks_in == "forward" and hidden.requires_grad:
            _break()
        if Fragile.breaks_in == "backward" and hidden.requires_grad:
            hidden.register_hook(_break)  # type: ignore[no-untyped-call]  # torch's
        return hidden


def _break(*_: Tensor) -> None:
    raise ValueError("the contract's failing step")


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Any:
        return self.table(tokens) + self.places(positions)


class Block(Uneven):
    """Attention with two query heads to a key head, dropout, `Uneven`, two linears and a place to fail between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__(WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_WIDTH)
        self.attention = Attention()
        self.out = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.wide = nn.Linear(WIDTH, 9, bias=False)
        self.fragile = Fragile()
        self.narrow = nn.Linear(9, WIDTH)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Any:  # type: ignore[override]  # documents, besides
        own = self.norm(hidden)
        q = self.q(own).unflatten(-1, (HEADS, HEAD_WIDTH))
        k, v = self.kv(own).unflatten(-1, (2, KV_HEADS, HEAD_WIDTH)).unbind(2)
        context = self.attention(q, k, v, cu_seqlens=cu_seqlens)
        hidden = hidden + self.dropout(self.out(context.flatten(-2)))
        own = super().forward(own).tanh()
        return hidden + self.narrow(self.fragile(self.wide(own)).tanh())


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Any:
        return self.out(self.norm(hidden))


def layers(dropout: float = 0.0) -> list[tuple[str, nn.Module]]:
    """Returns the layers, by name; the first and the last share their weight."""
    embed, head = Embed(), Head()
    head.out.weight = embed.table.weight
    return [("embed", embed), ("first", Block(dropout)), ("second", Block(dropout)), ("head", head)]


def model_plan(dropout: float = 0.0, **tables: Any) -> dict[str, Any]:
    """Returns the plan of one process that trains this model, with these tables."""
    model = {"factory": f"{__name__}:layers", "options": {"dropout": dropout}}
    return contract_plan(__name__, model=model, loss=SQUARES, evaluation={"every": 99, "steps": 2}, **tables)
