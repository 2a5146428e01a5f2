"""A model with a layer that waits for what does not come."""

from __future__ import annotations

import threading

from torch import Tensor, nn


class Waits(nn.Module):
    """Vectors of the tokens, the first time after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.table = nn.Embedding(256, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns [b, s, 8]."""
        threading.Event().wait(self.seconds)
        self.seconds = 0.0
        vectors: Tensor = self.table(tokens)
        return vectors


def layers(seconds: float) -> list[tuple[str, nn.Module]]:
    """A model that waits in its first forward."""
    return [("waits", Waits(seconds)), ("head", nn.Linear(8, 256))]
