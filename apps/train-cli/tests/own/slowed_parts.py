"""A model, data and an optimizer. The environment variable SLEY_TEST_SLOW makes one of them slow on one rank.

{"kind": "backward", "rank": 1, "layer": 2, "seconds": 0.05}: the backward of the third block takes 50 ms more in each step.
kind: data, forward, backward, optimizer or none.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataContext, DataInfo, Field
from sley_testing.habits import Embed

VARIABLE = "SLEY_TEST_SLOW"
HIDDEN, SEQUENCE, VOCABULARY, NUM_BLOCKS = 64, 32, 64, 4
NUM_MICROS = 2
"""The number of microbatches of a rank in a step."""


class Slow:
    """The slow part of this rank. A process may run several cases."""

    def __init__(self) -> None:
        case = json.loads(os.environ.get(VARIABLE, "{}"))
        is_slow = bool(case) and int(os.environ.get("RANK", "0")) == case["rank"]
        self.kind = case["kind"] if is_slow else "none"
        self.layer = case.get("layer", -1)
        self.seconds = case.get("seconds", 0.0)

    def is_at(self, kind: str, layer: int) -> bool:
        return self.kind == kind and self.layer == layer


class Late(torch.autograd.Function):
    """Returns its input, and sleeps in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, index: int, slow: Slow) -> None:
        super().__init__()
        self.index, self.slow = index, slow
        self.inner = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.outer = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        slow = self.slow
        output = hidden + self.outer(torch.relu(self.inner(hidden)))
        if not self.training:
            return output
        if slow.is_at("forward", self.index):
            time.sleep(slow.seconds / NUM_MICROS)
        return Late.apply(output, slow.seconds / NUM_MICROS) if slow.is_at("backward", self.index) else output  # type: ignore[no-any-return, no-untyped-call]


def layers() -> list[tuple[str, nn.Module]]:
    slow = Slow()
    blocks: list[tuple[str, nn.Module]] = [(f"blocks.{index}", Block(index, slow)) for index in range(NUM_BLOCKS)]
    return [("embed", Embed(VOCABULARY, HIDDEN)), *blocks, ("head", nn.Linear(HIDDEN, VOCABULARY))]


class Samples:
    """Samples of ascending tokens. On a rank with slow data, each sample takes its share of the seconds."""

    def __init__(self, context: DataContext) -> None:
        self.slow = Slow()
        self.info = DataInfo({"tokens": Field("int64", 0, 1), "labels": Field("int64", 0, 1)}, VOCABULARY, SEQUENCE)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.slow.kind == "data":
            time.sleep(self.slow.seconds / NUM_MICROS)
        tokens = (torch.arange(SEQUENCE + 1) + index) % VOCABULARY
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Sgd(torch.optim.SGD):
    """Sleeps on a rank with a slow optimizer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slow = Slow()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.slow.kind == "optimizer":
            time.sleep(self.slow.seconds)
        return super().step(closure)
