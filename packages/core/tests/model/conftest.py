"""What the tests of models share: the fields of token data, and a build without a plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_core.generators import seeded_as_plain
from sley_core.model.layers import Model
from sley_testing import plans

sys.path.append(str(Path(__file__).parent / "own"))  # modules of tests import from there while they are collected
EXAMPLES = Path(__file__).parents[4] / "examples" / "models"


@pytest.fixture
def info() -> DataInfo:
    return plans.TOKENS


@pytest.fixture
def build() -> Callable[..., Model]:
    """`build(function, seed=0)`: the model of `function(data)`, on meta."""
    return lambda function, seed=0: plans.on_meta(function, seed=seed)


@pytest.fixture
def real() -> Callable[..., Model]:
    """`real(function, dtype=fp32, owned=None, seed=0)`: the same with its first weights."""
    return plans.with_values


@pytest.fixture
def as_plain(real: Callable[..., Model]) -> Callable[[Callable[[], list[nn.Module]]], Model]:
    """`as_plain(case)`: the model of `case()`, whose values are those of the same code run by plain PyTorch, or it fails."""

    def as_plain(case: Callable[[], list[nn.Module]]) -> Model:
        with seeded_as_plain(0):
            wanted = _values({str(at): layer for at, layer in enumerate(case())})
        model = real(lambda _: case(), torch.float64)
        found = _values({layer.name: layer.module for layer in model})
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name].double(), value.resolve_neg().double()), name
        return model

    return as_plain


def _values(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    parts = [[*layer.named_parameters(name), *layer.named_buffers(name)] for name, layer in layers.items()]
    return {name: value for part in parts for name, value in part}


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the example models is on the path, as a plan's folder would be."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
