"""Models with tables of five columns: one read twice, one of positions, one with padding; and tables that others hold."""

from __future__ import annotations

import torch
from isp_parts import VOCABULARY, WIDTH
from torch import Tensor, nn

COLUMNS = 5
"""Over two ranks three and two."""


class Tables(nn.Module):
    """Tokens, the tokens before them by the same table, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, COLUMNS, padding_idx=3)
        self.positions = nn.Embedding(9, COLUMNS)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + 0.5 * self.tokens(tokens.roll(1, 1)).tanh() + self.positions(positions)


class Again(nn.Module):
    """Reads the first layer's table of tokens once more, in an embedding of its own, with gradients of its input."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.up = nn.Linear(COLUMNS, COLUMNS)
        self.table = nn.Embedding(VOCABULARY, COLUMNS)
        self.table.weight = table.weight

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.up(hidden).tanh() + self.table(tokens)


class Limited(nn.Module):
    """A table that its forward writes: it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def layers(frozen: str = "") -> list[tuple[str, nn.Module]]:
    """The layers named in `frozen` are not trained."""
    tables = Tables()
    found: list[tuple[str, nn.Module]] = [
        ("embed", tables),
        ("again", Again(tables.tokens)),
        ("norm", nn.LayerNorm(COLUMNS)),
        ("head", nn.Linear(COLUMNS, WIDTH)),
    ]
    for name, module in found:
        if name == frozen:
            module.requires_grad_(False)
    return found


def limited() -> list[tuple[str, nn.Module]]:
    return [("embed", Limited()), ("head", nn.Linear(WIDTH, WIDTH))]


class Read(nn.Module):
    """Reads its table without the embedding that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) + self.table.weight.sum()


def read() -> list[tuple[str, nn.Module]]:
    return [("embed", Read()), ("head", nn.Linear(WIDTH, WIDTH))]
