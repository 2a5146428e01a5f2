"""Files that appear whole; weights, read one tensor at a time; tokenizers. Imports no torch before a tensor is read."""

from sley_core.weight_files.read import (
    FLOATS,
    RANDOM_SETTINGS,
    TOKENIZER,
    TensorKind,
    Tensors,
    WeightFiles,
    read_tensor,
    without_settings,
)
from sley_core.whole_files import appearing, sync_names

__all__ = [
    "FLOATS",
    "RANDOM_SETTINGS",
    "TOKENIZER",
    "TensorKind",
    "Tensors",
    "WeightFiles",
    "appearing",
    "read_tensor",
    "sync_names",
    "without_settings",
]
