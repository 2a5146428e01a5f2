"""Small models of all sorts, each drawn by a number: `factory = "drawn:model"`, `options = {seed, tied}`; and their data."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sley_core.data.dataset import DataContext, DataInfo, Field
from sley_core.model.layers import Model

CLASSES = 7
POSITIONS = 4


class Rows:
    """Samples of four tokens; some labels are ignored, by torch's number for it and by others."""

    info = DataInfo({"tokens": Field("int64", ids="token"), "labels": Field("int64", ids="label")}, vocab_size=CLASSES)

    def __init__(self, context: DataContext) -> None:
        self.first = 0 if context.split == "train" else 1000

    def __len__(self) -> int:
        return 64 if self.first == 0 else 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        tokens, labels = torch.randint(CLASSES, (2, POSITIONS), generator=generator)
        labels[index % 5 :] = (-100, -1)[index % 2]
        return {"tokens": tokens, "labels": labels}


class Kind(nn.Module):
    """width: of what comes and goes. draw: says sizes."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.inner = draw.choice([3, 5, 8])
        self.up = nn.Linear(width, self.inner, bias=draw.random() < 0.5)
        self.down = nn.Linear(self.inner, width, bias=draw.random() < 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).tanh())


class Twice(Kind):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(super().forward(hidden) * 0.5)


class InPlace(Kind):
    def forward(self, hidden: Tensor) -> Tensor:
        out = self.down(torch.relu_(self.up(hidden).mul_(2.0)))
        out += hidden
        return out


class Detached(Kind):
    """A branch that its input learns nothing from, and one that nothing learns from."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.down(self.up(hidden))
        return hidden + self.down(self.up(hidden.detach()).tanh()) + 0.1 * target


class Normed(Kind):
    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.norm = nn.LayerNorm(width) if draw.random() < 0.5 else nn.RMSNorm(width)
        self.scale = nn.Parameter(torch.empty(width))
        self.mix = nn.Parameter(torch.empty(width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.norm(hidden) * self.scale) @ self.mix


class Frozen(Kind):
    """Its first linear, or all but the biases."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.down.bias = nn.Parameter(torch.empty(width))
        self.up.requires_grad_(False)
        self.down.weight.requires_grad_(draw.random() < 0.5)


class Experts(Kind):
    """Each token goes to the expert that its numbers say; one that nobody asks for does not run."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.gate = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = super().forward(hidden).flatten(0, 1)
        share, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for at, expert in enumerate(self.experts):
            (rows,) = (chosen == at).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * share[rows, None])
        return hidden + out.view_as(hidden)


class Checkpointed(Kind):
    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.reentrant = draw.random() < 0.5

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden)
        return checkpoint(super().forward, hidden, use_reentrant=self.reentrant)


class Attentive(nn.Module):
    """torch's own attention, or its block around one."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        heads = draw.choice([head for head in (1, 2, 3) if width % head == 0])
        self.block = nn.MultiheadAttention(width, heads, batch_first=True)
        if draw.random() < 0.5:
            self.block = nn.TransformerEncoderLayer(width, heads, 5, dropout=0.0, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        if isinstance(self.block, nn.TransformerEncoderLayer):
            return self.block(hidden)
        return hidden + self.block(hidden, hidden, hidden, need_weights=False)[0]


class Asking(Kind):
    """Takes a gradient in its forward, which is no weight's; and a linear that nobody calls."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.unused = nn.Linear(width, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            at = hidden.detach().requires_grad_()
            (step,) = torch.autograd.grad(super().forward(at).square().sum(), at)
        return super().forward(hidden - 0.1 * step)


class Shapes(Kind):
    """Inputs of one dim and of two, expanded and turned around ones, and none at all."""

    def forward(self, hidden: Tensor) -> Tensor:
        mean = hidden.mean(1, keepdim=True).expand_as(hidden)
        turned = super().forward(hidden.transpose(0, 1)).transpose(0, 1)
        one = self.down(self.up(hidden[0, 0]))
        nothing = self.down(self.up(hidden[:, :0])).sum()
        return turned + super().forward(mean) + super().forward(hidden.flatten(0, 1)).view_as(hidden) + one * 0 + nothing


class Looking(Kind):
    """A table of its own, read twice, with a row that means nothing."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__(width, draw)
        self.table = nn.Embedding(CLASSES, width, padding_idx=draw.choice([None, 2]))

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return super().forward(hidden + self.table(tokens).relu_() + self.table(tokens.flip(1)) ** 2)


class Reading(Kind):
    """A forward that multiplies by a weight that is not its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.linear(F.linear(hidden, self.up.weight), self.down.weight)


KINDS: tuple[Callable[[int, random.Random], nn.Module], ...] = (
    *(Kind, Twice, InPlace, Detached, Normed, Frozen, Experts, Checkpointed, Attentive, Asking, Shapes, Looking, Reading),
)


class Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def kinds_of(seed: int) -> list[str]:
    """Of which kinds the blocks of `model` are."""
    draw = random.Random(seed)
    return [draw.choice(KINDS).__name__ for _ in range(draw.choice([1, 2, 3]))]


def model(seed: int, tied: bool) -> Model:
    """An embedding, one to three blocks, some of which share linears, and a head, tied to the embedding or not."""
    by_name = {kind.__name__: kind for kind in KINDS}
    draw = random.Random(f"model {seed}")
    width = draw.choice([4, 5, 6, 9])
    blocks = [by_name[name](width, draw) for name in kinds_of(seed)]
    if len(blocks) > 1 and draw.random() < 0.3 and all(hasattr(block, "up") for block in (blocks[0], blocks[-1])):
        blocks[-1].up, blocks[-1].down = blocks[0].up, blocks[0].down
    embed, head = Embed(width), nn.Linear(width, CLASSES, bias=draw.random() < 0.5)
    if tied:
        head.weight = embed.table.weight
    return Model([("embed", embed), *((f"block{at}", block) for at, block in enumerate(blocks)), ("head", head)], values)


def values(module: nn.Module, name: str) -> None:
    for one in module.parameters(recurse=False):
        nn.init.normal_(one, std=0.4)
