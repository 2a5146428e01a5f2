"""Defines a small model without attention: convolutions over bytes, layers that return tuples, and tied weights.

    [model]
    factory = "conv_tie:layers"
    options = { hidden = 64, num_blocks = 3 }

The model has a buffer that is not saved (the taps of a fixed average). It needs no `init_weights`, because in every layout a
run starts from the values that the constructors write into parameters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.api.data import DataInfo

Streams = tuple[Tensor, Tensor]
"""The output of each layer but the last: features [b, hidden, s], and the byte embeddings [b, hidden, s]."""


class Embed(nn.Module):
    """The first layer: its parameters are fields of the batch."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, hidden)
        nn.init.normal_(self.table.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Streams:
        embedded: Tensor = self.table(tokens).transpose(1, 2)
        return embedded, embedded


class Average(nn.Module):
    """The mean of the last `width` positions, with fixed weights in a buffer that no checkpoint keeps."""

    taps: Tensor

    def __init__(self, hidden: int, width: int = 4) -> None:
        super().__init__()
        self.register_buffer("taps", torch.full((hidden, 1, width), 1.0 / width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x, (self.taps.shape[-1] - 1, 0)), self.taps.to(x.dtype), groups=x.shape[1])


class Block(nn.Module):
    """A causal convolution with a gain per channel; adds to the first stream and leaves the second."""

    def __init__(self, hidden: int, width: int = 5) -> None:
        super().__init__()
        self.width = width
        self.average = Average(hidden)
        self.conv = nn.Conv1d(2 * hidden, hidden, width)
        self.gain = nn.Parameter(torch.ones(hidden, 1))

    def forward(self, streams: Streams) -> Streams:
        hidden, embedded = streams
        both = torch.cat([self.average(hidden), embedded], dim=1)
        return hidden + self.gain * F.gelu(self.conv(F.pad(both, (self.width - 1, 0)))), embedded


class Head(nn.Module):
    """Logits [b, s, v] through the embedding's own matrix."""

    def __init__(self, table: nn.Embedding, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.weight = table.weight
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))

    def forward(self, streams: Streams) -> Tensor:
        return F.linear(self.norm(streams[0].transpose(1, 2)), self.weight, self.bias)


def layers(data: DataInfo, hidden: int = 64, num_blocks: int = 3) -> list[nn.Module]:
    """A plain list of modules is enough; they are named by their place."""
    assert data.vocab_size is not None, "this model reads tokens of a known vocabulary"
    embed = Embed(data.vocab_size, hidden)
    return [embed, *(Block(hidden) for _ in range(num_blocks)), Head(embed.table, hidden)]
