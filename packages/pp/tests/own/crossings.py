"""Models whose boundaries carry types, many tensors, views and writes: `factory = "crossings:typed"`."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field

WIDTH = 4
FIELD = Field("float64")


class Rows:
    """Pairs of tables [WIDTH, WIDTH]."""

    info = DataInfo({"x": FIELD, "y": FIELD})

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = torch.randn(2, WIDTH, WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": x, "y": y}


class State(NamedTuple):
    hidden: Tensor
    mask: Tensor | None = None


@dataclass
class Output:
    state: State
    extra: dict[str, Tensor]
    nothing: None = None

    def __post_init__(self) -> None:
        self.extra = {f"{key}+": value for key, value in self.extra.items()}


class Square(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class First(Square):
    def forward(self, x: Tensor) -> Output:
        hidden = super().forward(x)
        return Output(State(hidden, x > 0), {"largest": torch.max(hidden, 1)})


class Middle(Square):
    def forward(self, out: Output) -> Output:
        assert type(out) is Output, type(out)
        assert list(out.extra) == ["largest+"], "its initialiser ran again"
        assert out.extra["largest+"].indices.dtype == torch.int64
        hidden = super().forward(out.state.hidden).tanh() + out.extra["largest+"].values.unsqueeze(1)
        return OrderedDict(last=out.state._replace(hidden=hidden))


class Last(Square):
    def forward(self, out: OrderedDict[str, State]) -> Tensor:
        assert type(out) is OrderedDict, type(out)
        return super().forward(out["last"].hidden * out["last"].mask)


def typed(data: DataInfo) -> list[nn.Module]:
    return [First(), Middle(), Last()]


class Many(Square):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = super().forward(x)
        return [hidden * index if index % 3 else hidden.detach() * index for index in range(self.number)]


class Mean(Square):
    def forward(self, parts: list[Tensor]) -> Tensor:
        return super().forward(torch.stack(parts).mean(0))


def many(data: DataInfo, number: int) -> list[nn.Module]:
    return [Many(number), Mean(), Plain()]


class Plain(Square):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


def in_place(data: DataInfo) -> list[tuple[str, nn.Module]]:
    """Returns a model whose layers write to their inputs before they compute."""
    blocks = [(f"{index}", nn.Sequential(nn.ReLU(inplace=True), Plain())) for index in range(4)]
    return [("first", Plain()), *blocks, ("last", Plain())]


def chain(data: DataInfo, frozen: bool = False) -> list[tuple[str, nn.Module]]:
    """Returns a model without writes. frozen: whether the first layer is frozen, so that no gradient crosses to it."""
    first = Plain().requires_grad_(not frozen)
    return [("first", first), *((f"{index}", nn.Sequential(nn.Tanh(), Plain())) for index in range(4)), ("last", Plain())]


class Skips(Square):
    """Returns its input and its output, which are the same tensor if the data say so."""

    def forward(self, x: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
        given = x["hidden"] + x["given"] if isinstance(x, dict) else x * 1
        return {"hidden": given if float(given.detach().sum()) > 0 else super().forward(given), "given": given}


class Joins(Square):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return super().forward(x["hidden"] * x["given"])


def skips(data: DataInfo) -> list[nn.Module]:
    return [Skips(), Skips(), Joins()]


class Halves(Square):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = super().forward(x)
        return hidden[..., : WIDTH // 2], hidden


class WritesToHalf(Square):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        half, whole = x
        half = half.mul_(2) if self.writes else half * 2
        return super().forward(whole) + half.sum()


def halves(data: DataInfo, writes: bool = True) -> list[nn.Module]:
    return [Halves(), WritesToHalf(writes)]


class ChangesDtype(Plain):
    """Returns another dtype from its second call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = super().forward(x)
        return hidden if self.calls < 2 else hidden.float()


def changing_dtype(data: DataInfo) -> list[nn.Module]:
    return [ChangesDtype(), Plain()]
