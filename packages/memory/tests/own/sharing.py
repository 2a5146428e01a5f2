"""Layers that save tensors of one storage under several version counters, and write to it in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sley_core.data.dataset import DataInfo


class Embed(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)


class Gates(nn.Module):
    """Saves tensors that share a storage but no version counter, and writes to it in between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.wide = nn.Linear(8, 16)
        self.rnn = getattr(nn, kind)(8, 8, batch_first=True) if kind in ("GRU", "LSTM", "RNN") else None

    def forward(self, h: torch.Tensor) -> Any:
        if self.rnn is not None:
            return self.rnn(h)[0]
        wide = self.wide(h)
        if self.kind == "unsafe_split":
            a, b = wide.unsafe_split(8, -1)
            return a.sigmoid_() * b.tanh_()
        if self.kind == "views of both":
            a, b = (half.view(-1, 8).transpose(0, 1) for half in wide.unsafe_chunk(2, -1))
            return (a.sigmoid_() * b.tanh_()).transpose(0, 1).reshape(h.shape)
        if self.kind == "data":
            kept = wide.exp()
            kept.data.mul_(0.5)  # autograd's derivative of exp is what exp gave
            return kept[..., :8] + kept[..., 8:].detach()
        if self.kind == "detach":
            kept = wide.tanh()
            return kept[..., :8] * kept.detach()[..., 8:]
        return self.halves(wide)

    def halves(self, wide: torch.Tensor) -> Any:
        """Gives the next layer a half on which it may write."""
        a, b = wide.unsafe_chunk(2, -1)
        return a.sigmoid_(), b


class Take(nn.Module):
    def forward(self, pair: Any) -> torch.Tensor:
        if isinstance(pair, torch.Tensor):
            return pair
        a, b = pair
        return a * b.tanh_()


def sharing(data: DataInfo, kind: str) -> list[nn.Module]:
    """The factory of a model with a `Gates`."""
    return [Embed(data.vocab_size, 8), Gates(kind), Take(), nn.Linear(8, data.vocab_size)]


class Late(nn.Module):
    """Writes to what the layer before it has saved, past its version counter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.kind == "data":
            h.data.mul_(0.5)
        else:
            h.unsafe_chunk(2, -1)[0].tanh_()
        return h * 1.0


def spoiled(data: DataInfo, kind: str) -> list[nn.Module]:
    """The factory of a model with a `Late`."""
    return [Embed(data.vocab_size, 8), nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), Late(kind), nn.Linear(8, data.vocab_size)]
