"""A model whose linears and embedding are called with `input=`, as torch names it."""

from __future__ import annotations

from torch import Tensor, nn

WIDTH = 6
CLASSES = 4


class Named(nn.Module):
    """Calls what it holds by name."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, hidden: Tensor) -> Tensor:
        return self.held(input=hidden)


class Embed(Named):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


def layers() -> list[tuple[str, nn.Module]]:
    embed = Embed(nn.Embedding(CLASSES, WIDTH))
    return [("embed", embed), ("middle", Named(nn.Linear(WIDTH, WIDTH))), ("head", Named(nn.Linear(WIDTH, CLASSES)))]
