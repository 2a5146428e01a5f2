"""`watch.noise`: the gradient noise scale (McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*, appendix
A.1).

The gradient of a rank is that of a small batch, b = B / R samples. The sum over ranks is the gradient of the full batch B.
Noise makes the gradient of a small batch longer. So the two squared norms determine the norm of the true gradient and the
noise:

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)          S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)          noise scale = S / |G|^2
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sley_core.api.parts import Param, Parts, StepState
from sley_core.protocols import GradientHandler
from sley_watch.plugin import NoiseConfig


class Noise(GradientHandler):
    """Adds `watch/noise_scale` to each row, in samples. It is NaN while the averaged norm of the true gradient is not
    positive.

    The handler runs before the reducer, when a gradient is the local sum over this rank's samples, divided by the weight of
    the full batch. With R ranks, R times the gradient is the mean over the rank's samples, if all samples have equal weights.
    """

    def __init__(self, config: NoiseConfig) -> None:
        self.config = config
        self._averages = torch.zeros(2, dtype=torch.float64)
        """The averages of |G|^2 and S. Both start at 0, which cancels in their ratio."""

    def attach(self, parts: Parts) -> None:
        self._store, self._registry, self._group = parts.store, parts.registry, parts.groups["dp"]
        self._batch = parts.batch.global_size
        self._local_square = torch.zeros(1, dtype=torch.float64, device=parts.world.device.torch_device)
        # All ranks have the same number, so only one rank contributes.
        parts.numbers.add("watch/noise_scale", self._scale if parts.world.rank == 0 else lambda: 0.0)

    def begin_step(self, step: StepState) -> None:
        self._local_square.zero_()

    def gradient_ready(self, param: Param, step: StepState) -> None:
        self._local_square += self._store.gradient(param).double().square().sum()  # this handler stands before the reducer

    def finish_step(self, step: StepState) -> None:
        # A collective over all replicas, once per step, which sums the squared norms of their gradients.
        self._group.all_reduce(self._local_square, label="the squared gradients of small batches").wait()

    def saved_state(self) -> Mapping[str, Tensor]:
        """Returns the averages, on which the next step's scale depends."""
        return {"averages": self._averages}

    def restore_saved_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of `saved_state`, or starts new averages."""
        self._averages = state["averages"].clone() if state else torch.zeros_like(self._averages)

    def _scale(self) -> float:
        """Returns the noise scale, with this step in the averages. Called after the reduction and before clipping."""
        size = self._group.size
        small = float(self._local_square) * size  # the mean over R ranks of (R g)^2
        large = float(
            sum(self._store.gradient(param).double().square().sum() for param in self._registry if param in self._store)
        )
        small_size, full_size = self._batch / size, float(self._batch)
        square = (full_size * large - small_size * small) / (full_size - small_size)
        noise = (small - large) / (1 / small_size - 1 / full_size)
        if math.isfinite(square) and math.isfinite(noise):
            current = torch.tensor([square, noise], dtype=torch.float64)
            self._averages = self.config.smoothing * self._averages + (1.0 - self.config.smoothing) * current
        length, spread = self._averages.tolist()
        return spread / length if length > 0 else math.nan
