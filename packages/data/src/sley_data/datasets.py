"""The datasets `data.text` and `data.tokens`: samples of equal length from a stream of tokens and its documents.

Labels are already shifted: each is the next token. Document d of a stream has the tokens [offsets[d], offsets[d + 1]). Imports
torch only to read a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sley_core.api.data import BOUNDARY_FIELDS, IGNORE_INDEX, TOKEN_FIELDS, DataContext, DataInfo, Sample
from sley_core.errors import PlanError
from sley_data.documents import load_tokenizer, locate_window, num_ids, num_windows
from sley_data.plugin import Documents, TextConfig, TokensConfig
from sley_data.streams import Integers, Stream, text_stream, token_stream

if TYPE_CHECKING:
    from sley_data.tokenizer import Tokenizer

WINDOW_BLOCK = 1 << 20
"""The number of windows whose documents are counted in one operation."""


class StreamSamples:
    """The samples of `sequence` tokens of a stream. Each label of the data occurs once per epoch."""

    def __init__(self, stream: Stream, documents: Documents, sequence: int) -> None:
        self.stream, self.documents, self.sequence = stream, documents, sequence
        self._lengths = np.diff(stream.offsets)

    def __len__(self) -> int:
        if self.documents == "pad":
            return int(self._chunk_ends[-1]) if len(self._chunk_ends) else 0
        return num_windows(len(self.stream), self.sequence)

    def sample(self, index: int) -> dict[str, Integers]:
        """Returns sample `index`: tokens and labels, int64 [sequence], and for "pack" also positions and `cu_seqlens`.

        Labels that earlier windows include are ignored, and no label of "pack" and "pad" crosses a document boundary.
        `positions`, int64 [sequence], restarts at 0 at the start of each document and of the window. `cu_seqlens`, int32
        [max_documents + 1], contains the starts of the documents in the window, padded with `sequence`.
        """
        if self.documents == "pad":
            return self._padded_sample(index)
        start, num_covered = locate_window(index, len(self.stream), self.sequence)
        values = self.stream.read(start, start + self.sequence + 1)
        labels = values[1:].copy()
        labels[:num_covered] = IGNORE_INDEX
        sample = {"tokens": values[:-1], "labels": labels}
        return sample | self._add_boundaries(start, labels) if self.documents == "pack" else sample

    def _add_boundaries(self, start: int, labels: Integers) -> dict[str, Integers]:
        """Ignores the labels that cross a boundary, and returns the positions and `cu_seqlens`."""
        offsets = self.stream.offsets
        first, last = np.searchsorted(offsets, [start, start + self.sequence], side="right")
        boundaries = offsets[first:last] - start
        labels[boundaries - 1] = IGNORE_INDEX
        starts = np.concatenate([[0], boundaries[boundaries < self.sequence]])
        positions = np.arange(self.sequence) - np.repeat(starts, np.diff(starts, append=self.sequence))
        cu_seqlens = np.full(self.max_documents + 1, self.sequence, np.int32)
        cu_seqlens[: len(starts)] = starts
        return {"positions": positions, "cu_seqlens": cu_seqlens}

    def _padded_sample(self, index: int) -> dict[str, Integers]:
        """Returns a piece of one document, padded with token 0, which every vocabulary has, and ignored labels.

        With causal attention, no token attends to the padding.
        """
        document = int(np.searchsorted(self._chunk_ends, index, side="right"))
        first_sample = int(self._chunk_ends[document - 1]) if document else 0
        start = int(self.stream.offsets[document]) + (index - first_sample) * self.sequence
        values = self.stream.read(start, min(start + self.sequence + 1, int(self.stream.offsets[document + 1])))
        tokens, labels = np.zeros(self.sequence, np.int64), np.full(self.sequence, IGNORE_INDEX)
        tokens[: len(values) - 1], labels[: len(values) - 1] = values[:-1], values[1:]
        return {"tokens": tokens, "labels": labels}

    @cached_property
    def _chunk_ends(self) -> Integers:
        """The number of samples of padded documents up to the end of each document."""
        return np.cumsum(-(-(self._lengths - 1) // self.sequence))

    @cached_property
    def max_documents(self) -> int:
        """The largest number of documents in a window, including partial documents."""
        offsets, largest, count = self.stream.offsets, 0, num_windows(len(self.stream), self.sequence)
        for first in range(0, count, WINDOW_BLOCK):
            starts = np.arange(first, min(first + WINDOW_BLOCK, count)) * self.sequence
            starts = starts.clip(max=len(self.stream) - 1 - self.sequence)
            num_starts = np.searchsorted(offsets, starts + self.sequence) - np.searchsorted(offsets, starts, side="right")
            largest = max(largest, int(num_starts.max()) + 1)
        return largest


class RowsDataset:
    """The samples of a split as tensors. The first access to the length, a sample, the counts or the digest loads the data.

    data_notes: sentences for the user, once the data is loaded. A subclass defines `vocab_size`, `load`, `counts` and
    `data_digest`.
    """

    def __init__(self, config: Any, context: DataContext) -> None:
        self.config = config
        self.context = context
        self.data_notes: list[str] = []

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        raise NotImplementedError

    def load(self) -> Any:
        """Loads the data and adds notes to `data_notes`. Returns an object with a length and a method `sample`, which returns
        arrays by field. Raises PlanError, such as "data-short".
        """
        raise NotImplementedError

    @cached_property
    def info(self) -> DataInfo:
        """The fields, the vocabulary size and the sequence length. May load the tokenizer, but not the data."""
        is_packed = getattr(self.config, "documents", "pack") == "pack"
        return DataInfo(TOKEN_FIELDS | (BOUNDARY_FIELDS if is_packed else {}), self.vocab_size, self.config.sequence)

    @cached_property
    def rows(self) -> Any:
        """The loaded samples: the result of `load`."""
        return self.load()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index`, with the fields of `info`. Raises IndexError outside [0, len)."""
        import torch  # not needed for the counts

        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        return {name: torch.from_numpy(values) for name, values in self.rows.sample(index).items()}


class TokenDataset(RowsDataset):
    """Samples of a text corpus or of token files.

    Loading raises PlanError with all missing and empty files, and "data-short" if the data is shorter than one sample.
    """

    config: TextConfig | TokensConfig
    rows: StreamSamples

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the table or its tokenizer; 256 for bytes."""
        return num_ids(self.config, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self.config)

    def load(self) -> StreamSamples:
        config = self.config
        if isinstance(config, TokensConfig):
            stream = token_stream(config, self.context.split)
        else:
            stream = text_stream(config, self.context.split, self._tokenizer, self.data_notes)
        samples = StreamSamples(stream, config.documents, config.sequence)
        if not len(samples):
            message = f"the data has {len(stream)} tokens, but a sample needs {config.sequence} tokens and a label for the last"
            hint = "use more text or a smaller `sequence`"
            raise PlanError("data-short", message, path=("data", "sequence"), hint=hint)
        return samples

    @property
    def token_parts(self) -> Sequence[Integers]:
        """The tokens of all documents in order, in one or more arrays [n] of uint8, uint16 or uint32. Loads the data."""
        return self.rows.stream.parts

    @cached_property
    def data_digest(self) -> str:
        """A digest of all tokens and document lengths, or of blocks of them for token files."""
        stream = self.rows.stream
        return stream.sampled_digest if isinstance(self.config, TokensConfig) else stream.digest

    @property
    def counts(self) -> dict[str, Any]:
        """The counts, as in `Dataset`. Documents of token files with `documents = "cut"` are unknown."""
        lengths, documents = np.diff(self.rows.stream.offsets), self.config.documents
        num_tokens, positions = len(self.rows.stream), len(self.rows) * self.config.sequence
        trained = num_tokens - (1 if documents == "cut" else len(lengths))
        are_known = documents != "cut" or isinstance(self.config, TextConfig)
        return {
            "documents": len(lengths) if are_known else None,
            "tokens": num_tokens,
            "trained": trained,
            "positions": positions,
            "padding": positions - trained if documents == "pad" else 0,
            "longest": int(lengths.max()) if are_known else None,
            "dropped": {},
        }
