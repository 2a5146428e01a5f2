"""The tables of `watch.noise` and `watch.layers` in a plan."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sley_core.api.plan import Table


class NoiseConfig(Table):
    """`watch.noise`: adds `watch/noise_scale`, the batch size above which larger batches have diminishing returns."""

    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Weight of earlier steps in the two moving averages. 0 uses only the current step, which is very noisy."""


class LayersConfig(Table):
    """`watch.layers`: adds the norms of the gradient and weights of each layer."""

    weights: bool = True
    """Whether to add the norms of weights. The norms of gradients are always added."""
