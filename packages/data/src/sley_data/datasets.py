"""The datasets `data.text` and `data.tokens`: samples of equal length from a stream of documents, and checks before a run.

Labels are already shifted: the label at a position is the next token. Document d of a stream has the tokens
[offsets[d], offsets[d + 1]). Only reading a sample imports torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import cached_property, wraps
from typing import Any, ParamSpec

import numpy as np

from sley_core.api.data import BOUNDARY_FIELDS, IGNORE_INDEX, TOKEN_FIELDS, DataContext, DataInfo, Sample, Split
from sley_core.errors import PlanError, SleyError
from sley_core.records import Problem
from sley_data.documents import find_copied_tokens, read_file
from sley_data.files import DataFile, find_document_files, find_token_files
from sley_data.formats import IntegerArray
from sley_data.plugin import BYTE_VOCAB_SIZE, DocumentMode, TextConfig, TokensConfig
from sley_data.streams import MAX_BYTES_IN_MEMORY, TokenStream, load_text_stream, load_token_stream
from sley_data.tokenizer import Tokenizer

_WINDOWS_PER_BLOCK = 1 << 20  # the number of windows whose documents are counted at a time, to limit memory use


def count_windows(num_tokens: int, sequence_length: int) -> int:
    """Returns the number of windows (samples of `sequence_length` tokens and as many labels) in a stream of `num_tokens`
    tokens: ceil((num_tokens - 1) / sequence_length), or 0 if no window is full.
    """
    return -(-(num_tokens - 1) // sequence_length) if num_tokens > sequence_length else 0


def locate_window(index: int, num_tokens: int, sequence_length: int) -> tuple[int, int]:
    """Returns the position in the stream at which window `index` starts, and how many of its labels are in earlier windows.

    The last window starts early enough to be full. No token is dropped or added, and each label counts once.

        stream   0 1 2 3 4 5 6 7 8 9       num_tokens = 10, sequence_length = 4
        window 0 a b c d .                 labels 1..4
        window 1         a b c d .         labels 5..8
        window 2           x x x d .       starts at 5; labels 6..8 are ignored, 9 is new
    """
    regular_start = index * sequence_length
    start = min(regular_start, num_tokens - 1 - sequence_length)
    return start, regular_start - start


class StreamSamples:
    """Splits a stream into samples of `sequence_length` tokens. Each label of the stream counts in exactly one sample.
    documents: how documents become samples, such as "pack".
    """

    def __init__(self, stream: TokenStream, documents: DocumentMode, sequence_length: int) -> None:
        self.stream, self.documents, self.sequence_length = stream, documents, sequence_length
        self._lengths = np.diff(stream.offsets)

    def __len__(self) -> int:
        if self.documents == "pad":
            return int(self._chunk_ends[-1]) if len(self._chunk_ends) else 0
        return count_windows(len(self.stream), self.sequence_length)

    def read_sample(self, index: int) -> dict[str, IntegerArray]:
        """Returns sample `index`: tokens and labels, int64 [sequence_length], and for "pack" also positions and `cu_seqlens`.
        Labels that are also in an earlier sample are ignored. With "pack" and "pad", labels that cross a document boundary are
        ignored too. `positions`, int64 [sequence_length], restarts at 0 at the start of each document and of the window.
        `cu_seqlens`, int32 [max_documents_per_window + 1], contains the starts of the documents in the window, padded with
        `sequence_length`.
        """
        if self.documents == "pad":
            return self._padded_sample(index)
        start, num_covered = locate_window(index, len(self.stream), self.sequence_length)
        values = self.stream.read(start, start + self.sequence_length + 1)
        labels = values[1:].copy()
        labels[:num_covered] = IGNORE_INDEX
        sample = {"tokens": values[:-1], "labels": labels}
        return sample | self._mark_boundaries(start, labels) if self.documents == "pack" else sample

    def _mark_boundaries(self, start: int, labels: IntegerArray) -> dict[str, IntegerArray]:
        """Sets the `labels` that cross a document boundary to IGNORE_INDEX in place; returns positions and `cu_seqlens`."""
        offsets = self.stream.offsets
        first, last = np.searchsorted(offsets, [start, start + self.sequence_length], side="right")
        boundaries = offsets[first:last] - start
        labels[boundaries - 1] = IGNORE_INDEX
        starts = np.concatenate([[0], boundaries[boundaries < self.sequence_length]])
        positions = np.arange(self.sequence_length) - np.repeat(starts, np.diff(starts, append=self.sequence_length))
        cu_seqlens = np.full(self.max_documents_per_window + 1, self.sequence_length, np.int32)
        cu_seqlens[: len(starts)] = starts
        return {"positions": positions, "cu_seqlens": cu_seqlens}

    def _padded_sample(self, index: int) -> dict[str, IntegerArray]:
        """Returns sample `index` for "pad": a piece of one document, padded with tokens 0 and ignored labels."""
        document = int(np.searchsorted(self._chunk_ends, index, side="right"))
        first_sample = int(self._chunk_ends[document - 1]) if document else 0
        start = int(self.stream.offsets[document]) + (index - first_sample) * self.sequence_length
        values = self.stream.read(start, min(start + self.sequence_length + 1, int(self.stream.offsets[document + 1])))
        tokens, labels = np.zeros(self.sequence_length, np.int64), np.full(self.sequence_length, IGNORE_INDEX)
        tokens[: len(values) - 1], labels[: len(values) - 1] = values[:-1], values[1:]
        return {"tokens": tokens, "labels": labels}

    @cached_property
    def _chunk_ends(self) -> IntegerArray:
        """The number of samples up to the end of each document, for `documents = "pad"`, int64 [num_documents]."""
        return np.cumsum(-(-(self._lengths - 1) // self.sequence_length))

    @cached_property
    def max_documents_per_window(self) -> int:
        """The largest number of documents in a window, including partial documents."""
        offsets, largest, count = self.stream.offsets, 0, count_windows(len(self.stream), self.sequence_length)
        for first in range(0, count, _WINDOWS_PER_BLOCK):
            starts = np.arange(first, min(first + _WINDOWS_PER_BLOCK, count)) * self.sequence_length
            starts = starts.clip(max=len(self.stream) - 1 - self.sequence_length)
            num_earlier = np.searchsorted(offsets, starts, side="right")
            num_starts = np.searchsorted(offsets, starts + self.sequence_length) - num_earlier
            largest = max(largest, int(num_starts.max()) + 1)
        return largest


class LazyDataset(ABC):
    """The base class of token datasets, which loads the data on the first access to the length, a sample, the counts or the
    digest. A subclass also defines `counts` and `data_digest`. data_notes: sentences for the user, complete after loading.
    """

    def __init__(self, config: Any, context: DataContext) -> None:
        self.config = config
        self.context = context
        self.data_notes: list[str] = []

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of token ids of the data. May load the tokenizer, but not the data."""

    @property
    @abstractmethod
    def rows(self) -> Sized:
        """The samples. The first access loads the data, adds to `data_notes`, and may raise PlanError, such as "data-short"."""

    @abstractmethod
    def read_sample(self, index: int) -> dict[str, IntegerArray]:
        """Returns the arrays of sample `index`, keyed by the name of the field."""

    @cached_property
    def info(self) -> DataInfo:
        """The fields of the samples, the vocabulary size and the sequence length. May load the tokenizer, but not the data."""
        is_packed = getattr(self.config, "documents", "pack") == "pack"
        return DataInfo(TOKEN_FIELDS | (BOUNDARY_FIELDS if is_packed else {}), self.vocab_size, self.config.sequence)

    def __len__(self) -> int:
        """Returns the number of samples. Loads the data."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Returns sample `index` as tensors, with the fields of `info`. Raises IndexError if `index` is not in [0, len)."""
        import torch  # not needed for the counts

        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        return {name: torch.from_numpy(values) for name, values in self.read_sample(index).items()}


class TokenDataset(LazyDataset):
    """The dataset of a text corpus or of token files. Loading raises PlanError with all missing and empty files, or PlanError
    "data-short" (training) or "held-out" for a split with too few tokens for a sample.
    """

    config: TextConfig | TokensConfig

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the table or of its tokenizer; 256 for bytes."""
        if isinstance(self.config, TokensConfig):
            return self.config.vocab_size
        return BYTE_VOCAB_SIZE if self._tokenizer is None else self._tokenizer.vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if isinstance(self.config, TokensConfig) or self.config.tokenizer is None:
            return None
        return Tokenizer(self.config.tokenizer, self.config.end_of_document)

    @cached_property
    def rows(self) -> StreamSamples:
        config, split = self.config, self.context.split
        if isinstance(config, TokensConfig):
            stream = load_token_stream(config, split)
        else:
            stream = load_text_stream(config, split, self._tokenizer, self.data_notes)
        samples = StreamSamples(stream, config.documents, config.sequence)
        if not len(samples):
            raise self._short_error(len(stream))
        return samples

    def read_sample(self, index: int) -> dict[str, IntegerArray]:
        return self.rows.read_sample(index)

    def _short_error(self, num_tokens: int) -> PlanError:
        """Returns the error for a split with too few tokens for a sample. num_tokens: the number of tokens in the split."""
        config, needed = self.config, self.config.sequence + 1  # the last token is only a label
        is_text, holds_out = isinstance(config, TextConfig), bool(config.held_out_files or getattr(config, "held_out", 0))
        if self.context.split == "held_out":
            message = "there is no held-out data to evaluate on"
            if holds_out:
                message = f"the held-out data has {num_tokens} tokens, but a sample needs {needed}"
            hint = "add files to `held_out_files` in `[data]`"
            if is_text and not config.held_out_files:
                hint = 'set `separator = "\\n\\n"` to split files into paragraphs, increase `held_out`, or add `held_out_files`'
            return PlanError("held-out", message, path=("evaluation",), hint=hint)
        if is_text and holds_out:
            message = f"without the held-out documents, `files` has {num_tokens} tokens, but a sample needs {needed}"
            hint = 'set `separator = "\\n\\n"` to split files into paragraphs, or add more `files`'
            return PlanError("data-short", message, path=("data", "files"), hint=hint)
        message = f"the data has {num_tokens} tokens, but a sample needs {needed}"
        return PlanError("data-short", message, path=("data", "sequence"), hint="use more data or a smaller `sequence`")

    @property
    def token_parts(self) -> Sequence[IntegerArray]:
        """The tokens of all documents in order, in arrays of uint8, uint16 or uint32, of shape [tokens]. Loads the data."""
        return self.rows.stream.parts

    @property
    def data_digest(self) -> str:
        """A digest of all tokens and document lengths; for token files, only of some blocks of each file. Loads the data."""
        return self.rows.stream.digest

    @property
    def counts(self) -> dict[str, Any]:
        """The counts of documents, tokens and positions in the split, by name. "documents" and "longest" are None for token
        files with `documents = "cut"`.
        """
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


MAX_CHECK_BYTES = 1 << 20
"""The maximum size in bytes of text that a check reads and tokenizes only to count samples."""

P = ParamSpec("P")  # the parameters of a check


def report_errors(check: Callable[P, Iterator[Problem]]) -> Callable[P, Iterator[Problem]]:
    """Returns a function that yields the problems of `check`, and the faults in a SleyError or OSError that `check` raises."""

    @wraps(check)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Iterator[Problem]:
        try:
            yield from check(*args, **kwargs)
        except SleyError as error:
            yield from (Problem(d.path, d.message, d.hint, d.code) for d in error.diagnostics)
        except OSError as error:
            yield Problem(("data",), f"the data cannot be read: {error}", None, "data-missing")

    return wrapper


@report_errors
def check_token_dataset(
    config: TextConfig | TokensConfig, *, evaluates: bool, vocab_size: int | None = None
) -> Iterator[Problem]:
    """Yields the problems of a `data.text` or `data.tokens` table (`DatasetRecord.check`). vocab_size: the model's, or None."""
    if isinstance(config, TokensConfig):
        train, held_out = find_token_files(config, "train"), find_token_files(config, "held_out")
    else:
        train = find_document_files(config, "train")
        held_out = find_document_files(config, "held_out") if config.held_out_files else train
    problems = dict.fromkeys((*train[1], *held_out[1]))
    yield from problems
    dataset = TokenDataset(config, DataContext())
    yield from check_vocabulary(vocab_size, dataset.vocab_size)
    if problems:
        return
    if isinstance(config, TokensConfig):
        problems = dict.fromkeys(find_copied_tokens(train[0], held_out[0]))
    elif config.field is not None:  # reads the first row; later rows are read only in the run
        for file in dict.fromkeys((*train[0], *held_out[0])):
            next(read_file(config, file), None)
    yield from problems
    if problems:
        return
    if _can_count_samples(config, "train", train[0]):
        config.check_num_samples(len(dataset))
    if evaluates and _can_count_samples(config, "held_out", held_out[0]):
        len(TokenDataset(config, DataContext(split="held_out")))


def check_vocabulary(vocab_size: int | None, count: int) -> Iterator[Problem]:
    """Yields a problem if the model's `vocab_size` is known and less than `count`, the vocabulary size of the data."""
    if vocab_size is not None and vocab_size < count:
        message = f"`vocab_size` is {vocab_size}, but the data has {count} token ids"
        yield Problem(("model", "vocab_size"), message, "increase or remove `vocab_size`", "model-vocabulary")


def _can_count_samples(config: TextConfig | TokensConfig, split: Split, files: Sequence[DataFile]) -> bool:
    """Returns whether a check can count the samples of a split in about a second. files: the files of the split."""
    holds_out = bool(config.held_out_files) or bool(getattr(config, "held_out", 0))
    if split == "held_out" and not holds_out:
        return True  # nothing is read, since the split is empty
    is_cheap = isinstance(config, TokensConfig) or not (config.field or config.separator or config.tokenizer)
    is_cheap = is_cheap and not any(file.format.is_compressed for file in files)
    return sum(file.num_bytes for file in files) <= (MAX_BYTES_IN_MEMORY if is_cheap else MAX_CHECK_BYTES)
