"""Layers are in training mode before the first step, as after `model.train()`, and what was frozen on purpose is not."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from sley_core.model.buffers import notes_of, train
from sley_core.model.layers import Model


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


def test_modes_within_what_stays_are_its_own() -> None:
    tower = block().eval().requires_grad_(False)
    tower[1].train()
    model = Model([Wrap(tower), block()])
    train(model)
    assert tower[1].training
    assert not tower[0].training


@pytest.mark.parametrize("patterns", [(), ("*.running_mean", "*.running_var", "*.num_batches_tracked")])
def test_a_batch_norm_of_a_pretrained_model_is_trained_where_each_rank_may_have_its_own(patterns: tuple[str, ...]) -> None:
    model = Model([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()], per_rank_buffers=patterns)
    train(model)
    assert evaluated(model) == ([] if patterns else ["0.1"])
