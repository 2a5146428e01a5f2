"""Files of weights and tokenizers, read one tensor at a time. Imports no torch before a tensor is read."""

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

__all__ = ["FLOATS", "RANDOM_SETTINGS", "TOKENIZER", "TensorKind", "Tensors", "WeightFiles", "read_tensor", "without_settings"]
