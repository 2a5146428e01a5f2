"""`data.tokens`: files of token ids, mapped into memory and read where a sample lies."""

from __future__ import annotations

import mmap
import sys
import warnings
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from sley_core.api.data import DataContext
from sley_data.config import TokensConfig
from sley_data.documents import as_error, token_files
from sley_data.split import copied_tokens
from sley_data.token_array import TokenArray
from sley_data.token_dataset import TokenDataset, digest_of


class TokensDataset(TokenDataset):
    """Samples of raw token files, read as one stream in the order of the plan; the files are mapped, not copied.

    With cut documents, opening costs nothing, whatever the size. To pack or pad documents the full stream is read once
    for its `end_of_document` tokens, which takes about 2 s per GB on one core. Raises PlanError with every file that is
    missing, empty or not a whole number of tokens long.
    """

    def __init__(self, config: TokensConfig, context: DataContext) -> None:
        super().__init__(config.sequence, config.documents)
        self._config = config
        self._split = context.split

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the plan gives."""
        return self._config.vocab_size

    @cached_property
    def data_digest(self) -> str:
        """A digest of the files' sizes and of blocks of tokens spread over each file: at most 128 KiB of it are read."""
        tokens, _ = self._data
        pairs = ((torch.tensor(part.numel()), torch.cat(list(_blocks(part)))) for part in tokens.parts)
        return digest_of(chain.from_iterable(pairs))

    def load(self) -> tuple[TokenArray, Tensor | None]:
        """Maps the split's files; returns them as one stream, and the offsets of its documents, or None if they are not
        needed.
        """
        files, problems = token_files(self._config, self._split)
        if self._split == "held_out":
            problems += copied_tokens(token_files(self._config, "train")[0], files)
        if problems:
            raise as_error(problems)
        tokens = TokenArray([map_tokens(file.path, getattr(torch, self._config.dtype)) for file in files])
        if self._config.documents == "cut" or self._config.end_of_document is None:
            return tokens, None
        starts = tokens.find(self._config.end_of_document) + 1
        return tokens, torch.cat([torch.tensor([0]), starts[starts < len(tokens)], torch.tensor([len(tokens)])])


def _blocks(part: Tensor) -> Iterator[Tensor]:
    """Yields a file's first tokens, its last ones, and blocks spread between them; all of it if that is not more."""
    size = 1 << 11 if part.numel() > 1 << 15 else max(1, -(-part.numel() // 16))
    for number in range(16):
        start = max(0, part.numel() - size) * number // 15
        yield part[start : start + size]


def map_tokens(path: Path, dtype: torch.dtype) -> Tensor:
    """Returns the tokens of a file as a read-only view: pages are loaded when they are read, and a write crashes.

    The map is shared and read-only, so that files larger than memory can be mapped: PyTorch's own `from_file` maps
    privately and writable, which Linux counts as memory that must exist.
    """
    assert sys.byteorder == "little", "token files are little-endian"
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        # PyTorch warns that it has no read-only tensors. Nothing writes to these: `TokenArray.read` copies.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype)
