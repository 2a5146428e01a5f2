"""Samples that weigh nothing, of any length, so that what is measured is the training's own memory."""

from __future__ import annotations

import torch
from torch import Tensor

from sley_core.data.dataset import DataInfo, Field


class Zeros:
    def __init__(self, sequence: int) -> None:
        self.info = DataInfo({"tokens": Field("int64", 0, 1), "labels": Field("int64", 0, 1)}, vocab_size=64, sequence=sequence)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: torch.zeros(self.info.sequence or 0, dtype=torch.int64) for name in self.info.fields}
