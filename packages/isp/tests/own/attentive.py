"""Small models with custom attentions, supported or not, and losses over positions."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_isp.attention import SequenceAttention

Named = list[tuple[str, nn.Module]]
HEADS = 4


class TokenEmbed(nn.Module):
    """Embeds tokens without positions."""

    def __init__(self, data: DataInfo, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(data.vocab_size, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class Embed(TokenEmbed):
    """Embeds tokens with learned positions, which a slice must not count from 0."""

    def __init__(self, data: DataInfo, hidden: int) -> None:
        super().__init__(data, hidden)
        self.places = nn.Embedding(data.sequence, hidden)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])[None] if positions is None else positions)


class Attend(nn.Module):
    """Causal attention with a learned scale of keys, softmax(scale q k^T) v. Returns the context [b, s, h d]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k * self.scale, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Block(nn.Module):
    def __init__(self, hidden: int, attend: nn.Module, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.project = nn.Linear(hidden, 3 * hidden)
        self.attend = attend
        self.out = nn.Linear(hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        context = self.attend(q, k, v)
        return hidden + self.out(context)


class TorchAttentionBlock(nn.Module):
    """A block with torch's attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(hidden, HEADS, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]


def mixed(data: DataInfo) -> Named:
    """Returns a model with a supported and an unsupported attention."""
    embed, block, _, head = layers(data, wrapped=True)
    return [embed, block, ("torch", TorchAttentionBlock(8)), head]


class Mixer(nn.Module):
    """Adds the output of a module that mixes positions, or mixes another dim."""

    def __init__(self, kind: str, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.inner: nn.Module = {
            "conv": nn.Conv1d(hidden, hidden, 3, padding=1),
            "lstm": nn.LSTM(hidden, hidden, batch_first=True),
            "features": nn.Conv1d(1, 1, 3, padding=1),
            "batch": nn.BatchNorm1d(hidden, track_running_stats=False),
            "pool": nn.AvgPool1d(3, 1, 1),
        }[kind]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kind == "features":
            return hidden + self.inner(hidden.flatten(0, 1).unsqueeze(1)).view_as(hidden)
        if self.kind == "lstm":
            return hidden + self.inner(hidden)[0]
        return hidden + self.inner(hidden.transpose(1, 2)).transpose(1, 2)


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "rolled": lambda h: h + h.roll(1, 1),
    "summed": lambda h: h + h.cumsum(1) / 8,
    "meant": lambda h: h - h.mean(1, keepdim=True),
    "of the batch": lambda h: h / h.std((0, 1), keepdim=True),
    "in place": lambda h: h.add_(h.flip(1)) * 1.0,
}
SEPARATE: dict[str, Callable[[Tensor], Tensor]] = {
    "dropped": lambda h: F.dropout(h, 0.3),
    "chosen": lambda h: torch.where(h.argmax(-1, keepdim=True) % 2 == 0, h, -h),
    "written": lambda h: h.mul_(2.0) * 1.0,
}


class MixingLayer(nn.Module):
    """A layer that may mix positions. within: whether it does so before attention in the same layer."""

    def __init__(self, kind: str, within: bool) -> None:
        super().__init__()
        self.kind = kind
        self.block = Block(8, SequenceAttention(Attend()), HEADS) if within else None

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = (MIXED | SEPARATE)[self.kind](hidden.clone())
        return mixed if self.block is None else hidden + self.block(mixed)


def mixing_model(data: DataInfo, kind: str, within: bool) -> Named:
    *blocks, head = layers(data, wrapped=True)
    return [*blocks, ("beside", MixingLayer(kind, within)), head]


def mixer_model(data: DataInfo, kind: str) -> Named:
    """Returns a model with a module between attention and head."""
    *blocks, head = layers(data, wrapped=True)
    return [*blocks, ("mixer", Mixer(kind, 8)), head]


def layers(data: DataInfo, wrapped: bool = False, places: bool = True, heads: int = HEADS, hidden: int = 8) -> Named:
    """Returns two blocks. wrapped: whether they use `SequenceAttention`. places: whether positions are known."""
    attends: list[Any] = [SequenceAttention(Attend()) if wrapped else Attend() for _ in range(2)]
    blocks = [(f"blocks.{at}", Block(hidden, attend, heads)) for at, attend in enumerate(attends)]
    embed = Embed(data, hidden) if places else TokenEmbed(data, hidden)
    return [("embed", embed), *blocks, ("head", nn.Linear(hidden, data.vocab_size))]


# -- losses over positions: one is a sum over them, and some look from one to another ---------------------------------------

Batch = Mapping[str, Tensor]


class Sum:
    """Cross-entropy of separate positions."""

    fields: tuple[str, ...] = ("labels",)

    def weight(self, batch: Batch) -> float:
        return float((batch["labels"] != -100).sum())

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)


class Counting(Sum):
    """Starts at a tenth like a warmup, so that its value depends on the number of calls."""

    calls = 0

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        self.calls += 1
        return super().loss(output, batch) * min(1.0, self.calls / 10)


class Half(Sum):
    """Rounds its input and its sum."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output.bfloat16(), batch).float()


class Smooth(Sum):
    """Also penalises differences of neighbours, which the last position of a slice does not have."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output, batch) + (output[:, 1:] - output[:, :-1]).square().sum()


class Shifted(Sum):
    """Shifts its labels, as transformers' losses do, but counts all of them."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output[:, :-1], {"labels": batch["labels"][:, 1:]})


class Drawn(Sum):
    """Draws random numbers for separate positions."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss(output + torch.randn_like(output), batch)


class Contrastive:
    """Separates the samples of a microbatch by the means of their sequences. Every sample has the weight 1.
    draws: the scale of the random noise that it adds.
    """

    def __init__(self, draws: float = 0.0) -> None:
        self.draws = draws

    def weight(self, batch: Batch) -> float:
        return float(len(batch["labels"]))

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        drawn = torch.randn(output.shape[-1], dtype=output.dtype) * self.draws
        pooled = F.normalize(output.mean(1) + drawn, dim=-1)
        first = F.normalize(output[:, 0], dim=-1)
        return F.cross_entropy(pooled @ first.T * 5, torch.arange(len(output)), reduction="sum")
