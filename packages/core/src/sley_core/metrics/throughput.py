"""Tells what a step took: its part of a metrics row, from a batch's size and the time of the step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.metrics.flops import device_peak_flops, model_flops_per_token
from sley_core.metrics.memory import memory_mb

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo
    from sley_core.engine.parts import Parts
    from sley_core.model.layers import Layer


MEMORY_EVERY_S = 0.5


class Meter:
    """Counts what a batch has, as the dataset declares it, and measures steps.

    unit: "tokens", the positions of the first field that has a sequence dim, or "samples" if no field has one.
    flops_per_token: see `sley_core.metrics.flops`. peak_flops: FLOP/s of all devices of the run together, None if not
    known.
    """

    def __init__(
        self, device: torch.device, info: DataInfo, *, flops_per_token: float = 0.0, peak_flops: float | None = None
    ) -> None:
        """Chooses the field by which batches are counted."""
        self.device = device
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._measured_at = -math.inf
        self._memory = 0.0
        fields = list(info.fields.items())
        self._name, self._field = next((item for item in fields if item[1].sequence_dim is not None), fields[0])
        self.unit = "samples" if self._field.sequence_dim is None else "tokens"

    @classmethod
    def of(cls, parts: Parts, layers: Iterable[Layer], info: DataInfo) -> Meter:
        """Returns the meter of this run: FLOPs of all layers of the full model, peak of all devices."""
        device = parts.world.device.torch_device
        peak = device_peak_flops(device, parts.precision.compute)
        return cls(
            device,
            info,
            flops_per_token=model_flops_per_token(
                (layer.module for layer in layers),
                info.sequence or 0,
                {id(entry.parameter): prod(entry.shape) for entry in parts.book if entry.shard},
            ),
            peak_flops=None if peak is None else peak * parts.world.size,
        )

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Returns how many samples, or tokens, `batch` has; tokens whose label is ignored count, as they are computed."""
        shape, dim = batch[self._name].shape, self._field.sequence_dim
        return shape[self._field.batch_dim] * (1 if dim is None else shape[dim])

    def measure(self, count: int, seconds: float, data_wait_s: float) -> dict[str, float | int]:
        """Returns `tokens`, `seconds`, `tokens_per_s`, `data_wait_s`, `memory_mb`, and `mfu` if the device's peak is
        known; or `samples` and `samples_per_s` of data without sequences, and no `mfu`, which is of tokens.

        count: of the step, over all ranks. seconds: of the step. data_wait_s: how much of it this rank waited for
        data. memory_mb: this rank's peak in MiB. mfu: of all devices together, a fraction.
        """
        per_s = count / seconds
        row = {
            self.unit: count,
            "seconds": seconds,
            f"{self.unit}_per_s": per_s,
            "data_wait_s": data_wait_s,
            "memory_mb": self._memory_mb(),
        }
        if self.peak_flops is not None and self.unit == "tokens":
            row["mfu"] = per_s * self.flops_per_token / self.peak_flops
        return row

    def _memory_mb(self) -> float:
        """Returns the peak in MiB, at most `MEMORY_EVERY_S` old: the kernel takes a tenth of a millisecond to tell."""
        now = time.monotonic()
        if now - self._measured_at >= MEMORY_EVERY_S:
            self._measured_at = now
            self._memory = memory_mb(self.device)
        return self._memory
