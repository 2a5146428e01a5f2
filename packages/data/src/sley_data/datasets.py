"""The datasets `data.text`, `data.chat` and `data.tokens`: samples of equal length, loaded when they are first needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from sley_core.api.data import BOUNDARY_FIELDS, TOKEN_FIELDS, DataContext, DataInfo, Sample
from sley_data.chat import ChatRows
from sley_data.chat_template import ChatTemplate
from sley_data.documents import load_tokenizer, num_ids
from sley_data.packing import TokenRows

if TYPE_CHECKING:
    from sley_data.streams import Integers
    from sley_data.tokenizer import Tokenizer


class RowsDataset:
    """The rows of a split as tensors. The first access to the length, a sample or the digest loads the data.

    data_notes: sentences for the user, once the data is loaded. A subclass defines `vocab_size` and `load`.
    """

    def __init__(self, config: Any, context: DataContext) -> None:
        self.config = config
        self.context = context
        self.data_notes: list[str] = []

    @cached_property
    def info(self) -> DataInfo:
        """The fields, the vocabulary size and the sequence length. May load the tokenizer, but not the data."""
        is_packed = getattr(self.config, "documents", "pack") == "pack"
        return DataInfo(TOKEN_FIELDS | (BOUNDARY_FIELDS if is_packed else {}), self.vocab_size, self.config.sequence)

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        raise NotImplementedError

    def load(self) -> TokenRows | ChatRows:
        """Loads the data. Raises the PlanError of the rows."""
        raise NotImplementedError

    @cached_property
    def rows(self) -> TokenRows | ChatRows:
        """The loaded rows."""
        rows = self.load()
        self.data_notes += rows.notes
        return rows

    @cached_property
    def data_digest(self) -> str:
        """A digest of the tokens, their labels and the documents."""
        return self.rows.digest

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index`, with the fields of `info`. Raises IndexError outside [0, len)."""
        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        return {name: torch.from_numpy(values) for name, values in self.rows.sample(index).items()}


class TokenDataset(RowsDataset):
    """Samples of a text corpus or of token files (see `packing.TokenRows`)."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the table or its tokenizer; 256 for bytes."""
        return num_ids(self.config, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self.config)

    def load(self) -> TokenRows:
        return TokenRows(self.config, self.context, self._tokenizer)

    @property
    def token_parts(self) -> Sequence[Integers]:
        """The tokens of all documents in order, in one or more arrays [n] of uint8, uint16 or uint32. Loads the data."""
        rows = self.rows
        assert isinstance(rows, TokenRows), rows
        return rows.stream.parts


class ChatDataset(RowsDataset):
    """Samples of whole conversations, packed with their boundaries."""

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the tokenizer, including added tokens."""
        return self._template.vocab_size

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.config.tokenizer, self.config.template)

    def load(self) -> ChatRows:
        return ChatRows(self.config, self.context, self._template)
