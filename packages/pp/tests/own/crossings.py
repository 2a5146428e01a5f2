"""Models whose boundaries carry types, many tensors, views and writes: `factory = "crossings:typed"`."""

from __future__ import annotations

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


class Squares:
    fields = ("y",)

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(batch["y"].numel())

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output - batch["y"]).square().sum()


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


class First(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Output:
        hidden = super().forward(x)
        return Output(State(hidden, x > 0), {"largest": torch.max(hidden, 1)})


class Middle(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, out: Output) -> Output:
        assert type(out) is Output, type(out)
        assert list(out.extra) == ["largest+"], "its initialiser ran again"
        assert out.extra["largest+"].indices.dtype == torch.int64
        hidden = super().forward(out.state.hidden).tanh() + out.extra["largest+"].values.unsqueeze(1)
        return OrderedDict(last=out.state._replace(hidden=hidden))


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, out: OrderedDict[str, State]) -> Tensor:
        assert type(out) is OrderedDict, type(out)
        return super().forward(out["last"].hidden * out["last"].mask)


def typed(data: DataInfo) -> list[tuple[str, nn.Module]]:
    return [("first", First()), ("middle", Middle()), ("last", Last())]


class Many(nn.Linear):
    def __init__(self, number: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.number = number

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = super().forward(x)
        return [hidden * at if at % 3 else hidden.detach() * at for at in range(self.number)]


class Sum(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, parts: list[Tensor]) -> Tensor:
        return super().forward(torch.stack(parts).mean(0))


def many(data: DataInfo, number: int) -> list[tuple[str, nn.Module]]:
    return [("first", Many(number)), ("middle", Sum()), ("last", Plain())]


class WritesToInput(nn.Module):
    """Writes to its input before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) * 1.5


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


def in_place(data: DataInfo) -> list[tuple[str, nn.Module]]:
    return [("first", Plain()), *((f"{at}", WritesToInput()) for at in range(4)), ("last", Plain())]


def chain(data: DataInfo) -> list[tuple[str, nn.Module]]:
    """Returns the same model without writes to inputs."""
    return [("first", Plain()), *((f"{at}", nn.Sequential(nn.Tanh(), Plain())) for at in range(4)), ("last", Plain())]


class Skips(nn.Linear):
    """Returns its input and its output, which are the same tensor if the data say so."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
        given = x["hidden"] + x["given"] if isinstance(x, dict) else x * 1
        return {"hidden": given if float(given.detach().sum()) > 0 else super().forward(given), "given": given}


class Joins(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return super().forward(x["hidden"] * x["given"])


def skips(data: DataInfo) -> list[nn.Module]:
    return [Skips(), Skips(), Joins()]


class Halves(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = super().forward(x)
        return hidden[..., : WIDTH // 2], hidden


class WritesToHalf(nn.Linear):
    def __init__(self, writes: bool) -> None:
        super().__init__(WIDTH, WIDTH)
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


def frozen(data: DataInfo) -> list[tuple[str, nn.Module]]:
    """The first layer is frozen, so that no gradient crosses to it."""
    layers = chain(data)
    layers[0][1].requires_grad_(False)
    return layers
