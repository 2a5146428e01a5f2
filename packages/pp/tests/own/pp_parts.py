"""Models and data of the tests' plans: `factory = "pp_parts:chain"`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.actions.action import Action, Placement
from sley_core.data.dataset import DataContext, DataInfo, Field
from sley_pp.schedules import KINDS
from sley_testing.habits import Embed

VOCAB = 16
LENGTH = 6
Named = list[tuple[str, nn.Module]]


def write_csv(lists: Sequence[Sequence[Action]], placement: Placement) -> str:
    """Returns the CSV text of compute lists, one line per stage, without empty cells."""
    letters = {action_type: letter for letter, action_type in KINDS.items()}
    rows = [
        [f"{placement.position(stage, action.chunk)}{letters[action.kind]}{action.micro}" for action in actions]
        for stage, actions in enumerate(lists)
    ]
    return "".join(",".join(row) + "\n" for row in rows)


def sample(index: int) -> dict[str, Tensor]:
    """Returns tokens and labels, some of which are ignored. No two samples have equal weights."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCAB, (LENGTH + 1,), generator=generator)
    labels = tokens[1:].clone()
    labels[: index % (LENGTH - 1)] = -100
    return {"tokens": tokens[:-1].clone(), "labels": labels}


class Rows:
    """A dataset of samples, with the same samples for evaluation."""

    info = DataInfo({"tokens": Field("int64", sequence_dim=1), "labels": Field("int64", sequence_dim=1)}, VOCAB, LENGTH)

    def __init__(self, context: DataContext) -> None:
        del context  # both splits are the same

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(index)


class Widen(nn.Module):
    """[b, s, n] -> [b, s, m]."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.inner = nn.Linear(n, m)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.norm(hidden)))


def chain(data: DataInfo, widths: Sequence[int] = (4, 4, 4, 4, 4)) -> Named:
    """Returns a model with a block between any two widths, without ties."""
    blocks = [(f"blocks.{at}", Widen(*pair)) for at, pair in enumerate(pairwise(widths))]
    return [("embed", Embed(VOCAB, widths[0])), *blocks, ("head", nn.Linear(widths[-1], VOCAB))]


class Block(nn.Module):
    """Has two linears and a gain, each of which may be shared with another block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.gain = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gain * self.two(F.gelu(self.one(hidden)))


class Sometimes(Block):
    """Uses its weights if the microbatch's first token is even, and returns its input otherwise."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden if int(tokens[0, 0]) % 2 else super().forward(hidden)


def tied(
    data: DataInfo,
    ties: Sequence[tuple[str, Sequence[int]]] = (),
    num_blocks: int = 4,
    hidden: int = 4,
    sometimes: Sequence[int] = (),
    ends: bool = False,
) -> Named:
    """Returns a model whose blocks are tied by `ties`, pairs of a name and blocks. `ends` ties the embedding and the head.

    sometimes: blocks that may do nothing.
    """
    blocks: list[Any] = [(Sometimes if at in sometimes else Block)(hidden) for at in range(num_blocks)]
    for label, (first, *others) in ties:
        *path, attribute = label.split(".")
        for other in others:
            owner, shared = blocks[other], blocks[first]
            for part in path:
                owner, shared = getattr(owner, part), getattr(shared, part)
            setattr(owner, attribute, getattr(shared, attribute))
    embed, head = Embed(VOCAB, hidden), nn.Linear(hidden, VOCAB, bias=False)
    if ends:
        head.weight = embed.weight
    return [("embed", embed), *((f"blocks.{at}", block) for at, block in enumerate(blocks)), ("head", head)]


def computed(data: DataInfo) -> Named:
    """Returns blocks whose weights torch computes in each read."""
    found = chain(data)
    for _, block in found[1:-1]:
        nn.utils.parametrizations.weight_norm(block.inner)
    return found


class Marks(Embed):
    """Embeds tokens and returns a view of the labels."""

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(tokens), labels[:, :2]


class MarksLater(nn.Module):
    """Writes to the view of the labels, so that they are ignored."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        hidden, view = inputs
        view.fill_(-100)
        return hidden


def writes_fields(data: DataInfo, hidden: int = 8) -> Named:
    """Returns a model that writes to a field of the batch through a view."""
    assert data.vocab_size is not None
    blocks = [(f"blocks.{index}", nn.Linear(hidden, hidden)) for index in range(4)]
    head = ("head", nn.Linear(hidden, data.vocab_size))
    return [("embed", Marks(data.vocab_size, hidden)), ("marks", MarksLater()), *blocks, head]
