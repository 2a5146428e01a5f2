"""Builds models without a plan, on meta or with first values, for tests of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sley_core.data.dataset import DataInfo, Field
from sley_core.model.build import build_on_meta
from sley_core.model.layers import Model
from sley_core.model.values import HostModel

_ROWS = Field("int64", sequence_dim=1)
TOKENS = DataInfo(
    {"tokens": _ROWS, "labels": _ROWS, "positions": _ROWS, "cu_seqlens": Field("int32")}, vocab_size=97, sequence=24
)
"""What packed token data of 97 ids and sequences of 24 says of itself."""


@dataclass
class _Given:
    """Stands for a plan's component: something that builds layers."""

    build: Callable[[DataInfo], Any]
    name: str = "given"


def on_meta(function: Callable[[DataInfo], Any], info: DataInfo = TOKENS, seed: int = 0) -> Model:
    """Returns the model of `function(info)`, on meta."""
    return build_on_meta(_Given(function), info, seed)  # type: ignore[arg-type]


def with_values(
    function: Callable[[DataInfo], Any],
    dtype: torch.dtype = torch.float32,
    owned: set[str] | None = None,
    seed: int = 0,
    info: DataInfo = TOKENS,
) -> Model:
    """Returns the same on the CPU with its first values. owned: the names of the layers that get values; None for all."""
    model = on_meta(function, info, seed)
    names = {layer.name for layer in model.layers} if owned is None else owned
    host = HostModel(model)
    host.drop_others(host.place(names, dtype=dtype, device=torch.device("cpu")), names)
    return model
