"""Models that use their weights in other ways than by calling each module once: `factory = "isp_readers:branches"`."""

from __future__ import annotations

import torch.nn.functional as F
from isp_parts import VOCABULARY, WIDTH, Embed
from torch import Tensor, nn

Layers = list[tuple[str, nn.Module]]


class Doubled(nn.Embedding):
    """No plain embedding, so its table stays whole."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 2.0 * super().forward(tokens)


class EmbedDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Doubled(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Decoder(nn.Module):
    """A linear with a bias of its own and a weight that a module of another kind holds too, as BERT's heads have it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = weight
        self.back = nn.Linear(VOCABULARY, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.back(self.decoder(hidden).tanh())


def half_sharded() -> Layers:
    embed = EmbedDoubled()
    return [("embed", embed), ("middle", nn.Linear(WIDTH, WIDTH)), ("head", Decoder(embed.table.weight))]


class Branch(nn.Module):
    """One of two linears, as the data has it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, width)

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = self.first if float(hidden.detach().sum()) > 0 else self.second
        return hidden + chosen(hidden).tanh()[..., :WIDTH]


def branches() -> Layers:
    return [("embed", Embed()), ("branch", Branch()), ("head", nn.Linear(WIDTH, WIDTH))]


def uneven_branches() -> Layers:
    """Of two sizes."""
    return [("embed", Embed()), ("branch", Branch(2 * WIDTH)), ("head", nn.Linear(WIDTH, WIDTH))]


class Encoder(nn.Module):
    """torch's own block, which in an evaluation reads the weights of its linears instead of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 13, dropout=0.0, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block(hidden)


def encoder() -> Layers:
    return [("embed", Embed()), ("block", Encoder()), ("head", nn.Linear(WIDTH, WIDTH))]


class Scaled(nn.Module):
    """Reads a frozen weight that it does not call, as some adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.trained(hidden) * self.frozen.weight.norm() + self.frozen(hidden)


def scaled() -> Layers:
    return [("embed", Embed()), ("scaled", Scaled()), ("head", nn.Linear(WIDTH, WIDTH))]


class Projected(nn.Module):
    """Multiplies by a weight of its linear, in evaluations only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.linear.weight)  # of its dtype, which is fine
        wide = self.linear(hidden) if self.linear.weight.requires_grad and hidden.requires_grad else self._wide(hidden)
        return self.back(wide)

    def _wide(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.linear.weight, self.linear.bias)


def projected() -> Layers:
    return [("embed", Embed()), ("projected", Projected()), ("head", nn.Linear(WIDTH, WIDTH))]
