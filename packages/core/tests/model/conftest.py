"""What the tests of models share: the fields of token data, and a build without a plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field
from sley_core.model.build import build_on_meta
from sley_core.model.layers import Model
from sley_core.model.materialize import materialize

sys.path.append(str(Path(__file__).parent / "own"))  # modules of tests import from there while they are collected
EXAMPLES = Path(__file__).parents[4] / "examples" / "models"


@dataclass
class Given:
    """Stands for a plan's component: something that builds layers."""

    build: Callable[[DataInfo], Any]
    name: str = "given"


@pytest.fixture
def info() -> DataInfo:
    rows = Field("int64", sequence_dim=1)
    fields = {"tokens": rows, "labels": rows, "positions": rows, "cu_seqlens": Field("int32")}
    return DataInfo(fields, vocab_size=97, sequence=24)


@pytest.fixture
def build(info: DataInfo) -> Callable[..., Model]:
    """`build(function, seed=0)`: the model of `function(data)`, on meta."""

    def build(function: Callable[[DataInfo], Any], seed: int = 0) -> Model:
        return build_on_meta(Given(function), info, seed)  # type: ignore[arg-type]

    return build


@pytest.fixture
def real(build: Callable[..., Model]) -> Callable[..., Model]:
    """`real(function, dtype=fp32, owned=None, seed=0)`: the same with its first weights."""

    def real(
        function: Callable[[DataInfo], Any],
        dtype: torch.dtype = torch.float32,
        owned: set[str] | None = None,
        seed: int = 0,
    ) -> Model:
        model = build(function, seed)
        device = torch.device("cpu")
        materialize(model.layers, seed=seed, init_weights=model.init_weights, dtype=dtype, device=device, owned=owned)
        return model

    return real


@pytest.fixture
def as_plain(real: Callable[..., Model]) -> Callable[[Callable[[], list[nn.Module]]], Model]:
    """`as_plain(case)`: the model of `case()`, whose values are those of the same code run by plain PyTorch, or it fails."""

    def as_plain(case: Callable[[], list[nn.Module]]) -> Model:
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
