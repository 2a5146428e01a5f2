"""Models whose last layer ends in a linear, and losses that scale the cross-entropy."""

from typing import Any

import torch
from torch import Tensor, nn

from sley_core.losses.cross_entropy import CrossEntropy
from sley_testing.habits import Embed


class Head(nn.Module):
    """A linear with a bias, and a change of its logits."""

    def __init__(self, hidden: int, vocab_size: int, change: str) -> None:
        super().__init__()
        self.output = nn.Linear(hidden, vocab_size)
        self.change = change

    def forward(self, hidden: Tensor) -> Any:
        logits = self.output(hidden)
        match self.change:
            case "soft cap":
                return 0.5 * (torch.tanh(logits / 2.0) * 2.0) * 3
            case "method":
                return logits.div(2.0).tanh()
            case "mean":
                return logits - logits.mean(-1, keepdim=True)
            case "product":
                return logits * hidden.mean()
            case _:
                return logits


def layers(data: Any, change: str = "", two: bool = False) -> list[tuple[str, nn.Module]]:
    width = 16
    head: Any = nn.Linear(width, data.vocab_size) if change == "linear" else Head(width, data.vocab_size, change)
    if two:
        head = nn.Sequential(nn.Linear(width, width), head)
    return [("embed", Embed(data.vocab_size, width)), ("block", nn.Linear(width, width)), ("head", head)]


class Halved(CrossEntropy):
    """A loss that scales the cross-entropy, which a run with chunks must refuse."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output, batch) / 2
