"""Blocks with attention, in-place operations and dropout, one that fails on demand, and some that share storages."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sley_core.data.dataset import DataInfo
from sley_testing.habits import Embed

FAILS = [False]
"""Whether the next forward of a block fails in its middle."""


class ExtraAttention(nn.Module):
    """Attends twice. Attends once more in one of its calls. when: the number of that call."""

    def __init__(self, hidden: int, when: int) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.when, self.num_runs = when, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_runs += 1
        if self.num_runs == self.when:
            with torch.no_grad():
                self._attend(hidden + 1.0)
        return self.out(self._attend(hidden) + self._attend(2.0 * hidden))

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = self.project(hidden).unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


class NestedCheckpoint(nn.Module):
    """Ends with an attention in a checkpoint, after which the layer saves no tensor."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + checkpoint(self._attend, hidden, use_reentrant=False)

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = hidden.unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float, attention_dropout: float, in_place: bool) -> None:
        super().__init__()
        self.heads, self.attention_dropout, self.in_place = heads, attention_dropout, in_place
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((hidden,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        b, s, h = hidden.shape
        q, k, v = self.qkv(self.norm(hidden)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.attention_dropout)
        if self.in_place:
            context.mul_(2)
        if FAILS[0]:
            raise ValueError("asked to fail")
        hidden = hidden + self.dropout(context.transpose(1, 2).reshape(b, s, h)) * self.scale.to(hidden.dtype)
        return hidden + self.down(self.dropout(F.relu_(self.up(hidden)).sigmoid()))


def layers(
    data: DataInfo,
    num_blocks: int = 3,
    hidden: int = 16,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    in_place: bool = False,
) -> list[nn.Module]:
    assert data.vocab_size is not None
    blocks = [Block(hidden, 2, dropout, attention_dropout, in_place) for _ in range(num_blocks)]
    return [Embed(data.vocab_size, hidden), *blocks, nn.Linear(hidden, data.vocab_size)]


# -- tensors of one storage under several version counters -----------------------------------------------------------------


class SharedStorage(nn.Module):
    """Saves tensors that share a storage but no version counter, and writes to the storage in between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.wide = nn.Linear(8, 16)
        self.rnn = nn.GRU(8, 8, batch_first=True) if kind == "GRU" else None

    def forward(self, h: Tensor) -> Any:
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

    def halves(self, wide: Tensor) -> Any:
        """Returns two halves of a tensor, to which the next layer may write."""
        a, b = wide.unsafe_chunk(2, -1)
        return a.sigmoid_(), b


class Take(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        if isinstance(pair, Tensor):
            return pair
        a, b = pair
        return a * b.tanh_()


def sharing(data: DataInfo, kind: str) -> list[nn.Module]:
    """Returns a model with a `SharedStorage`."""
    return [Embed(data.vocab_size, 8), SharedStorage(kind), Take(), nn.Linear(8, data.vocab_size)]


class WritesInput(nn.Module):
    """Writes to a tensor that the previous layer has saved, without a change of its version counter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == "data":
            h.data.mul_(0.5)
        else:
            h.unsafe_chunk(2, -1)[0].tanh_()
        return h * 1.0


def spoiled(data: DataInfo, kind: str) -> list[nn.Module]:
    """Returns a model with a `WritesInput`."""
    return [
        Embed(data.vocab_size, 8),
        nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()),
        WritesInput(kind),
        nn.Linear(8, data.vocab_size),
    ]
