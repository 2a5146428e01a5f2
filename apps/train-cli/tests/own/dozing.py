"""Layers that compute by sleeping, so that ranks on few cores are like as many devices: `factory = "dozing:layers"`."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field
from sley_core.engine.direct import WeightQueue

WIDTH = 64


class Sleep(torch.autograd.Function):
    """The identity, which takes time: in its backward that of I, and then, or later, that of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, layer: Dozer) -> Tensor:
        ctx.layer, ctx.num = layer, len(x)
        ctx.save_for_backward(x)  # without anything saved nothing would be recomputed
        time.sleep(layer.seconds * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        assert ctx.saved_tensors  # asked for, they are recomputed
        seconds = ctx.layer.seconds * ctx.num
        time.sleep(seconds)
        queue = Dozer.queue
        if queue is not None and queue.is_collecting:
            queue.put(lambda: time.sleep(seconds))
        else:
            time.sleep(seconds)
        return gradient, None, None


class Dozer(nn.Module):
    """Takes `seconds` for each sample, as `Sleep` does. queue: where this process defers the sleep of a W."""

    queue: ClassVar[WeightQueue | None] = None

    def __init__(self, seconds: float, dropout: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.anchor = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sleep.apply(x, self.anchor, self)  # type: ignore[no-untyped-call]
        return self.dropout(result) * self.anchor if self.dropout.p else result


class Picky(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this layer takes nothing")


def layers(seconds: list[float], dropout: float = 0.0, picky: bool = False) -> list[nn.Module]:
    return [*(Dozer(each, dropout) for each in seconds), *([Picky(WIDTH, WIDTH)] if picky else [])]


class Samples:
    info = DataInfo({"x": Field("float32")})

    def __len__(self) -> int:
        return 1 << 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((WIDTH,), index % 7 / 8)}


class SumOfSquares:
    fields = ()

    def weight(self, batch: Any) -> float:
        return float(len(batch["x"]))

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()
