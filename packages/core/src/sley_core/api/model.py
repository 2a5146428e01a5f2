"""Layers, forward patches, attention and seeds, for plugins and your own models."""

from sley_core.engine.boundary import copy_containers as copy_containers
from sley_core.engine.boundary import tensors_in as tensors_in
from sley_core.engine.call import Recompute as Recompute
from sley_core.generators import derive_seed as derive_seed
from sley_core.losses.cross_entropy import cross_entropy_of_logits as cross_entropy_of_logits
from sley_core.losses.cross_entropy import row_chunks as row_chunks
from sley_core.model.attention import Attention as Attention
from sley_core.model.attention import attention_mask as attention_mask
from sley_core.model.attention import flat_bounds as flat_bounds
from sley_core.model.attention import once_per_field as once_per_field
from sley_core.model.layers import ForwardPatch as ForwardPatch
from sley_core.model.layers import Layer as Layer
from sley_core.model.layers import Model as Model
