"""What a layer may compute that needs care: uses that depend on the data, frozen parts, weights read without their module."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from drawn_bodies import Feed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Counts(nn.Module):
    """Uses a linear as often as the data says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for _ in range(1 + int(tokens[0, 0]) % 3):
            hidden = hidden + self.inner(hidden).tanh()
        return hidden


class Chooses(nn.Module):
    """One of two linears, or neither."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        choice = int(tokens[0, -1]) % 3
        return hidden if choice == 0 else self.one(hidden) if choice == 1 else hidden - self.two(hidden)


class Twice(nn.Module):
    """One module used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.inner(self.norm(self.inner(self.norm(hidden)).tanh()))


class Checkpoints(Feed):
    """Recomputes by itself."""

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return checkpoint(super().forward, hidden, tokens, use_reentrant=False)


class Adapts(nn.Module):
    """A frozen linear with a small trained pair beside it, which begins as nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)
        nn.init.normal_(self.down.weight, std=0.02)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.base(hidden) + 4 * self.up(self.down(hidden))


class HalfFrozen(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.inner.weight.requires_grad_(False)
        self.other = nn.Linear(width, width)
        self.other.bias.requires_grad_(False)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.other(self.inner(hidden).tanh())


class Reads(nn.Module):
    """Uses a linear's weight without calling it, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return F.linear(self.inner(hidden).tanh(), self.inner.weight.t()) / self.inner.weight.shape[0] ** 0.5


class Turned(nn.Module):
    """A matrix of its own, applied from the other side: what ties a linear to its transpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return hidden @ self.weight


class Detaches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return hidden + self.inner(hidden.detach())


class CutsOff(Detaches):
    """Nothing before it is trained."""

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.inner(hidden.detach())


class Broadcasts(nn.Module):
    """The gradient of its inner tensors is expanded memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.inner(hidden).sum(-1, keepdim=True).expand_as(hidden) / 4 + hidden


class Unused(nn.Module):
    """A linear that nobody calls, and one of which the result is dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.never = nn.Linear(width, width)
        self.dropped = nn.Linear(width, width)
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        self.dropped(hidden)
        return self.inner(hidden)


class Normed(nn.Module):
    """torch's parametrised weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.inner(hidden)


class NormedByHook(nn.Module):
    """Its older form, whose `weight` is no parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.inner = nn.utils.weight_norm(nn.Linear(width, width))

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        return self.inner(hidden)


class Raises(nn.Module):
    """For the test of the tests."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        raise ValueError("on purpose")
