"""Models whose middle layer has one habit each, as `verify --plain` names them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sley_core.data.dataset import DataInfo
from sley_testing.habits import Embed

HIDDEN = 8


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden).tanh()


class Numpy(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        kept = torch.from_numpy(np.random.rand(*hidden.shape[:2]) < 0.5)
        return hidden + self.inner(hidden).tanh() * kept[..., None]


class Generator(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(3)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.chance.random()


class Unseeded(Middle):
    """The only one of which no layout, nor a plain loop, has the same numbers twice."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * float(np.random.default_rng().random())


class Parts(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        one, two = hidden.unsafe_chunk(2, -1)
        return self.inner(torch.cat([two, one], -1))


class Attribute(Middle):
    largest = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        self.largest = max(0.9 * self.largest, float(hidden.detach().abs().max()))
        return super().forward(hidden / self.largest)

    def get_extra_state(self) -> Any:
        return self.largest

    def set_extra_state(self, state: Any) -> None:
        self.largest = state


class Weight(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.data.clamp_(-0.2, 0.2)
        return super().forward(hidden)


class Buffer(Middle):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(hidden)


class Field(Middle):
    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        labels[:, :2] = -100
        return super().forward(hidden)


class Hook(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        result = hidden * 1.0
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient.clamp_(-1e-3, 1e-3))
        return super().forward(hidden) + result


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, module: nn.Linear) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(hidden)
        return hidden @ module.weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        weight = ctx.module.weight
        made = gradient.flatten(0, 1).t() @ hidden.flatten(0, 1)
        weight.grad = made if weight.grad is None else weight.grad + made
        return gradient @ weight, None


class Assigned(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = Fused.apply(hidden, self.inner)
        return hidden + (made + self.inner.bias).tanh()


class Evaluated(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.eval()


class InPlace(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden += 1
        return super().forward(hidden)


class Fails(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        raise ValueError(f"no {hidden.shape[-1]} of these")


class Plain(Middle):
    """Nothing to name, dropout included."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.5, self.training)


class Indexed(Middle):
    """torch writes in place in the backward of these, on tensors of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        part = self.inner(hidden)
        part[:, :1] = 0
        pooled = nn.functional.max_pool1d(hidden, 3, 1, 1)
        return super().forward(part.cumprod(-1) + pooled + hidden.masked_fill(hidden > 0, 0).sort(-1)[0])


class Recomputed(Middle):
    """Its forward, which writes on a tensor of its own, runs again within the backward."""

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = checkpoint(lambda given: self.inner(given).relu_(), hidden, use_reentrant=False)
        return hidden + made


class Rounded(Middle):
    """Its output depends on the kernel by a unit in the last place."""

    def forward(self, hidden: Tensor) -> Tensor:
        made = super().forward(hidden)
        return made if torch.is_grad_enabled() else (made * 0.7) * (1 / 0.7)


class DictEmbed(Embed):
    def forward(self, tokens: Tensor) -> Any:
        return {"hidden": super().forward(tokens)}


class Dict(Middle):
    def forward(self, given: Any) -> Any:
        given["hidden"] = super().forward(given["hidden"])
        return given


class DictHead(nn.Linear):
    def forward(self, given: Any) -> Tensor:
        return super().forward(given["hidden"])


def model(data: DataInfo, habit: str) -> list[tuple[str, nn.Module]]:
    assert data.vocab_size is not None
    middle: nn.Module = globals()[habit]()
    if habit == "Dict":
        return [("embed", DictEmbed(data.vocab_size, HIDDEN)), ("middle", middle), ("head", DictHead(HIDDEN, data.vocab_size))]
    return [("embed", Embed(data.vocab_size, HIDDEN)), ("middle", middle), ("head", nn.Linear(HIDDEN, data.vocab_size))]
