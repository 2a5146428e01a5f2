"""Layers whose forward writes weights or buffers."""

from __future__ import annotations

import torch
from own_models import Block, Embed, Named, _around
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo


class Momentum(nn.Module):
    """Follows its linear by a frozen copy, written in the way of `kind` in each forward in training."""

    def __init__(self, kind: str, hidden: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, hidden, bias=False)
        self.slow = nn.Linear(hidden, hidden, bias=False).requires_grad_(False)
        self.kind = kind

    @torch.no_grad()
    def follow(self) -> None:
        fast, slow = self.inner.weight, self.slow.weight
        match self.kind:
            case "in place":
                slow.lerp_(fast, 0.5)
            case "data":
                slow.data.mul_(0.5).add_(fast.data, alpha=0.5)
            case "new data":
                slow.data = slow.data * 0.5 + fast.data * 0.5
            case "trained":
                fast.clamp_(-0.2, 0.2)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.follow()
        return hidden + (self.inner(hidden) - 0.5 * self.slow(hidden)).tanh()


def momentum(data: DataInfo, kind: str) -> Named:
    return _around([Momentum(kind)], data, 8)


def max_norm(data: DataInfo) -> Named:
    named = _around([Block(8)], data, 8)
    assert data.vocab_size is not None
    embed = Embed(data.vocab_size, 8, max_norm=1.0)
    return [("embed", embed), *named[1:]]


class Late(nn.Module):
    """Writes its buffer from the third step of two micro-batches on, in the way of `kind`."""

    count: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.kind = kind

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            match self.kind:
                case "in place":
                    self.count += 1
                case "new":
                    self.count = self.count + 1
                case "data":
                    self.count.data += 1
        return hidden


def late(data: DataInfo, kind: str) -> Named:
    return _around([Late(kind)], data, 8)
