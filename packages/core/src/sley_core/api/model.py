"""Gives plugins and models of one's own layers, patches of their forwards, attention, seeds, and a loss's chunks."""

from sley_core.engine.call import Recompute, tensors_in
from sley_core.engine.positions import attended
from sley_core.generators import derive
from sley_core.losses.cross_entropy import chunks, wide
from sley_core.model.attention import Attention, once_per_field
from sley_core.model.layers import ForwardPatch, Layer, Model

__all__ = [
    "Attention",
    "ForwardPatch",
    "Layer",
    "Model",
    "Recompute",
    "attended",
    "chunks",
    "derive",
    "once_per_field",
    "tensors_in",
    "wide",
]
