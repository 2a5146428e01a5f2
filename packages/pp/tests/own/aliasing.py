"""Layers that hand on what they were given, in every form in which memory is shared: `factory = "aliasing:layers"`.

Between layers goes a tuple of tensors [b, SIDE, SIDE]; sides are equal so that a transposed one takes any place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataContext, DataInfo, Field

SIDE = 4
HELD_OUT = 48
"""Held-out samples; an evaluation takes all of them."""
FIELD = Field("float64")
Tensors = tuple[Tensor, ...]


class Rows:
    """Pairs of tables; held-out ones are others."""

    info = DataInfo({"x": FIELD, "y": FIELD})

    def __init__(self, context: DataContext) -> None:
        self.first = 0 if context.split == "train" else 1000

    def __len__(self) -> int:
        return HELD_OUT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(self.first + index)


def sample(index: int) -> dict[str, Tensor]:
    x, y = torch.randn(2, SIDE, SIDE, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return {"x": x, "y": y}


class Squares:
    fields = ("y",)

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(batch["y"].numel())

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output - batch["y"]).square().sum()


class First(nn.Module):
    def __init__(self, num_out: int) -> None:
        super().__init__()
        self.inner = nn.Linear(SIDE, SIDE)
        self.num_out = num_out

    def forward(self, x: Tensor) -> Tensors:
        hidden = self.inner(x)
        return tuple(hidden * (at + 1) if at else hidden for at in range(self.num_out))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIDE, SIDE)

    def forward(self, state: Tensors) -> Tensor:
        return self.inner(sum(part * (at + 1) for at, part in enumerate(state))).tanh()


class Mix(nn.Module):
    """A linear on the first tensor; the others pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIDE, SIDE)

    def forward(self, state: Tensors) -> Tensors:
        first, *others = state
        return (self.inner(first).tanh(), *others)


class Positions(nn.Module):
    """Adds a table to the last tensor, and hands on a view of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(1, SIDE, SIDE))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.1)

    def forward(self, state: Tensors) -> Tensors:
        *others, last = state
        return (*others, (last + self.table).flatten(1).view(-1, SIDE, SIDE))


class InPlace(Mix):
    """Begins by writing to what it was given."""

    def forward(self, state: Tensors) -> Tensors:
        first, *others = state
        first.add_(1).relu_()
        return (self.inner(first), *others)


class Keeps(nn.Module):
    """Keeps what it was given last time, and finds it unchanged; hands on views."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def forward(self, state: Tensors) -> Tensors:
        for was, copy in self.kept:
            assert torch.equal(was, copy), "what a layer kept was overwritten"
        self.kept = [*self.kept[-2:], *((part.detach(), part.detach().clone()) for part in state)]
        return tuple(part.view_as(part) for part in state)


class Apply(nn.Module):
    """`how` applied to the tuple; no parameters."""

    def __init__(self, how: Callable[[Tensors], Tensors]) -> None:
        super().__init__()
        self.how = how

    def forward(self, state: Tensors) -> Tensors:
        return self.how(state)


def _halves(state: Tensors) -> Tensors:
    upper, lower = state[0].chunk(2, 1)
    return (torch.cat([lower, upper], 1), *state[1:])


WAYS: dict[str, Callable[[Tensors], Tensors]] = {
    "same": lambda state: state,
    "turned": lambda state: (*state[1:], state[0]),
    "reversed": lambda state: state[::-1],
    "viewed": lambda state: tuple(part.view_as(part) for part in state),
    "transposed": lambda state: tuple(part.transpose(1, 2) for part in state),
    "halves": _halves,
    "spread": lambda state: (state[-1].mean(1, keepdim=True).expand(-1, SIDE, SIDE), *state[1:]),
    "stopped": lambda state: (state[-1].detach() + state[0], *state[1:]),
    "twice": lambda state: (state[0], state[0], *state[2:]),
    "overlapping": lambda state: (state[-1], state[-1].flip(1), *state[2:]),
    "packed": lambda state: tuple(torch.stack(state).unbind(0)),
    "one fewer": lambda state: (state[0] + state[-1], *state[1:-1]),
    "one more": lambda state: (*state, state[0]),
}
PARTS: dict[str, Callable[[], nn.Module]] = {"mix": Mix, "positions": Positions, "keeps": Keeps, "in place": InPlace}


def drawn(seed: int, num_layers: int = 8) -> list[str]:
    """Kinds of layers that may follow one another."""
    draw = random.Random(seed)
    found: list[str] = []
    width = draw.randint(1, 3)
    found.append(str(width))
    fresh = False  # whether nobody else holds or saved what a layer would write to
    while len(found) < num_layers - 1:
        name = draw.choice([*WAYS, *PARTS, "mix", "positions"])
        if (name == "one fewer" and width < 2) or (name == "one more" and width > 2):
            continue
        if (name in ("twice", "overlapping") and width < 2) or (name == "in place" and not fresh):
            continue
        width += {"one fewer": -1, "one more": 1}.get(name, 0)
        fresh = name == "positions" and width == 1
        found.append(name)
    return found


def layers(data: DataInfo, kinds: list[str]) -> list[tuple[str, nn.Module]]:
    """Of these kinds, the first of which is how many tensors the first layer hands on."""
    width, *others = kinds
    made: list[tuple[str, nn.Module]] = [("first", First(int(width)))]
    for at, name in enumerate(others):
        part: Any = PARTS[name]() if name in PARTS else Apply(WAYS[name])
        made.append((f"{at}.{name.replace(' ', '_')}", part))
    return [*made, ("last", Last())]
