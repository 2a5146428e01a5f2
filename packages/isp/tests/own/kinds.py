"""Small models of layers that use weights in their own ways: `factory = "kinds:model"`; and their data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sley_core.data.dataset import DataInfo, Field
from sley_core.errors import SleyError
from sley_core.model.layers import Model
from sley_isp import sharded_modules
from sley_isp.sharded_modules import MIN_BYTES
from sley_testing.habits import Block, init
from sley_testing.plans import Tables
from sley_testing.runs import RunRecord, record

CLASSES = 7
POSITIONS = 4
REFUSED = {
    "Penalty": "sharded-weight-read",  # it reads_weight for the gradient of a weight
    "Swapped": "sharded-weight-read",  # it makes another weight of a linear's own
    "Silent": "sharded-weight-read",  # it gives a weight to a function of its own
    "HookedWeights": "model-hook",
    "Assigned": "sharded-weight-read",
    "Writing": "sharded-weight-written",
    "Returning": "sharded-weight-returned",
    "OnContext": "sharded-weight-read",
    "InClosure": "sharded-weight-read",
}
"""By habit, the code of its refusal."""


class Rows:
    """A dataset of four tokens per sample. Some labels are ignored, by torch's index or others."""

    info = DataInfo({"tokens": Field("int64", ids="token"), "labels": Field("int64", ids="label")}, vocab_size=CLASSES)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index + 6)  # so that the depths of ranks differ in each step
        tokens, labels = torch.randint(CLASSES, (2, POSITIONS), generator=generator)
        labels[index % 5 :] = (-100, -1)[index % 2]
        return {"tokens": tokens, "labels": labels}


class Detached(Block):
    """Has a branch without a gradient for its input, and one without any gradient."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.two(self.one(hidden))
        return hidden + self.two(self.one(hidden.detach()).tanh()) + 0.1 * target


class Experts(Block):
    """Routes each token to the expert with the largest score. An expert without tokens does not run."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.gate = nn.Linear(hidden, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = self.two(self.one(hidden)).flatten(0, 1)
        share, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for at, expert in enumerate(self.experts):
            (rows,) = (chosen == at).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * share[rows, None])
        return hidden + out.view_as(hidden)


class Shapes(Block):
    """Calls linears with inputs of one and two dims, expanded, transposed and empty inputs."""

    def forward(self, hidden: Tensor) -> Tensor:
        transposed = self.one(hidden.transpose(0, 1)).transpose(0, 1)
        expanded = self.two(hidden.mean(1, keepdim=True).expand_as(hidden))
        flat = self.one(hidden.flatten(0, 1)).view_as(hidden)
        return transposed.tanh() + expanded + flat + self.one(hidden[0, 0]) * 0 + self.two(hidden[:, :0]).sum()


class Looking(Block):
    """Reads a separate table with a padding row twice."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.table = nn.Embedding(CLASSES, hidden, padding_idx=2)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden + self.one(self.table(tokens).relu_() + self.table(tokens.flip(1)) ** 2).tanh()


class Twice(nn.Linear):
    """A subclass of linears, which reads its weight twice."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden @ self.weight.tanh()


class Stacked(Block):
    """Has the weights of experts in one tensor, norms, a convolution of one position, and a frozen matrix."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.experts = nn.Parameter(torch.randn(3, hidden, hidden) / hidden)
        self.frozen = nn.Parameter(torch.randn(hidden, hidden) / hidden, requires_grad=False)
        self.norm = nn.LayerNorm(hidden)
        self.convolution = nn.Conv1d(hidden, hidden, 1)
        self.twice = Twice(hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        flat = self.norm(self.one(hidden) @ self.frozen)
        chosen = torch.einsum("bsh,ehk->bsek", flat, self.experts).softmax(2).sum(2)
        return hidden + self.two(self.twice(chosen)) + self.convolution(flat.transpose(1, 2)).transpose(1, 2)


class Inner(Stacked):
    """Recomputes a part of itself, calls a part with a transform, and adds a penalty of gradients of its weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        out = checkpoint(super().forward, hidden, use_reentrant=False)
        mapped = torch.func.vmap(self.norm)(self.twice(hidden))
        (gradient,) = torch.autograd.grad((out * self.frozen.sum()).sum(), self.experts, create_graph=True)
        return out + 0.1 * mapped + 0.01 * gradient.square().sum()


class Recurrent(Block):
    """Has an LSTM, which keeps its weights in a list, too, so they stay unsharded."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.recurrent = nn.LSTM(hidden, hidden, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.two(self.recurrent(self.one(hidden))[0])


class Writing(Stacked):
    """Writes to a weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.frozen.mul_(0.5)
        return super().forward(hidden)


class Returning(Stacked):
    """Returns a view of a weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.frozen[None].expand(len(hidden), -1, -1)


class ProductWithContext(torch.autograd.Function):
    """A product whose backward reads the weight from an attribute of `ctx`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return hidden @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.weight.t(), None


class OnContext(Stacked):
    """Keeps a weight on the `ctx` of a function of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(ProductWithContext.apply(hidden, self.frozen))


class InClosure(Stacked):
    """Keeps a weight in a function that the backward calls again."""

    def forward(self, hidden: Tensor) -> Tensor:
        frozen = self.frozen
        return super().forward(checkpoint(lambda value: value @ frozen, hidden, use_reentrant=False))


class Embed(nn.Module):
    """Has a plain embedding, which may be sharded by columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


KINDS = {
    kind.__name__: kind
    for kind in (Detached, Experts, Shapes, Looking, Stacked, Inner, Recurrent, Writing, Returning, OnContext, InClosure)
}


def model(kind: str, width: int, tied: bool) -> Model:
    """Returns three blocks of type `kind` between an embedding and a head. The outer blocks share linears."""
    blocks = [KINDS[kind](width) for _ in range(3)]
    blocks[-1].one, blocks[-1].two = blocks[0].one, blocks[0].two
    embed, head = Embed(width), nn.Linear(width, CLASSES, bias=not tied)
    if tied:
        head.weight = embed.table.weight
    return Model([("embed", embed), *((f"block{at}", block) for at, block in enumerate(blocks)), ("head", head)], init)


STEPS, SAMPLES = 2, 8
"""The number of steps of a run, and of samples in a step."""


def plan(model: Tables, micro: int = 4, weights: Tables | None = None, **changes: Any) -> Tables:
    """Returns the tables of a run of `model` over two ranks. micro: the samples of a microbatch."""
    return {
        "run": {"name": "plain", "steps": STEPS, "device": "cpu", "seed": 1},
        "model": model,
        "data": {"factory": "kinds:Rows"},
        "batch": {"global_size": SAMPLES, "micro_size": micro},
        "optimizer": {"use": "core.sgd", "lr": 0.1},
        "precision": {"compute": "fp64"},
        "parallel": {"dp": 2, "wp": 2},
        "weights": {"use": "isp.communicator", **(weights or {})},
        "limits": {"collective_timeout_s": 10.0},
        **changes,
    }


def kind_plan(kind: str, *args: Any, width: int = 9, tied: bool = False, **changes: Any) -> Tables:
    """Returns the plan of `model(kind, width, tied)`. The other arguments are those of `plan`."""
    return plan({"factory": "kinds:model", "options": {"kind": kind, "width": width, "tied": tied}}, *args, **changes)


def all_batches() -> list[dict[str, Tensor]]:
    """Returns the batches of a run."""
    rows = [[Rows()[index] for index in range(SAMPLES * step, SAMPLES * (step + 1))] for step in range(STEPS)]
    return [{name: torch.stack([row[name] for row in step]) for name in step[0]} for step in rows]


def records_or_codes(
    plans: Sequence[Tables], folder: Path, num_steps: int = 2, batches: Any = None, *, min_bytes: int = MIN_BYTES
) -> list[RunRecord | str]:
    """Returns the record of each run of this rank, or its error code. min_bytes: the size from which weights are sharded."""
    runs: list[RunRecord | str] = []
    sharded_modules.MIN_BYTES = min_bytes
    for tables in plans:
        try:
            runs.append(record(tables, num_steps, folder=folder, batches=batches))
        except SleyError as error:
            runs.append(error.diagnostics[0].code)
    return runs
