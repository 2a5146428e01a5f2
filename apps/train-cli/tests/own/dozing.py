"""Layers that sleep instead of computing, so that ranks on few cores are like as many devices: `factory = "dozing:layers"`."""

import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field
from sley_core.engine.direct import WeightQueue

WIDTH = 64


def sleep(seconds: float, samples: Tensor) -> None:
    """Sleeps for `seconds` per sample. Checks and estimates, which call the layers with meta or fake tensors, need not wait."""
    if type(samples) is Tensor and not samples.is_meta:
        time.sleep(seconds * len(samples))


class Sleep(torch.autograd.Function):
    """The identity, which takes time: in its backward that of I, and then, or later, that of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, layer: "Dozer") -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)  # without saved tensors nothing would be recomputed
        sleep(layer.seconds, x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        assert ctx.saved_tensors  # reading them recomputes them
        seconds, queue = ctx.layer.seconds, Dozer.queue
        sleep(seconds, gradient)
        if queue is not None and queue.is_collecting:
            queue.put(lambda: sleep(seconds, gradient))
        else:
            sleep(seconds, gradient)
        return gradient, None, None


class Dozer(nn.Module):
    """Sleeps for `seconds` per sample. queue: where this process defers the sleep of a W."""

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
    dozers = [Dozer(layer_seconds, dropout) for layer_seconds in seconds]
    return [*dozers, *([Picky(WIDTH, WIDTH)] if picky else [])]


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
