"""For plugins and your own models: layers, forward patches, attention and seeds."""

from sley_core.engine.boundary import copy_containers, tensors_in
from sley_core.engine.call import Recompute
from sley_core.generators import derive_seed
from sley_core.losses.cross_entropy import cross_entropy_of_logits, row_chunks
from sley_core.model.attention import Attention, attention_mask, flat_bounds, once_per_field
from sley_core.model.layers import ForwardPatch, Layer, Model

__all__ = ["Attention", "ForwardPatch", "Layer", "Model", "Recompute", "attention_mask", "copy_containers"]
__all__ += ["cross_entropy_of_logits", "derive_seed", "flat_bounds", "once_per_field", "row_chunks", "tensors_in"]
