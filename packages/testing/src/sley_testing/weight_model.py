"""Makes the model, data, loss and plan with which `weight_contract` tries a weight communicator."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field
from sley_testing.contract_model import SQUARES, Samples, Uneven, contract_plan

VOCABULARY, WIDTH, SEQUENCE = 11, 6, 3
"""None divides by 4, nor VOCABULARY by 2: shards are padded."""


class Data(Samples):
    """Tokens, and what the model should say of each."""

    info = DataInfo(
        {"tokens": Field("int64", 0, 1, "token"), "y": Field("float64", 0, 1)}, vocab_size=VOCABULARY, sequence=SEQUENCE
    )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = self.generator(index)
        tokens = torch.randint(VOCABULARY, (SEQUENCE,), generator=generator)
        y = torch.randn(SEQUENCE, VOCABULARY, generator=generator, dtype=torch.float64)
        return {"tokens": tokens, "y": y}


class Fragile(nn.Module):
    """Hands on what it is given, and raises where it is asked to."""

    breaks_in: ClassVar[Literal["forward", "backward"] | None] = None

    def forward(self, hidden: Tensor) -> Tensor:
        if Fragile.breaks_in == "forward" and hidden.requires_grad:
            raise _broken()
        if Fragile.breaks_in == "backward" and hidden.requires_grad:
            hidden.register_hook(_break)  # type: ignore[no-untyped-call]  # torch's
        return hidden


def _broken() -> ValueError:
    return ValueError("the contract's failing step")


def _break(_: Tensor) -> None:
    raise _broken()


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.table(tokens)
        return hidden


class Block(Uneven):
    """`Uneven` behind a norm, and two linears with a place between them at which a step may fail."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 9, bias=False)
        self.fragile = Fragile()
        self.narrow = nn.Linear(9, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        own = super().forward(self.norm(hidden)).tanh()
        output: Tensor = hidden + self.narrow(self.fragile(self.wide(own)).tanh())
        return output


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.out(self.norm(hidden))
        return output


def layers() -> list[tuple[str, nn.Module]]:
    """Returns the layers, by name; the first and the last share their weight."""
    embed, head = Embed(), Head()
    head.out.weight = embed.table.weight
    return [("embed", embed), ("first", Block()), ("second", Block()), ("head", head)]


def tables(weights: dict[str, Any] | None, wp: int, global_size: int, micro_size: int, **changes: Any) -> dict[str, Any]:
    """Returns the contract's plan, as tables, with its weights over `wp` ranks by the communicator `weights`; None holds them
    whole.
    """
    found = contract_plan(
        __name__,
        loss=SQUARES,
        batch={"global_size": global_size, "micro_size": micro_size},
        optimizer={"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5},
        evaluation={"every": 99, "steps": 2},
    )
    return found | ({"parallel": {"dp": "auto", "wp": wp}, "weights": weights} if weights else {}) | changes
