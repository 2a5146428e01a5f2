"""Defines a model with a layer that reads the values of tensors."""

from __future__ import annotations

from torch import Tensor, nn


class Embeds(nn.Module):
    """Embeds tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns [b, s, 8]."""
        vectors: Tensor = self.table(tokens)
        return vectors


class Asks(nn.Module):
    """Clamps its input if values are large."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 256)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits."""
        logits: Tensor = self.head(hidden.clamp(max=1.0) if hidden.abs().max() > 1 else hidden)
        return logits


def layers() -> list[tuple[str, nn.Module]]:
    """Returns the layers of the model."""
    return [("embeds", Embeds()), ("asks", Asks())]
