"""Models, data and a loss of the tests' plans: `factory = "isp_parts:mixed"`."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sley_core.data.dataset import DataContext, DataInfo, Field

WIDTH = 6
VOCABULARY = 11


class Points:
    """Samples of four tokens and a target for each."""

    info = DataInfo({"tokens": Field("int64"), "y": Field("float64")}, vocab_size=VOCABULARY)

    def __init__(self, context: DataContext) -> None:
        self.first = 0 if context.split == "train" else 1000

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        tokens = torch.randint(VOCABULARY, (4,), generator=generator)
        return {"tokens": tokens, "y": torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)}


class Squares:
    """The sum of squared errors; every sample weighs one."""

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(len(batch["y"]))

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output.double() - batch["y"]).square().sum()


class Embed(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Mixed(nn.Module):
    """A block of plain linears with attention of its own: no two of one size, some without bias, one used twice.

    turned: registers its modules in another order than it uses them: in the opposite one, or shuffled by this string.
    """

    def __init__(self, ffn: int, turned: bool | str = False) -> None:
        super().__init__()
        makers = {
            "qkv": lambda: nn.Linear(WIDTH, 3 * WIDTH),
            "out": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
            "twice": lambda: nn.Linear(WIDTH, WIDTH),
            "up": lambda: nn.Linear(WIDTH, ffn, bias=ffn % 2 == 0),
            "down": lambda: nn.Linear(ffn, WIDTH),
            "norm": lambda: nn.LayerNorm(WIDTH),
        }
        names = list(makers)
        if isinstance(turned, str):
            random.Random(turned).shuffle(names)
        for name in reversed(names) if turned is True else names:
            self.add_module(name, makers[name]())

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        hidden = hidden + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        hidden = hidden + self.twice(self.twice(hidden).tanh())
        return hidden + self.down(self.up(hidden).tanh())


class Reentrant(Mixed):
    """Recomputes its second half by itself, with torch's older way."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(9)
        self.reentrant = reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden)
        return checkpoint(super().forward, hidden, use_reentrant=self.reentrant)


class Adapted(nn.Module):
    """A frozen linear with a small trained pair beside it, and one of which only the bias is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 1, bias=False)
        self.up = nn.Linear(1, WIDTH, bias=False)
        self.shifted = nn.Linear(WIDTH, WIDTH)
        self.shifted.weight.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.shifted(self.base(hidden) + self.up(self.down(hidden)))


class ReadsAnother(nn.Module):
    """Reads the weight of a linear without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) + self.linear.weight.sum()


class Tied(nn.Module):
    """Scores by the table that the embedding has too, in a module that is no linear: it must stay whole."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.table.t() @ self.table)


class Autocast(nn.Module):
    """Computes in bf16 whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.plain(self.linear(hidden).tanh())
        return hidden + out.to(hidden.dtype)


class Fails(nn.Linear):
    """Raises where it is told to."""

    asked = False

    def forward(self, hidden: Tensor) -> Tensor:
        if Fails.asked:
            raise ValueError("asked to")
        return super().forward(hidden)


def mixed(turned: bool = False, order: int | None = None) -> list[tuple[str, nn.Module]]:
    """Four blocks of different sizes. order: shuffles the registration of each block's modules, each in another way."""
    blocks = [(f"block{at}", Mixed(ffn, turned if order is None else f"{order} {at}")) for at, ffn in enumerate((7, 12, 5, 8))]
    return [("embed", Embed()), *blocks, ("head", nn.Linear(WIDTH, WIDTH))]


def recomputing(reentrant: bool) -> list[tuple[str, nn.Module]]:
    return [("embed", Embed()), *((f"block{at}", Reentrant(reentrant)) for at in range(3)), ("head", nn.Linear(6, 6))]


def adapted() -> list[tuple[str, nn.Module]]:
    return [("embed", Embed()), ("block0", Adapted()), ("block1", Adapted()), ("head", nn.Linear(WIDTH, WIDTH))]


def frozen_start() -> list[tuple[str, nn.Module]]:
    """Nothing before the second block is trained."""
    layers = mixed()
    for _, module in layers[:2]:
        module.requires_grad_(False)
    return layers


def reads_another() -> list[tuple[str, nn.Module]]:
    return [("embed", Embed()), ("block", ReadsAnother())]


def tied_to_no_linear() -> list[tuple[str, nn.Module]]:
    embed = Embed()
    return [("embed", embed), ("head", Tied(embed.table.weight))]


def autocast() -> list[tuple[str, nn.Module]]:
    return [("embed", Embed()), ("block0", Autocast()), ("block1", Autocast())]


def failing() -> list[tuple[str, nn.Module]]:
    return [("embed", Embed()), ("a", Mixed(7)), ("b", Fails(WIDTH, WIDTH)), ("c", Mixed(7)), ("head", nn.Linear(6, 6))]


def padded_tokens() -> list[tuple[str, nn.Module]]:
    return [("embed", Embed(padding_idx=3)), ("head", nn.Linear(WIDTH, WIDTH))]


class Experts(nn.ModuleList):
    """Linears of one layer, all of which are used, as often as it takes wider than their input."""

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.repeat(1, 1, self[0].in_features // WIDTH)
        return hidden + sum(expert(wide).unflatten(-1, (-1, WIDTH)).sum(-2) for expert in self)


def experts(number: int, width: int = 1) -> list[tuple[str, nn.Module]]:
    made = [nn.Linear(width * WIDTH, width * WIDTH) for _ in range(number)]
    return [("embed", Embed()), ("experts", Experts(made)), ("head", nn.Linear(WIDTH, WIDTH))]
