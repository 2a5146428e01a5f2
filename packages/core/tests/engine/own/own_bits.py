"""A dataset without any table of its own, and a loss that is no cross-entropy over tokens: the bits of the next byte."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sley_core.data.dataset import DataInfo, Field

NUM_BITS = 4


class Rows:
    """Rows of 10 numbers below 16, and the bits of the number that comes next."""

    info = DataInfo({"tokens": Field("int64", sequence_dim=1), "bits": Field("float64", sequence_dim=1)}, vocab_size=16)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(11) * index + index // 7) % 16
        bits = row[1:, None] >> torch.arange(NUM_BITS) & 1
        return {"tokens": row[:-1], "bits": bits.double()}


class Bits:
    """The mean over bits of the binary cross-entropy; the first logits of a position are those of its bits."""

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(batch["bits"].numel())

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        target = batch["bits"].to(output.dtype)
        return F.binary_cross_entropy_with_logits(output[..., :NUM_BITS], target, reduction="sum")
