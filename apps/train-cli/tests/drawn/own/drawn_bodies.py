"""What a layer computes between taking and handing on: `body(hidden, tokens)`, as such things are mostly written."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.model.attention import Attention


class Linear(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=bias)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.inner(hidden)


class Bare(Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, bias=False)


class Feed(nn.Module):
    """A residual block as they are mostly written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Sequential(nn.Module):
    """Torch's own recipe, activation in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width)
        )

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.inner(hidden)


class AddsInPlace(nn.Module):
    """`x = lin(h); x += h`, and what follows in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        out = self.one(hidden)
        out += hidden
        out = self.two(F.silu(out))
        out.mul_(0.5)
        out[..., 0] += 1.0
        return out


class BeginsInPlace(nn.Module):
    """Pre-activation that writes on what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        hidden *= 0.75
        return self.inner(F.leaky_relu_(hidden, 0.1))


class Mixes(nn.Module):
    """Attention written out; positions meet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        q, k, v = self.qkv(hidden).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1), -torch.inf)
        return hidden + self.out(scores.softmax(-1) @ v)


class Attends(nn.Module):
    """Heads through the small module that sequence parallelism knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.attend = Attention()

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)) for part in self.qkv(hidden).chunk(3, -1))
        return hidden + self.out(self.attend(q, k, v).flatten(-2))


class Convolves(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.inner(hidden.transpose(1, 2)).transpose(1, 2) + hidden


class Recurs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.GRU(width, width, batch_first=True)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.inner(hidden)[0] + hidden


class Identity(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return hidden


class Viewed(nn.Module):
    """Its output, and the gradient of its input, are views of what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return hidden.transpose(0, 1).flatten(0, 1).unflatten(0, hidden.shape[1::-1]).transpose(0, 1)


class Scales(nn.Module):
    """Parameters and buffers of its own; a constant that is no part of its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.shift = nn.Parameter(torch.empty(1, width))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("base", torch.full((width,), 0.25), persistent=False)
        self.reset_parameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.constant_(self.shift, 0.125)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return hidden * (self.gain * self.scale) + self.shift + self.base


class OnItsOwn(nn.Module):
    """Values written where the parameters are made; there is no `reset_parameters`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.0, width))
        self.turn = nn.Parameter(torch.eye(width).roll(1, 0))

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return (hidden @ self.turn) * self.gain
