"""`watch.noise`: the gradient noise scale (McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, appendix A.1).

A rank's gradient is that of a small batch, b = B / R samples, and the sum of all ranks' that of the whole, B. Noise makes the
gradient of a small batch longer, so that the two squared norms give both the length of the true gradient and the noise:

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)          S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)          noise scale = S / |G|^2
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.protocols import GradientHandler
from sley_watch.config import NoiseConfig

if TYPE_CHECKING:
    from sley_core.api.parts import Param, Parts, StepState


class Noise(GradientHandler):
    """Adds `watch/noise_scale` to each row, in samples; NaN while the averages say that the true gradient has no length.

    Stands before the reducer, where a gradient is still this rank's own: the sum over its samples, divided by the weight of the
    whole batch. With R ranks, R times that is the mean over its samples, if all samples weigh alike.
    """

    def __init__(self, config: NoiseConfig) -> None:
        self.config = config
        self._averages = torch.zeros(2, dtype=torch.float64)
        """Of |G|^2 and of S; both begin at 0, which their ratio does not see."""

    def attach(self, parts: Parts) -> None:
        self._store, self._book, self._group = parts.store, parts.registry, parts.groups["dp"]
        self._batch = parts.batch.global_size
        self._own = torch.zeros(1, dtype=torch.float64, device=parts.world.device.torch_device)
        # All ranks have the same number, and one gives it.
        parts.numbers.add("watch/noise_scale", self._scale if parts.world.rank == 0 else lambda: 0.0)

    def begin_step(self, step: StepState) -> None:
        self._own.zero_()

    def gradient_ready(self, param: Param, step: StepState) -> None:
        self._own += self._store.gradient(param).double().square().sum()  # this handler stands before the reducer

    def finish_step(self, step: StepState) -> None:
        # All replicas, once per step: the mean over ranks of a small batch's squared norm, (R g)^2.
        self._group.all_reduce(self._own, what="the squared gradients of small batches").wait()

    def saved_state(self) -> Mapping[str, Tensor]:
        """Returns the averages, which the next step's scale depends on."""
        return {"averages": self._averages}

    def restore_saved_state(self, kept: Mapping[str, Tensor]) -> None:
        """Takes what `saved_state` returned, or begins anew."""
        self._averages = kept["averages"].clone() if kept else torch.zeros_like(self._averages)

    def _scale(self) -> float:
        """Returns the noise scale, with this step in the averages. Called when gradients are reduced, and not yet clipped."""
        size = self._group.size
        small = float(self._own) * size  # the mean over R ranks of (R g)^2
        large = float(sum(self._store.gradient(param).double().square().sum() for param in self._book if param in self._store))
        few, many = self._batch / size, float(self._batch)
        square = (many * large - few * small) / (many - few)
        noise = (small - large) / (1 / few - 1 / many)
        if math.isfinite(square) and math.isfinite(noise):
            now = torch.tensor([square, noise], dtype=torch.float64)
            self._averages = self.config.smoothing * self._averages + (1.0 - self.config.smoothing) * now
        length, spread = self._averages.tolist()
        return spread / length if length > 0 else math.nan
