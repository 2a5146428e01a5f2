"""Makes samples of equal length from a stream of tokens and its documents: pack, cut, pad; torch-free.

Labels are already shifted: each is the next token. Document d of a stream has the tokens [offsets[d], offsets[d + 1]).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sley_core.api.data import IGNORE_INDEX, DataContext
from sley_core.errors import PlanError
from sley_data.config import Documents, TextConfig, TokensConfig
from sley_data.documents import load_tokenizer, locate_window, num_windows
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


class TokenRows(StreamSamples):
    """The samples of a split of `data.text` or `data.tokens`. Implements `api.data.DataRows`.

    notes: sentences for the user. tokenizer: the table's tokenizer if it is already loaded. Raises PlanError with all missing
    and empty files, and "data-short" if the data is shorter than one sample.
    """

    def __init__(self, config: TextConfig | TokensConfig, context: DataContext, tokenizer: Tokenizer | None = None) -> None:
        self._config = config
        self.notes: list[str] = []
        if isinstance(config, TokensConfig):
            stream = token_stream(config, context.split)
        else:
            stream = text_stream(config, context.split, tokenizer or load_tokenizer(config), self.notes)
        super().__init__(stream, config.documents, config.sequence)
        if not len(self):
            message = f"the data has {len(stream)} tokens, but a sample needs {config.sequence} tokens and a label for the last"
            hint = "use more text or a smaller `sequence`"
            raise PlanError("data-short", message, path=("data", "sequence"), hint=hint)

    @property
    def digest(self) -> str:
        """A digest of all tokens and document lengths, or of blocks of them for token files."""
        return self.stream.sampled_digest if isinstance(self._config, TokensConfig) else self.stream.digest

    @property
    def counts(self) -> dict[str, Any]:
        """The counts, as in `DataRows`. Documents of token files with `documents = "cut"` are unknown."""
        num_tokens = len(self.stream)
        trained = num_tokens - (1 if self.documents == "cut" else len(self._lengths))
        positions = len(self) * self.sequence
        are_known = self.documents != "cut" or isinstance(self._config, TextConfig)
        return {
            "documents": len(self._lengths) if are_known else None,
            "tokens": num_tokens,
            "trained": trained,
            "positions": positions,
            "padding": positions - trained if self.documents == "pad" else 0,
            "longest": int(self._lengths.max()) if are_known else None,
            "dropped": {},
        }

    def row(self, index: int) -> dict[str, list[int]]:
        """Returns sample `index` as lists."""
        return {name: values.tolist() for name, values in self.sample(index).items()}
