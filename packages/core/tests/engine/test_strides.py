"""Parameters that do not lie in memory in the order of their dims: transposed ones, convolutions in channels-last."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan


class Layer(nn.Module):
    """Words to logits, through a matrix that is the transpose of another, and a convolution in channels-last."""

    def __init__(self, *, contiguous: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 6)
        self.across = nn.Parameter(torch.linspace(-0.5, 0.5, 24).view(4, 6).t())
        self.mix = nn.Conv2d(4, 4, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)
        self.out = nn.Linear(4, 256)
        if contiguous:
            for parameter in self.parameters():
                parameter.data = parameter.detach().contiguous()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inner = self.table(tokens) @ self.across
        mixed = self.mix(inner.transpose(1, 2).unsqueeze(2)).squeeze(2).transpose(1, 2)
        logits: torch.Tensor = self.out(inner + mixed)
        return logits


def trained(tables, folder, contiguous, monkeypatch):
    made = ModuleType("strided")
    made.layers = lambda: [Layer(contiguous=contiguous)]
    monkeypatch.setitem(sys.modules, "strided", made)
    with World.alone("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for _ in range(3):
            run.step()
        return {param.name: param.parameter.detach().clone() for param in run.registry}


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizer", ["core.adamw", "core.sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("handlers", [[], [{"use": "core.each"}]])
def test_the_order_in_memory_changes_nothing(texts, monkeypatch, optimizer, precision, handlers):
    """torch's fused optimizers step weights by gradients of other strides without an error, and wrongly."""
    tables = small_plan(
        model={"factory": "strided:layers"},
        optimizer={"use": optimizer, "lr": 0.05},
        precision={"compute": precision},
        gradient_handlers=handlers,
    )
    wanted = trained(tables, texts, True, monkeypatch)
    found = trained(tables, texts, False, monkeypatch)
    for name, weight in wanted.items():
        assert torch.equal(weight, found[name]), name
