"""The datasets `data.text`, `data.chat` and `data.tokens`: documents as samples of one length, loaded when first needed."""

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
from sley_data.documents import num_windows, tokenizer_of
from sley_data.packing import TokenArray
from sley_data.streams import Stream, text_stream, token_stream, too_short

if TYPE_CHECKING:
    from sley_data.tokenizer import Tokenizer


class TokenDataset:
    """Gives samples of `sequence` tokens with their labels; every label of the data comes exactly once per epoch.

    A subclass defines `vocab_size`, `data_digest`, and `load() -> Stream`, which is called once, by the first `len` or sample;
    `info` does not call it.
    """

    def __init__(self, sequence: int, documents: Documents) -> None:
        self._sequence = sequence
        self._documents = documents

    @cached_property
    def info(self) -> DataInfo:
        """The fields, vocabulary and sequence length; does not load the data."""
        return DataInfo(packing.token_fields(self._documents), self.vocab_size, self._sequence)

    @property
    def vocab_size(self) -> int:
        """The number of token ids; defined by a subclass."""
        raise NotImplementedError

    def load(self) -> Stream:
        """Returns the tokens and documents of the split; defined by a subclass."""
        raise NotImplementedError

    @property
    def data_digest(self) -> str:
        """Differs if tokens, documents or their order differ; defined by a subclass. Loads the data."""
        raise NotImplementedError

    @cached_property
    def _stream(self) -> Stream:
        return self.load()

    @cached_property
    def _data(self) -> tuple[TokenArray, Tensor]:
        return TokenArray(list(map(as_tensor, self._stream.parts))), as_tensor(self._stream.offsets)

    @property
    def token_parts(self) -> Sequence[Tensor]:
        """The tokens of all documents, in order, as one or more tensors [n] of uint8, uint16 or uint32; loads the data."""
        return self._data[0].parts

    @cached_property
    def _ends(self) -> Tensor:
        return packing.chunk_ends(self._data[1], self._sequence)

    @cached_property
    def _max_documents(self) -> int:
        return packing.max_documents(self._data[1], self._sequence)

    @cached_property
    def _num_samples(self) -> int:
        """The samples in an epoch; loads the data. Raises PlanError "data-short" if there is none."""
        tokens = self._data[0]
        if self._documents == "pad":
            count = int(self._ends[-1]) if self._ends.numel() else 0
        else:
            count = num_windows(len(tokens), self._sequence)
        if not count:
            raise too_short(len(tokens), self._sequence)
        return count

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index` with the fields of `packing.token_fields`; raises IndexError outside [0, len)."""
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        tokens, offsets = self._data
        if self._documents == "pad":
            return packing.pad_sample(tokens, offsets, self._ends, index, self._sequence)
        if self._documents == "cut":
            return packing.cut_sample(tokens, index, self._sequence)
        return packing.pack_sample(tokens, offsets, index, self._sequence, self._max_documents)


class TextDataset(TokenDataset):
    """Samples of one split of a corpus; which documents it holds depends on their content alone.

    data_notes: sentences for the user about the documents, once they are read.
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
        return tokenizer_of(self._config)

    @cached_property
    def data_digest(self) -> str:
        """A digest of every token and of the documents' lengths."""
        return self._stream.digest

    def load(self) -> Stream:
        """Reads the split's documents, or maps what is kept of them."""
        return text_stream(self._config, self._split, self._tokenizer, self.data_notes)


def as_tensor(view: memoryview) -> Tensor:
    """Returns a view of tokens or offsets, which may be read-only, as uint8, uint16, uint32 or int64."""
    dtype = {"B": torch.uint8, "H": torch.uint16, "I": torch.uint32, "q": torch.int64}[view.format]
    with warnings.catch_warnings():
        # PyTorch has no read-only tensors, and warns about that. Nothing writes to these: `TokenArray.read` copies.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=dtype) if view.nbytes else torch.empty(0, dtype=dtype)


class ChatDataset:
    """Samples of whole conversations, packed with their boundaries (see `chat.ChatRows`); the first `len` or sample reads all.

    data_notes: sentences for the user about conversations that are left out, once they are read.
    """

    def __init__(self, config: ChatConfig, context: DataContext) -> None:
        self._config = config
        self._context = context
        self.data_notes: list[str] = []

    @cached_property
    def info(self) -> DataInfo:
        """The fields, vocabulary and sequence length; loads the tokenizer alone."""
        return DataInfo(packing.token_fields("pack"), self._template.vocab_size, self._config.sequence)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._config.tokenizer, self._config.template)

    @cached_property
    def _rows(self) -> ChatRows:
        rows = ChatRows(self._config, self._context, self._template)
        self.data_notes += rows.fates.notes()
        return rows

    @cached_property
    def data_digest(self) -> str:
        """A digest of every token, of what is trained on, and of the conversations' lengths."""
        return self._rows.digest

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index`: tokens, labels and positions, int64 [sequence], and cu_seqlens, int32 [max_documents + 1]."""
        if not 0 <= index < len(self._rows):
            raise IndexError(index)
        dtypes = {"cu_seqlens": torch.int32}
        values = self._rows.row(index).items()
        return {name: torch.tensor(each, dtype=dtypes.get(name, torch.int64)) for name, each in values}


class TokensDataset(TokenDataset):
    """Samples of token files, read as one stream in the order of the plan; the files are mapped, not copied."""

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
        """A digest of the files' sizes, of blocks of tokens spread over each file, and of the documents' lengths."""
        return self._stream.sampled_digest

    def load(self) -> Stream:
        """Maps the split's files (see `token_stream`)."""
        return token_stream(self._config, self._split)
