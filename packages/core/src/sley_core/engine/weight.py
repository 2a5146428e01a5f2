"""The loss weight of the global batch: known from the data alone, before the first backward.

Dividing once by it is what makes gradients independent of micro-batches, dp, sp and padding; a mean of means is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sley_core.comm.collectives import Pending, all_reduce
from sley_core.comm.device import Device
from sley_core.comm.groups import Group


class BatchWeight:
    """The sum of `local` over `group`, the ranks of one stage; its all-reduce runs beside the first forward.

    local: this rank's samples' share. scale: by which every gradient is multiplied until the step ends (fp16).
    """

    def __init__(self, local: float, group: Group, device: Device, scale: float = 1.0) -> None:
        self.local = local
        self.scale = scale
        self._inverse: Tensor | None = None
        self._pending: Pending | None = None
        if group.size > 1:
            self._total = torch.full((), local, dtype=torch.float64, device=device.torch_device)
            # The stage's ranks: one scalar per step and evaluation, the first collective of each.
            self._pending = all_reduce(self._total, group, what="the loss weight of the batch")

    def inverse(self, like: Tensor) -> Tensor:
        """The scale over the weight, in the dtype of the loss `like`; 0 where nothing in the batch counts."""
        if self._inverse is None:
            self._inverse = self._divided(like)
        return self._inverse

    def _divided(self, like: Tensor) -> Tensor:
        if self._pending is None:
            return like.new_full((), self.scale / self.local if self.local > 0 else 0.0)
        self._pending.wait()
        return torch.where(self._total > 0, self.scale / self._total, 0.0).to(like.dtype)
