"""Gives plugins and models of one's own the model's layers, its attention, seeds, and how a loss is cut into chunks."""

from sley_core.data.dataset import DataInfo
from sley_core.losses.cross_entropy import chunks, wide
from sley_core.model.attention import Attention
from sley_core.model.layers import Layer, Model
from sley_core.model.seeds import derive

__all__ = ["Attention", "DataInfo", "Layer", "Model", "chunks", "derive", "wide"]
