"""A model with parameters of all kinds: `factory = "odd_parts:model"`."""

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field
from sley_testing.contract import SQUARES

WIDTH = 6

PLAN = {
    "run": {"name": "odd", "steps": 4, "device": "cpu", "seed": 3},
    "model": {"factory": "odd_parts:model"},
    "data": {"factory": "odd_parts:Points"},
    "loss": SQUARES,
    "batch": {"global_size": 4, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 0.01},
}


class Points:
    """A dataset of 40 random samples."""

    info = DataInfo({"x": Field("float32"), "y": Field("float32")})

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": y}


class First(nn.Module):
    """Has contiguous, frozen, empty and scalar parameters, and buffers of integers, of one shared tensor, and one that is
    not saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.late = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("count", torch.arange(WIDTH))
        self.register_buffer("one", torch.linspace(0, 1, WIDTH))
        self.register_buffer("same", self.one)
        self.register_buffer("unsaved", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.linear.weight.dtype)
        shift = (self.count + self.one + self.same * self.unsaved).to(x.dtype)
        return self.linear(x).tanh() * self.scale + self.frozen + self.late + shift + self.nothing.sum()


class Second(nn.Module):
    """Has a transposed weight, and one that is tied to the first layer's."""

    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self.across = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.tied = tied

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.across).tanh() @ self.tied


class Many(nn.Module):
    """Has 100 small parameters, and one of more than 1 MiB in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(100))
        self.large = nn.Parameter(torch.randn(WIDTH, 50_000))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.stack([*self.small]).mean(0)
        return (x * scale) @ self.large[:, :WIDTH]


def model() -> list[tuple[str, nn.Module]]:
    first = First()
    return [("first", first), ("second", Second(first.linear.weight))]


def many() -> list[tuple[str, nn.Module]]:
    return [("layer", Many())]
