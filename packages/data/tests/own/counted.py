from __future__ import annotations

from sley_core.api.data import Split
from sley_data.config import TextConfig, TokensConfig
from sley_data.documents import count_samples
from sley_data.files import text_files, token_files


def num_samples(config: TextConfig | TokensConfig, split: Split = "train") -> int | None:
    """Returns the samples in an epoch as a check counts them; None where it would have to load the data."""
    files, problems = text_files(config, split) if isinstance(config, TextConfig) else token_files(config, split)
    return None if problems else count_samples(config, split, files)
