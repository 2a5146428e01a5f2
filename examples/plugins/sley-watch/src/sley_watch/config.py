"""The tables of `watch.noise` and `watch.layers` in a plan."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sley_core.api.plan import Table


class NoiseConfig(Table):
    """`watch.noise`: `watch/noise_scale`, the batch size beyond which larger batches help less and less."""

    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Weight of earlier steps in the two moving averages; 0 takes each step for itself, which is very noisy."""


class LayersConfig(Table):
    """`watch.layers`: the norms of each layer's gradient and weights."""

    weights: bool = True
    """Whether norms of weights are taken too; those of gradients always are."""
