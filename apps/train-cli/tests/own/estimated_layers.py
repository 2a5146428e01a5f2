"""Layers of a model of one's own: several tensors cross between them, one of them without a gradient, and some share memory."""

from __future__ import annotations

from torch import Tensor, nn

State = tuple[Tensor, dict[str, Tensor]]


class Embeds(nn.Module):
    """Starts with vectors of the tokens, and which tokens are even."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(256, width)

    def forward(self, tokens: Tensor) -> State:
        """Returns [b, s, width] and what later layers are given."""
        return self.table(tokens), {"even": (tokens % 2 == 0).unsqueeze(-1)}


class Mixes(nn.Module):
    """Scales the even tokens' vectors and adds a wide GELU of them, as views of one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 6 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, state: State) -> State:
        """Returns a state of the same shapes."""
        given, facts = state
        gate, up = self.up(self.norm(given)).chunk(2, dim=-1)
        return given + self.down(gate.sigmoid() * nn.functional.gelu(up)).where(facts["even"], 0.5), facts


class Ends(nn.Module):
    """Logits of the next tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 256)

    def forward(self, state: State) -> Tensor:
        """Returns [b, s, 256]."""
        logits: Tensor = self.head(state[0])
        return logits


def layers(width: int = 128, depth: int = 3) -> list[tuple[str, nn.Module]]:
    """Returns the layers of the model."""
    return [("embeds", Embeds(width)), *((f"mixes{at}", Mixes(width)) for at in range(depth)), ("ends", Ends(width))]
