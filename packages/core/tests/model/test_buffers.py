"""Layers are in training mode before the first step, as after `model.train()`, and what was frozen on purpose is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from sley_core.errors import PlanError
from sley_core.model.buffers import BufferWatch, notes_of, train
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


def train_once(layers: tuple[Layer, ...]) -> None:
    hidden = torch.randn(4, 3)
    for layer in layers:
        hidden = layer.module(hidden)
    hidden.sum().backward()


def test_what_training_writes_is_refused_by_name() -> None:
    model = Model([("norm", nn.BatchNorm1d(3)), ("count", Replaces()), ("last", nn.LayerNorm(3))])
    watch = BufferWatch(model.layers)
    assert watch.written() == []
    watch.check()
    train_once(model.layers)
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
    train_once(model.layers)
    watch.check()


class Own(nn.Module):
    """Keeps its tower in evaluation mode, as PyTorch's users do."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.drop = nn.Dropout()

    def train(self, mode: bool = True) -> Own:
        super().train(mode)
        self.tower.eval()
        return self


class Wrap(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.LayerNorm(2))


def evaluated(model: Model) -> list[str]:
    return [
        name for layer in model.layers for name, module in layer.module.named_modules(prefix=layer.name) if not module.training
    ]


@pytest.mark.parametrize(
    "layers",
    [
        [block().eval(), block().eval()],
        [block().eval(), block()],
        [Wrap(block().eval()), block()],
        [Wrap(block().eval().requires_grad_(False)).eval(), block().eval()],
        [Wrap(nn.Dropout().eval()), block()],
    ],
    ids=["pretrained", "with a new head", "wrapped", "frozen within a pretrained one", "without parameters"],
)
def test_a_pretrained_model_is_trained(layers: list[nn.Module]) -> None:
    model = Model(copy.deepcopy(layers))
    train(model)
    assert evaluated(model) == []
    assert notes_of(model.layers) == []


def test_what_was_frozen_on_purpose_stays_in_evaluation_mode() -> None:
    tower, norm = Wrap(block().eval().requires_grad_(False)), Wrap(nn.BatchNorm1d(2).eval())
    model = Model([("tower", tower), ("norm", norm), ("own", Own()), ("frozen", block().eval().requires_grad_(False))])
    train(model)
    kept = ("tower.inner", "norm.inner", "own.tower", "frozen")
    assert all(name.startswith(kept) for name in evaluated(model))
    assert set(kept) <= set(evaluated(model))
    assert notes_of(model.layers) == [
        "stays in evaluation mode, as the factory left it: tower.inner, norm.inner, own.tower and 1 more"
    ]


@pytest.mark.parametrize("patterns", [(), ("*.running_mean", "*.running_var", "*.num_batches_tracked")])
def test_a_batch_norm_of_a_pretrained_model_is_trained_where_each_rank_may_have_its_own(patterns: tuple[str, ...]) -> None:
    model = Model([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()], per_rank_buffers=patterns)
    train(model)
    assert evaluated(model) == ([] if patterns else ["0.1"])
