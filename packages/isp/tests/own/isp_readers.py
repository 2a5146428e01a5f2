"""Models that use their weights in other ways than by calling each module once: `factory = "isp_readers:branches"`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from isp_parts import VOCABULARY, WIDTH, Embed
from torch import Tensor, nn

from sley_core.model.layers import Model

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


class Asks(nn.Module):
    """Multiplies by whatever `asks` makes of its linear, from when it is set."""

    asks: ClassVar[Callable[[nn.Linear], Any] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.back = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        asked = 1.0 if Asks.asks is None else Asks.asks(self.linear)
        return self.back(self.linear(hidden).tanh()) * asked


def asks() -> Layers:
    return [("embed", Embed()), ("asks", Asks()), ("head", nn.Linear(WIDTH, WIDTH))]


class BySize(nn.Module):
    """Scales by what it knows of the shapes of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens % self.table.weight.shape[0]) * self.table.weight.shape[1] ** 0.5
        scale = self.linear.weight.numel() ** -0.5 + 1 / len(self.linear.bias)
        return self.linear(hidden) * scale


def by_size() -> Layers:
    return [("embed", BySize()), ("head", nn.Linear(WIDTH, WIDTH))]


class Normed(nn.Module):
    """Linears whose weights are computed anew by a hook before each forward, in torch's older way and in the newer."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.old = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.new(self.old(hidden))


def normed() -> Model:
    return Model([("embed", Embed()), ("normed", Normed()), ("head", nn.Linear(WIDTH, WIDTH))], first_values)


class Replaced(nn.Module):
    """A linear whose forward was replaced, and one that is called with other tensors for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = nn.Linear(WIDTH, WIDTH)
        self.doubled.forward = lambda x: 2.0 * F.linear(x, self.doubled.weight, self.doubled.bias)
        self.free = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        given = {"weight": hidden.mean((0, 1)).outer(hidden.sum((0, 1))), "bias": hidden.mean((0, 1))}
        hidden = hidden + torch.func.functional_call(self.free, given, (hidden,)).tanh()
        return self.free(self.doubled(hidden))


def replaced() -> Layers:
    return [("embed", Embed()), ("replaced", Replaced()), ("head", nn.Linear(WIDTH, WIDTH))]


def first_values(module: nn.Module, name: str) -> None:
    """torch's own first values, and something for the two parts of a weight that was normed."""
    for one in module.parameters(recurse=False):
        nn.init.uniform_(one, -0.3, 0.4)


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


class Stacked(nn.Module):
    """The weights of all of its experts in one parameter, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(2, WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.einsum("bsi,eij->bsj", hidden, self.experts)


def stacked() -> Layers:
    return [("embed", Embed()), ("blocks.0", Stacked()), ("blocks.1", Stacked()), ("head", nn.Linear(WIDTH, WIDTH * 3 // 2))]
