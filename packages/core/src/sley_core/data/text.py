"""`core.text`: text files as tokens, bytes by default."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, compress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.data.config import TextConfig
from sley_core.data.dataset import DataContext
from sley_core.data.documents import as_error, held_out, text_files
from sley_core.data.token_array import TokenArray
from sley_core.data.token_dataset import TokenDataset

if TYPE_CHECKING:
    from sley_core.data.tokenizer import Tokenizer

NUM_BYTES = 256


class TextDataset(TokenDataset):
    """Samples of one split of a corpus; which documents it holds depends on their names alone.

    Bytes are taken as they are, in any encoding. A tokenizer needs UTF-8.
    Raises PlanError with every file that is missing or empty, or where the text is shorter than one sample.
    """

    def __init__(self, config: TextConfig, context: DataContext) -> None:
        super().__init__(config.sequence, config.documents)
        self._config = config
        self._split = context.split

    @property
    def vocab_size(self) -> int:
        return NUM_BYTES if self._tokenizer is None else self._tokenizer.vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if self._config.tokenizer is None:
            return None
        from sley_core.data.tokenizer import Tokenizer  # an optional extra

        return Tokenizer(self._config.tokenizer, self._config.end_of_document)

    def load(self) -> tuple[TokenArray, Tensor]:
        """The split's documents in their order, as one tensor and the offsets of those that are not empty."""
        documents = read_documents(self._config, self._split == "held_out")
        ids, lengths = _join(documents) if self._tokenizer is None else self._tokenizer.encode(documents)
        offsets = torch.tensor([0, *accumulate(length for length in lengths if length)])
        return TokenArray([as_tensor(ids)]), offsets


def read_documents(config: TextConfig, is_held_out: bool) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the documents of one split; only files of which a document is wanted are read."""
    files, problems = text_files(config)
    if problems:
        raise as_error(problems)
    if config.separator is None:
        chosen = held_out([file.name for file in files], config.held_out)
        for file in compress(files, (side == is_held_out for side in chosen)):
            yield file.name, file.path.read_bytes()
        return
    named = list(_separate(((file.name, file.path) for file in files), config.separator.encode()))
    chosen = held_out([name for name, _ in named], config.held_out)
    yield from compress(named, (side == is_held_out for side in chosen))


def _separate(files: Iterable[tuple[str, Path]], separator: bytes) -> Iterator[tuple[str, bytes]]:
    """The documents of each file, named `file#0`, `file#1`, ...; the separator belongs to neither side."""
    for name, path in files:
        for number, text in enumerate(path.read_bytes().split(separator)):
            if text:
                yield f"{name}#{number}", text


def _join(documents: Iterable[tuple[str, bytes]]) -> tuple[bytearray, list[int]]:
    ids = bytearray()
    lengths = []
    for _, text in documents:
        ids += text
        lengths.append(len(text))
    return ids, lengths


def as_tensor(ids: bytearray | array[int]) -> Tensor:
    """A view of `ids`: uint8, uint16 or uint32 by the size of its items."""
    dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[memoryview(ids).itemsize]
    return torch.frombuffer(ids, dtype=dtype) if ids else torch.empty(0, dtype=dtype)
