"""`data.text`: text files as tokens, bytes by default."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from sley_core.api.data import DataContext
from sley_data.config import NUM_BYTES, TextConfig
from sley_data.documents import as_error, text_files
from sley_data.reading import read_documents
from sley_data.token_array import TokenArray
from sley_data.token_dataset import TokenDataset, digest_of
from sley_data.tokenizer import Tokenizer


class TextDataset(TokenDataset):
    """Samples of one split of a corpus; which documents it holds depends on their content alone.

    data_notes: what the user has to know about the documents, once they are read.
    Bytes are taken as they are, in any encoding. A tokenizer needs UTF-8.
    Raises PlanError with every file that is missing or empty, or where the text is shorter than one sample.
    """

    def __init__(self, config: TextConfig, context: DataContext) -> None:
        super().__init__(config.sequence, config.documents)
        self._config = config
        self._split = context.split
        self.data_notes: list[str] = []

    @property
    def vocab_size(self) -> int:
        """256 for bytes, else the tokenizer's size."""
        return NUM_BYTES if self._tokenizer is None else self._tokenizer.vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        path = self._config.tokenizer
        return None if path is None else Tokenizer(path, self._config.end_of_document)

    @cached_property
    def data_digest(self) -> str:
        """A digest of every token and of the documents' lengths."""
        tokens, offsets = self._data
        return digest_of([tokens.parts[0], offsets])

    def load(self) -> tuple[TokenArray, Tensor]:
        """Reads the split's documents, in order; returns their tokens and the offsets of those that are not empty."""
        files, problems = text_files(self._config, self._split)
        if problems:
            raise as_error(problems)
        documents = read_documents(files, self._config, self._split, self.data_notes)
        ids, lengths = _join(documents) if self._tokenizer is None else self._tokenizer.encode(documents)
        offsets = torch.tensor([0, *accumulate(length for length in lengths if length)])
        return TokenArray([as_tensor(ids)]), offsets


def _join(documents: Iterable[tuple[str, bytes]]) -> tuple[bytearray, list[int]]:
    """Returns the bytes of all documents joined, and the length of each."""
    ids = bytearray()
    lengths = []
    for _, text in documents:
        ids += text
        lengths.append(len(text))
    return ids, lengths


def as_tensor(ids: bytearray | array[int]) -> Tensor:
    """Returns a view of `ids`: uint8, uint16 or uint32 by the size of its items."""
    dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[memoryview(ids).itemsize]
    return torch.frombuffer(ids, dtype=dtype) if ids else torch.empty(0, dtype=dtype)
