"""Small models of one's own, each with one peculiarity that an engine must bear or refuse."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_core.model.layers import Model

Named = list[tuple[str, nn.Module]]


class Embed(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Block(nn.Module):
    """A residual block; with `dropout` every use of it draws a mask."""

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.inner = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(F.gelu(self.inner(self.norm(hidden))))


class Head(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


def _around(blocks: list[nn.Module], data: DataInfo, hidden: int) -> Named:
    assert data.vocab_size is not None
    named = [(f"blocks.{at}", block) for at, block in enumerate(blocks)]
    return [("embed", Embed(data.vocab_size, hidden)), *named, ("head", Head(hidden, data.vocab_size))]


def plain(data: DataInfo, hidden: int = 8, num_blocks: int = 4, dropout: float = 0.0) -> Named:
    """Nothing peculiar, or dropout in every block."""
    return _around([Block(hidden, dropout) for _ in range(num_blocks)], data, hidden)


def pretrained(data: DataInfo, dropout: float) -> Named:
    """In evaluation mode, as `from_pretrained` leaves it."""
    return [(name, module.eval()) for name, module in plain(data, dropout=dropout)]


def compiled(data: DataInfo) -> Named:
    """The same, each block wrapped by torch.compile, whose forward takes anything."""
    return _around([torch.compile(Block(8, 0.0), backend="eager") for _ in range(2)], data, 8)


class Keeper(nn.Module):
    """Gives out the mask that its dropout drew: ones scaled by 1 / (1 - p), or zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        mask = self.dropout(torch.ones_like(hidden))
        self.masks.append(mask.detach().clone())
        return hidden * mask


def keeper(data: DataInfo, hidden: int = 8) -> Named:
    """Two layers that remember their masks."""
    return _around([Keeper(), Keeper()], data, hidden)


class Normalised(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


def batch_norm(data: DataInfo, hidden: int = 8, declared: bool = False) -> Model:
    """A running mean, which training writes."""
    patterns = ("*.running_mean", "*.running_var", "*.num_batches_tracked") if declared else ()
    return Model(_around([Normalised(hidden)], data, hidden), per_rank_buffers=patterns)


class Branch(nn.Module):
    """Uses `even` where the first token of the micro-batch is even, `odd` where it is odd, and `never` not at all."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.even = nn.Linear(hidden, hidden)
        self.odd = nn.Linear(hidden, hidden)
        self.never = nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden + (self.odd if int(tokens[0, 0]) % 2 else self.even)(hidden).tanh()


def branches(data: DataInfo, hidden: int = 8) -> Named:
    """Which parameters have a gradient depends on the micro-batch."""
    return _around([Branch(hidden)], data, hidden)


class Poisoned(nn.Module):
    """Divides zero by zero where a row starts with `token`."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        bad = (tokens[:, :1, None] == self.token).to(hidden.dtype)
        return hidden + bad * 0 / (1 - bad)


def poisoned(data: DataInfo, token: int, hidden: int = 8) -> Named:
    """The loss of a sample that starts with `token` is NaN."""
    return _around([Block(hidden), Poisoned(token)], data, hidden)


def sparse(data: DataInfo, hidden: int = 8) -> Named:
    """An embedding whose gradient holds the rows that were used, and no others."""
    layers = plain(data, hidden)
    layers[0][1].sparse = True
    return layers


class Pair(NamedTuple):
    logits: Tensor
    negative: Tensor


class Giving(nn.Linear):
    """Gives out its logits in a container, with more of another kind."""

    def __init__(self, hidden: int, classes: int, what: str) -> None:
        super().__init__(hidden, classes)
        self.what = what

    def forward(self, hidden: Tensor) -> object:
        logits = super().forward(hidden)
        if self.what == "number":
            return logits, 3
        if self.what == "scalar":
            return logits, logits.mean()
        return Pair(logits, -logits) if self.what == "named" else [logits, -logits]


def giving(data: DataInfo, what: str) -> Named:
    """Its last layer gives out more than logits."""
    return [*plain(data)[:-1], ("head", Giving(8, data.vocab_size or 0, what))]
