"""A small classifier of tokens with a biased head, its data, and heads that do something with their logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sley_core.data.dataset import IGNORED, DataContext, DataInfo, Field

WIDTH = 6
CLASSES = 4
"""Over three ranks two, two and none."""


class Labelled:
    """Samples of five tokens, some of whose labels are ignored; all of the third sample's."""

    info = DataInfo({"tokens": Field("int64", ids="token"), "labels": Field("int64", ids="label")}, vocab_size=CLASSES)

    def __init__(self, context: DataContext) -> None:
        self.first = 0 if context.split == "train" else 1000

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        tokens = torch.randint(CLASSES, (5,), generator=generator)
        labels = torch.randint(CLASSES, (5,), generator=generator)
        labels[: 5 if index % 8 == 2 else index % 3] = IGNORED
        return {"tokens": tokens, "labels": labels}


class Beyond(Labelled):
    """Every sample has a class that the head has not; nobody has said that labels are token ids."""

    info = DataInfo({"tokens": Field("int64"), "labels": Field("int64")}, vocab_size=CLASSES)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["labels"][1] = CLASSES + 1
        return sample


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Scaled(nn.Module):
    """Returns its linear's logits, changed by `change`."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, CLASSES)
        self.change = change

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.output(hidden)
        if self.change == "times":
            return logits * 0.5
        return torch.tanh(logits) if self.change == "tanh" else logits - logits.mean()


class Narrowed(nn.Module):
    """Gives its linear numbers of another dtype, where the plan computes in fp64."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, classes)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(hidden.float())


class Doubled(nn.Module):
    """Two linears: which of them is the head cannot be told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(self.first(hidden))


class Table(nn.Module):
    """Holds a weight that is another's."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.table.mean(0)


def layers(frozen: str = "") -> list[tuple[str, nn.Module]]:
    """An embedding, a linear and a head with a bias; of them those named in `frozen` are."""
    found: list[tuple[str, nn.Module]] = [
        ("embed", Embed()),
        ("middle", nn.Linear(WIDTH, WIDTH)),
        ("head", nn.Linear(WIDTH, CLASSES)),
    ]
    for name, module in found:
        module.requires_grad_(name not in frozen)
    return found


def scaled(change: str) -> list[tuple[str, nn.Module]]:
    return [("embed", Embed()), ("head", Scaled(change))]


def narrowed(place: str) -> list[tuple[str, nn.Module]]:
    """The linear in the middle, or the head, is called so."""
    if place == "head":
        return [("embed", Embed()), ("head", Narrowed(CLASSES))]
    return [("embed", Embed()), ("middle", Narrowed(WIDTH)), ("head", nn.Linear(WIDTH, CLASSES))]


def doubled() -> list[tuple[str, nn.Module]]:
    return [("embed", Embed()), ("head", Doubled())]


def held_elsewhere() -> list[tuple[str, nn.Module]]:
    head = nn.Linear(WIDTH, CLASSES)
    return [("embed", Embed()), ("table", Table(head.weight)), ("head", head)]


def no_linear() -> list[tuple[str, nn.Module]]:
    embed = Embed()
    return [("embed", embed), ("head", Table(embed.table.weight))]
