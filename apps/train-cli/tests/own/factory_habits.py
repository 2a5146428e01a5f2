"""Factories of different habits, whose models a run must start from as plain PyTorch makes them."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.api.model import Attention, Model

HIDDEN = 8


class Embed(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.table(tokens)
        return embedded


class Block(nn.Module):
    """Draws parameters, buffers and an attribute in several ways; its weights are not those of torch's initialisers."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0 + random.random() + float(np.random.rand())
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.gain = nn.Parameter(torch.randn(HIDDEN) * 0.1 + self.scale)
        self.register_buffer("noise", torch.randn(HIDDEN))
        self.register_buffer("start", self.qkv.weight.detach().norm(), persistent=False)
        self.shift = torch.rand(HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        nn.init.trunc_normal_(self.out.weight, std=0.02)
        self.core = Attention()

    def forward(self, hidden: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)) for part in self.qkv(hidden).chunk(3, -1))
        mixed = self.core(q, k, v, cu_seqlens=cu_seqlens).flatten(-2)
        out: Tensor = hidden + self.out(mixed) * self.gain + self.noise + self.shift
        return out


class Head(nn.Module):
    def __init__(self, vocab_size: int, table: nn.Embedding | None = None) -> None:
        super().__init__()
        self.output = nn.Linear(HIDDEN, vocab_size)
        if table is not None:
            self.output.weight = table.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(hidden)
        return logits


def listed(vocab_size: int) -> list[nn.Module]:
    return [Embed(vocab_size), Block(), Block(), Head(vocab_size)]


def tied(vocab_size: int) -> list[nn.Module]:
    embed, shared = Embed(vocab_size), nn.Linear(HIDDEN, HIDDEN)
    blocks = [Block(), Block()]
    for block in blocks:
        block.out = shared
    return [embed, *blocks, Head(vocab_size, embed.table)]


def sequential(vocab_size: int) -> nn.Sequential:
    """All of it is initialised anew at the end."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)

    return nn.Sequential(*listed(vocab_size)).apply(init)


def loaded(vocab_size: int, path: str) -> list[nn.Module]:
    whole = nn.ModuleList(listed(vocab_size))
    whole.load_state_dict(torch.load(path))
    whole[1].requires_grad_(False)
    return list(whole)


def computed(vocab_size: int) -> list[nn.Module]:
    """Reads values, which cannot be done on meta; is narrow; and has weights that are computed from others."""
    layers = listed(vocab_size)
    nn.init.constant_(layers[1].gain, layers[2].gain.max().item())  # type: ignore[arg-type, union-attr]
    nn.utils.parametrizations.weight_norm(layers[2].qkv)  # type: ignore[arg-type]
    return [layer.bfloat16() for layer in layers]


def init_by_name(module: nn.Module, name: str) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5 if name.endswith("out") else 0.02)


def initialised(vocab_size: int) -> Model:
    return Model(tied(vocab_size), init_by_name)


class Functional(nn.Module):
    """No layer of it holds what it needs as anything but a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(HIDDEN, HIDDEN) for _ in range(2)])

    def forward(self, hidden: Tensor) -> Tensor:
        for weight in self.weights:
            hidden = F.linear(hidden, weight)
        return hidden


def built(vocab_size: int) -> Model:
    """Each rank makes its own layers alone."""
    layers = [
        ("embed", lambda: Embed(vocab_size)),
        ("block", Block, 2),
        ("functional", Functional),
        ("head", lambda: Head(vocab_size)),
    ]

    return Model(layers, init_by_name, ties=[("embed.table.weight", "head.output.weight")])
