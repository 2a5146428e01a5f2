"""How many samples a table gives, from file sizes where they tell; torch-free, for checking and showing a plan."""

from __future__ import annotations

from sley_core.data.config import TOKEN_BYTES, DataConfig, TextConfig, TokensConfig
from sley_core.data.counts import num_chunks, num_windows
from sley_core.data.dataset import Split
from sley_core.data.documents import text_files, token_files
from sley_core.data.reading import of_split, read_documents
from sley_core.data.tokenizer import Tokenizer

ALWAYS_READ = 1 << 20
"""Bytes of text that are read, and tokenized, for the sake of an exact count."""


def num_tokens(config: TextConfig | TokensConfig, split: Split) -> list[int] | None:
    """Tokens of each document of a split, or None where only reading a large corpus would tell.

    The files must be in order: no problems in `text_files` or `token_files`.
    """
    if isinstance(config, TokensConfig):
        files, _ = token_files(config, split)
        total = sum(file.num_bytes for file in files) // TOKEN_BYTES[config.dtype]
        return [total] if config.documents == "cut" else None
    files, _ = text_files(config)
    if config.separator is None and config.tokenizer is None:
        return [file.num_bytes for file in of_split(files, config, split)]
    if sum(file.num_bytes for file in files) > ALWAYS_READ:
        return None
    documents = read_documents(config, split)
    if config.tokenizer is None:
        return [len(text) for _, text in documents]
    return Tokenizer(config.tokenizer, config.end_of_document).encode(documents)[1]


def num_samples(config: DataConfig, split: Split) -> int | None:
    """Samples of an epoch of a split, or None where only loading the data tells. As `num_tokens` on files."""
    if not isinstance(config, TextConfig | TokensConfig):
        return None
    lengths = num_tokens(config, split)
    if lengths is None:
        return None
    if config.documents == "pad":
        return num_chunks(lengths, config.sequence)
    return num_windows(sum(lengths), config.sequence)
