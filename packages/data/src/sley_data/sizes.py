"""Estimates how many samples a `[data]` table gives from file sizes, if they suffice; torch-free, for checking and showing a
plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from sley_core.api.data import Split
from sley_core.api.plan import DataConfig
from sley_data.config import TOKEN_BYTES, TextConfig, TokensConfig
from sley_data.counts import num_chunks, num_windows
from sley_data.documents import File, text_files, token_files
from sley_data.reading import documents_inside, of_split, read_documents
from sley_data.tokenizer import Tokenizer

ALWAYS_READ = 1 << 20
"""Text of at most this many bytes is read, and tokenized, for an exact count."""


def num_samples(config: DataConfig, split: Split = "train") -> int | None:
    """Returns the samples in an epoch of a split; None if that needs loading the data, or if its files have problems."""
    if not isinstance(config, TextConfig | TokensConfig):
        return None
    files, problems = text_files(config, split) if isinstance(config, TextConfig) else token_files(config, split)
    return None if problems else count_samples(config, split, files)


def count_samples(config: TextConfig | TokensConfig, split: Split, files: Sequence[File]) -> int | None:
    """Returns the samples that `files` give, for `num_samples`. files: of `text_files` or `token_files`, for this split."""
    lengths = _lengths(config, split, files) if isinstance(config, TextConfig) else _total(config, files)
    if lengths is None:
        return None
    if config.documents == "pad":
        return num_chunks(lengths, config.sequence)
    return num_windows(sum(lengths), config.sequence)


def _total(config: TokensConfig, files: Sequence[File]) -> list[int] | None:
    """Returns the number of all tokens as one length; None for padded documents, whose lengths are known only from their
    content.
    """
    if config.documents == "pad" and files:
        return None
    return [sum(file.num_bytes for file in files) // TOKEN_BYTES[config.dtype]]


def _lengths(config: TextConfig, split: Split, files: Sequence[File]) -> list[int] | None:
    """Returns the tokens of each document, or None if a large corpus would have to be read."""
    is_as_read = documents_inside(config) is None and config.tokenizer is None
    if is_as_read and not any(file.is_compressed for file in files):
        return [file.num_bytes for file in of_split(files, config, split)]
    if sum(file.num_bytes for file in files) > ALWAYS_READ:
        return None
    documents = read_documents(files, config, split)
    if config.tokenizer is None:
        return [len(text) for _, text in documents]
    return Tokenizer(config.tokenizer, config.end_of_document).encode(documents)[1]
