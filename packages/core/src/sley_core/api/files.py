"""Atomic file writes, readers of weight files, and descriptions of transformers models. Imports torch only when needed."""

from sley_core.files import replace_atomically, sync_names
from sley_core.weight_files.read import (
    FLOATS,
    IDS,
    RANDOM_SETTINGS,
    HuggingFaceModel,
    TensorInfo,
    TensorReader,
    config_folder,
    describe_model,
    deterministic_tokenizer_json,
    open_weights,
    run_of,
    start_folder,
)

__all__ = ["FLOATS", "IDS", "RANDOM_SETTINGS", "HuggingFaceModel", "TensorInfo", "TensorReader", "config_folder"]
__all__ += ["describe_model", "deterministic_tokenizer_json", "open_weights", "replace_atomically", "run_of"]
__all__ += ["start_folder", "sync_names"]
