"""Layers that leave tensors in reference cycles, which only Python's collector frees."""

from __future__ import annotations

from typing import Any

from asking_layers import Embeds
from torch import Tensor, nn


class Keeps(nn.Module):
    """Keeps a result beside itself in a list that has itself too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 256)

    def forward(self, given: Tensor) -> Tensor:
        """Returns logits."""
        kept: list[Any] = [given * 2]
        kept.append(kept)
        logits: Tensor = self.head(kept[0])
        return logits


def layers() -> list[tuple[str, nn.Module]]:
    """A model whose second layer leaves [b, s, 8] in a cycle, for each micro-batch."""
    return [("embeds", Embeds(asks=False)), ("keeps", Keeps())]
