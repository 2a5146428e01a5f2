"""A dataset whose samples say which they are."""

from __future__ import annotations

import torch
from torch import Tensor

from sley_core.data.dataset import DataInfo, Field

INFO = DataInfo({"x": Field("int64")})


class Numbers:
    """Sample i is the number i."""

    info = INFO

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(index)}
