"""The datasets `data.text`, `data.chat` and `data.tokens`: samples of equal length, loaded when they are first needed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.data import DataContext, DataInfo, Sample
from sley_data import packing
from sley_data.chat import ChatRows
from sley_data.chat_template import ChatTemplate
from sley_data.config import NUM_BYTES, ChatConfig, Documents, TextConfig, TokensConfig
from sley_data.documents import load_tokenizer, num_windows
from sley_data.packing import TokenArray
from sley_data.streams import Stream, short_data_error, text_stream, token_stream

if TYPE_CHECKING:
    from sley_data.tokenizer import Tokenizer


class TokenDataset:
    """Samples of `sequence` tokens with their labels. Each label of the data occurs once per epoch.

    A subclass defines `vocab_size`, `data_digest` and `load`. The first access to the length or a sample calls `load`.
    """

    def __init__(self, sequence: int, documents: Documents) -> None:
        self._sequence = sequence
        self._documents = documents

    @cached_property
    def info(self) -> DataInfo:
        """The fields, the vocabulary size and the sequence length. Does not load the data."""
        return DataInfo(packing.token_fields(self._documents), self.vocab_size, self._sequence)

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        raise NotImplementedError

    def load(self) -> Stream:
        """Returns the tokens and documents of the split."""
        raise NotImplementedError

    @property
    def data_digest(self) -> str:
        """A digest of the tokens and documents in order. Loads the data."""
        raise NotImplementedError

    @cached_property
    def _stream(self) -> Stream:
        return self.load()

    @cached_property
    def _data(self) -> tuple[TokenArray, Tensor]:
        return TokenArray(list(map(as_tensor, self._stream.parts))), as_tensor(self._stream.offsets)

    @property
    def token_parts(self) -> Sequence[Tensor]:
        """The tokens of all documents in order, in one or more tensors [n] of uint8, uint16 or uint32. Loads the data."""
        return self._data[0].parts

    @cached_property
    def _ends(self) -> Tensor:
        return packing.chunk_ends(self._data[1], self._sequence)

    @cached_property
    def _max_documents(self) -> int:
        return packing.max_documents(self._data[1], self._sequence)

    @cached_property
    def _num_samples(self) -> int:
        """The number of samples per epoch. Loads the data. Raises PlanError "data-short" if there are none."""
        tokens = self._data[0]
        if self._documents == "pad":
            count = int(self._ends[-1]) if self._ends.numel() else 0
        else:
            count = num_windows(len(tokens), self._sequence)
        if not count:
            raise short_data_error(len(tokens), self._sequence)
        return count

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index` with the fields of `packing.token_fields`. Raises IndexError outside [0, len)."""
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        tokens, offsets = self._data
        if self._documents == "pad":
            return packing.pad_sample(tokens, offsets, self._ends, index, self._sequence)
        if self._documents == "cut":
            return packing.cut_sample(tokens, index, self._sequence)
        return packing.pack_sample(tokens, offsets, index, self._sequence, self._max_documents)


class TextDataset(TokenDataset):
    """Samples of a split of a text corpus: bytes in any encoding, or tokens of UTF-8 text.

    data_notes: sentences for the user about the documents, once they are loaded. Loading raises PlanError with all missing and
    empty files, or if the text is shorter than one sample.
    """

    def __init__(self, config: TextConfig, context: DataContext) -> None:
        super().__init__(config.sequence, config.documents)
        self._config = config
        self._split = context.split
        self.data_notes: list[str] = []

    @property
    def vocab_size(self) -> int:
        """256 for bytes, or the vocabulary size of the tokenizer."""
        return NUM_BYTES if self._tokenizer is None else self._tokenizer.vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self._config)

    @cached_property
    def data_digest(self) -> str:
        """A digest of all tokens and document lengths."""
        return self._stream.digest

    def load(self) -> Stream:
        """Reads the documents of the split, or maps their cached tokens."""
        return text_stream(self._config, self._split, self._tokenizer, self.data_notes)


def as_tensor(view: memoryview) -> Tensor:
    """Returns the memory of `view` as a tensor of uint8, uint16, uint32 or int64. The view may be read-only."""
    dtype = {"B": torch.uint8, "H": torch.uint16, "I": torch.uint32, "q": torch.int64}[view.format]
    with warnings.catch_warnings():
        # PyTorch warns that it has no read-only tensors. Nothing writes to these, since `TokenArray.read` copies.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)


class ChatDataset:
    """Samples of whole conversations, packed with their boundaries (see `chat.ChatRows`).

    data_notes: sentences for the user about dropped conversations, once they are loaded.
    """

    def __init__(self, config: ChatConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self.data_notes: list[str] = []

    @cached_property
    def info(self) -> DataInfo:
        """The fields, the vocabulary size and the sequence length. Loads the tokenizer, but not the data."""
        return DataInfo(packing.token_fields("pack"), self._template.vocab_size, self._config.sequence)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._config.tokenizer, self._config.template)

    @cached_property
    def _rows(self) -> ChatRows:
        rows = ChatRows(self._config, self._context, self._template)
        self.data_notes += rows.stats.notes()
        return rows

    @cached_property
    def data_digest(self) -> str:
        """A digest of all tokens, labels and sample lengths."""
        return self._rows.digest

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index`: tokens, labels and positions, int64 [sequence], and cu_seqlens, int32 [max_documents + 1]."""
        if not 0 <= index < len(self._rows):
            raise IndexError(index)
        dtypes = {"cu_seqlens": torch.int32}
        row = self._rows.row(index)
        return {name: torch.tensor(values, dtype=dtypes.get(name, torch.int64)) for name, values in row.items()}


class TokensDataset(TokenDataset):
    """Samples of token files, which form one stream in the plan's order. The files are memory-mapped."""

    def __init__(self, config: TokensConfig, context: DataContext) -> None:
        super().__init__(config.sequence, config.documents)
        self._config = config
        self._split = context.split

    @property
    def vocab_size(self) -> int:
        """The vocabulary size in the plan."""
        return self._config.vocab_size

    @cached_property
    def data_digest(self) -> str:
        """A digest of the file sizes, of blocks of tokens of each file, and of the document lengths."""
        return self._stream.sampled_digest

    def load(self) -> Stream:
        """Maps the files of the split (see `streams.token_stream`)."""
        return token_stream(self._config, self._split)
