from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.model.buffers import BufferWatch
from sley_core.model.layers import Layer, Model


class Replaces(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("constant", torch.ones(3), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return hidden


def train(layers: tuple[Layer, ...]) -> None:
    hidden = torch.randn(4, 3)
    for layer in layers:
        hidden = layer.module(hidden)
    hidden.sum().backward()


def test_what_training_writes_is_refused_by_name() -> None:
    model = Model([("norm", nn.BatchNorm1d(3)), ("count", Replaces()), ("last", nn.LayerNorm(3))])
    watch = BufferWatch(model.layers)
    assert watch.written() == []
    watch.check()
    train(model.layers)
    assert watch.written() == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "count.seen"]
    with pytest.raises(PlanError, match="writes 4 buffers of BatchNorm1d and Replaces") as raised:
        watch.check()
    (found,) = raised.value.diagnostics
    assert found.code == "model-buffer-written"
    assert "(`norm.running_mean`, `norm.running_var`, `norm.num_batches_tracked`, ...)" in found.message
    patterns = '"*.running_mean", "*.running_var", "*.num_batches_tracked", "*.seen"'
    assert f"`sley_core.api.model.Model(layers, per_rank_buffers=({patterns},))`" in found.hint


def test_buffers_declared_per_rank_may_be_written() -> None:
    model = Model([("norm", nn.BatchNorm1d(3)), ("count", Replaces())], per_rank_buffers=("norm.*", "*.seen"))
    watch = BufferWatch(model.layers, model.per_rank_buffers)
    train(model.layers)
    watch.check()


def test_a_constant_may_hold_nan() -> None:
    module = nn.Identity()
    module.register_buffer("unknown", torch.tensor([1.0, torch.nan]))
    BufferWatch(Model([module]).layers).check()


def test_evaluation_writes_nothing() -> None:
    model = Model([("norm", nn.BatchNorm1d(3).eval())])
    watch = BufferWatch(model.layers)
    train(model.layers)
    watch.check()
