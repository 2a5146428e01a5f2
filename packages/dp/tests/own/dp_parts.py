"""Models, data and a loss of the tests' plans: `factory = "dp_parts:mlp"`."""

import os

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sley_core.data.dataset import DataContext, DataInfo, Field
from sley_testing.runs import record

WIDTH = 6
NUM_SAMPLES = 40


def sample(index: int) -> dict[str, Tensor]:
    """Returns WIDTH numbers, a target, and a flag that is 1 for odd samples."""
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": y, "flag": torch.tensor(index % 2, dtype=torch.float64)}


def batch(*indices: int) -> dict[str, Tensor]:
    """Returns the samples of these indices as one batch."""
    rows = [sample(index) for index in indices]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Points:
    """A dataset of `num_samples` samples."""

    info = DataInfo({"x": Field("float64"), "y": Field("float64"), "flag": Field("float64")})

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(index)


def split(context: DataContext) -> Points:
    """Returns the same samples for training and evaluation."""
    del context
    return Points()


class Inputs(nn.Linear):
    """The first layer, which reads `x` in the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).tanh()


class Twice(nn.Module):
    """Uses one module twice under recomputation."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        once = checkpoint(self.shared, hidden, use_reentrant=self.reentrant)
        return checkpoint(self.shared, once.tanh(), use_reentrant=self.reentrant)


class Sometimes(nn.Module):
    """`never` is used by no sample, and `flagged` only by samples with the flag."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.flagged = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, flag: Tensor) -> Tensor:
        output = self.always(hidden)
        if flag.any():
            output = output + flag[:, None].to(hidden.dtype) * self.flagged(hidden)
        return output


class Branches(nn.Module):
    """Two branches of equal size. On even ranks their backwards run in the order of the model instead of the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        if int(os.environ.get("RANK", 0)) % 2:
            left = self.left(hidden)
            return left - self.right(hidden)
        right = self.right(hidden)
        return self.left(hidden) - right


class Odd(nn.Module):
    """Has parameters of unusual sizes: a scalar, an empty one, seven numbers, a wide matrix. One is frozen, and one is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.seven = nn.Parameter(torch.linspace(-0.5, 0.5, 7))
        self.still = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)
        self.up = nn.Linear(WIDTH, 37)
        self.down = nn.Linear(37, WIDTH)
        self.same = self.down

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.up(hidden).tanh() * self.scale + self.seven.mean() + self.still.sum() + self.nothing.sum()
        return hidden + self.same(wide)


def odd() -> list[tuple[str, nn.Module]]:
    return [("first", Inputs(WIDTH, WIDTH)), ("a", Odd()), ("b", Odd()), ("last", nn.Linear(WIDTH, WIDTH))]


def mlp(depth: int = 3) -> list[tuple[str, nn.Module]]:
    """Returns the linears `first`, `layer0`, `layer1`, ... of equal sizes."""
    return [("first", Inputs(WIDTH, WIDTH)), *((f"layer{at}", nn.Linear(WIDTH, WIDTH)) for at in range(depth))]


def twice(reentrant: bool) -> list[nn.Module]:
    return [Inputs(WIDTH, WIDTH), Twice(reentrant), nn.Linear(WIDTH, WIDTH)]


def sometimes() -> list[tuple[str, nn.Module]]:
    return [("first", Inputs(WIDTH, WIDTH)), ("some", Sometimes())]


def branches() -> list[nn.Module]:
    return [Inputs(WIDTH, WIDTH), Branches(), Branches()]


class OnlyFlagged(nn.Linear):
    """Returns zeros that depend on no weight for samples without the flag, so a backward may reach no parameter."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        if not flag.any():
            return torch.zeros_like(x).requires_grad_()
        return flag[:, None] * super().forward(x.to(self.weight.dtype))


def only_flagged() -> list[tuple[str, nn.Module]]:
    return [("only", OnlyFlagged())]


class Unusual(torch.optim.Optimizer):
    """Does what a plain loop allows: assigns `p.data`, keeps the last gradient, looks at dims, and counts its steps."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    before = self.state[parameter].get("before", gradient)
                    self.state[parameter]["before"] = gradient
                    rate = group["lr"] * parameter.ndim / (2 * self.count)
                    parameter.data = parameter.data - rate * (1.5 * gradient - 0.5 * before)


def record_plans(plans, folder, num_steps=2, batches=None):
    """Records all plans in the same ranks, since starting ranks takes longer than a small run."""
    return [record(tables, num_steps, folder=folder, batches=batches) for tables in plans]
