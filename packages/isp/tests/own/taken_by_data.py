"""Models of which a block uses its weights as its tokens say: `factory = "taken_by_data:often"`."""

from __future__ import annotations

from tied_by_data import CLASSES, WIDTH, Counts, Embed, Linear
from torch import Tensor, nn

Layers = list[tuple[str, nn.Module]]


class Looks(nn.Module):
    """Adds what a table or a linear says."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden + (self.inner(hidden) if int(tokens[0, 0]) % 2 else self.table(tokens))


class Adds(Linear):
    """A linear, and another one or not."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return self.other(hidden) if int(tokens[0, 0]) % 2 else hidden


def _between(*blocks: nn.Module, trained: bool = False) -> Layers:
    embed = Embed(CLASSES, WIDTH).requires_grad_(trained)
    named = ((f"blocks.{at}", block) for at, block in enumerate(blocks))
    return [("embed", embed), *named, ("head", nn.Linear(WIDTH, WIDTH)), ("scores", nn.Linear(WIDTH, CLASSES))]


def often() -> Layers:
    """The first block, before which nothing is trained, uses its linear once or more often."""
    return _between(Counts())


def looked() -> Layers:
    """A block uses a table or a linear."""
    return _between(Looks(), trained=True)


def added() -> Layers:
    """The last block uses both of its linears or one; two others come after it in a backward."""
    return _between(Linear(), Linear(), Adds(), trained=True)
