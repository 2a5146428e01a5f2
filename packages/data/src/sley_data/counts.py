"""Counts the samples that documents become, from the sizes of files if these suffice; torch-free.

A position that predicts the next token is a label. `pack` and `cut` share one stream of N tokens, hence N - 1 labels, which
windows of `sequence` labels cover; `pad` covers the L - 1 labels of each document of L tokens separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sley_core.api.data import Split
from sley_data.config import TOKEN_BYTES, TextConfig, TokensConfig
from sley_data.documents import documents_inside, of_split, read_documents
from sley_data.files import File


def num_windows(num_tokens: int, sequence: int) -> int:
    """Returns the windows over a stream of `num_tokens`: ceil((num_tokens - 1) / sequence), or 0 if not even one is full."""
    return -(-(num_tokens - 1) // sequence) if num_tokens > sequence else 0


def window(index: int, num_tokens: int, sequence: int) -> tuple[int, int]:
    """Returns where window `index` starts in the stream, and how many of its labels earlier windows have already covered.

    The last window is moved back so that it is full: no token is dropped or made up, and each label counts once.

        stream   0 1 2 3 4 5 6 7 8 9       N = 10, sequence = 4
        window 0 a b c d .                 labels 1..4
        window 1         a b c d .         labels 5..8
        window 2           x x x d .       starts at 5; labels 6..8 counted before, 9 new
    """
    regular = index * sequence
    start = min(regular, num_tokens - 1 - sequence)
    return start, regular - start


def num_chunks(lengths: Iterable[int], sequence: int) -> int:
    """Returns the samples of padded documents: ceil((length - 1) / sequence) each; a document of one token has no label."""
    return sum(-(-(length - 1) // sequence) for length in lengths if length > 1)


ALWAYS_READ = 1 << 20
"""Text of at most this many bytes is read, and tokenized, for an exact count."""


def count_samples(config: TextConfig | TokensConfig, split: Split, files: Sequence[File]) -> int | None:
    """Returns the samples in an epoch of a split; None if that needs loading the data.

    files: those that `text_files` or `token_files` returns for this split.
    """
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
    from sley_data.tokenizer import Tokenizer  # bytes need none

    return Tokenizer(config.tokenizer, config.end_of_document).encode(documents)[1]
