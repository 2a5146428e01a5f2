"""Loads the tokens of a split of text or token files as one stream of documents; torch-free."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from itertools import accumulate, pairwise
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from sley_core.api.data import IGNORE_INDEX, DataContext, Split
from sley_core.api.files import replace_atomically
from sley_core.errors import PlanError
from sley_data import cache
from sley_data.config import TextConfig, TokensConfig
from sley_data.documents import find_copied_tokens, load_tokenizer, locate_window, num_chunks, num_windows, read_documents
from sley_data.files import File, merge_problems, split_files, text_files, token_files

if TYPE_CHECKING:
    from sley_data.tokenizer import Tokenizer

FORMATS: dict[str, Literal["H", "I"]] = {"uint16": "H", "uint32": "I"}
"""The memoryview format of each token dtype. Bytes have the format "B"."""

_SCAN_BYTES = 1 << 24
"""The number of bytes of a token file that are in memory while it is searched for documents."""

_MAX_BYTES_IN_MEMORY = 1 << 27
"""The minimum size of bytes that are cached as mapped files. Each rank holds smaller text in memory."""


@dataclass(frozen=True)
class Stream:
    """Holds the tokens of documents, one after another.

    parts: views of memory or mapped files, of 8, 16 or 32 bits. A document may be in several parts. offsets: the start of each
    document, and the number of tokens, 64 bits [num_documents + 1]. No document is empty. stored_digest: `digest`, if known.
    """

    parts: Sequence[memoryview]
    offsets: memoryview
    stored_digest: str | None = None

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> list[int]:
        """Returns tokens [start, stop)."""
        tokens: list[int] = []
        number = bisect_right(self._ends, start)
        while start < stop:
            part_start, part_end = self._ends[number] - len(self.parts[number]), self._ends[number]
            tokens += self.parts[number][start - part_start : min(stop, part_end) - part_start]
            start, number = part_end, number + 1
        return tokens

    @property
    def digest(self) -> str:
        """A digest of all tokens and document lengths."""
        return self.stored_digest or _digest([self.parts, [self.offsets]])

    @property
    def sampled_digest(self) -> str:
        """A digest of the length of each part, of blocks of at most 128 KiB per part, and of the document lengths."""
        blocks = ([memoryview(array("q", [len(part)])), *_sample_blocks(part)] for part in self.parts)
        return _digest([*blocks, [self.offsets]])


def _digest(values: Iterable[Sequence[memoryview]]) -> str:
    """Returns a digest of values, each of which may have several parts."""
    digest = blake2b(digest_size=16)
    for parts in values:
        digest.update(f"{parts[0].format if parts else None}{sum(map(len, parts))}".encode())
        for part in parts:
            digest.update(part)
            _release_pages(part)
    return digest.hexdigest()


def _release_pages(part: memoryview) -> None:
    """Removes the pages of a mapped file from this process's memory. The next access loads them again."""
    if isinstance(part.obj, mmap):
        part.obj.madvise(MADV_DONTNEED)


def _sample_blocks(part: memoryview) -> Iterator[memoryview]:
    """Yields 16 blocks of at most 2,048 elements that are spread over a part, from its start to its end."""
    size = 1 << 11 if len(part) > 1 << 15 else max(1, -(-len(part) // 16))
    for number in range(16):
        start = max(0, len(part) - size) * number // 15
        yield part[start : start + size]


def text_stream(config: TextConfig, split: Split, tokenizer: Tokenizer | None, notes: list[str]) -> Stream:
    """Returns the non-empty documents of a split of text in order.

    tokenizer: None for bytes. notes: the list to which sentences for the user are added. The tokens of a large text are cached
    on disk (see `cache`). Raises PlanError with all missing and empty files, or for an unreadable file.
    """
    files, held_out = split_files(config, split, text_files)
    options = (config.separator, config.field, config.end_of_document, config.held_out, config.largest_share, split)
    settings = (4, tokenizer and tokenizer.digest, *options)
    min_bytes = cache.MIN_CACHED_BYTES if tokenizer else _MAX_BYTES_IN_MEMORY
    folder = cache.cache_folder(config.cache, files, held_out, settings, min_bytes)
    if folder is not None:
        documents = read_documents(files, config, split, notes)
        try:
            return _cached_stream(folder, tokenizer, documents, sum(file.num_bytes for file in files), notes)
        except OSError as error:
            notes[:] = [f"the tokens are not kept in {folder}: {error}"]
    tokens, lengths, _ = _encode_documents(tokenizer, read_documents(files, config, split, notes))
    return Stream([memoryview(tokens)], memoryview(array("q", accumulate(filter(None, lengths), initial=0))))


def _encode_documents(tokenizer: Tokenizer | None, documents: Iterable[tuple[str, bytes]]) -> cache.Encoded:
    if tokenizer is not None:
        return *tokenizer.encode(documents), None
    tokens, lengths = array("B"), array("q")
    for _, text in documents:
        tokens.frombytes(text)
        lengths.append(len(text))
    return tokens, lengths, None


def _cached_stream(
    folder: Path, tokenizer: Tokenizer | None, documents: Iterable[tuple[str, bytes]], num_bytes: int, notes: list[str]
) -> Stream:
    """Returns the mapped tokens in the cache folder. Tokenizes the documents first unless the folder is complete."""
    view_format = "B" if tokenizer is None else FORMATS["uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"]

    def map_parts(parts: Iterable[cache.Part], digest: str | None = None) -> Stream:
        tokens = [map_tokens(part.tokens, view_format) for part in parts if part.tokens.stat().st_size]
        return Stream(tokens, map_tokens(folder / "offsets", "q"), digest)

    def summarize(parts: Sequence[cache.Part]) -> dict[str, Any]:
        with replace_atomically(folder / "offsets") as file:
            offsets = array("q", [0])
            for part in parts:
                file.write(offsets[:-1])
                lengths = array("q", part.lengths.read_bytes())
                offsets = array("q", accumulate(filter(None, lengths), initial=offsets[-1]))
            file.write(offsets)
        return {"digest": map_parts(parts).digest, "notes": notes}

    complete = cache.prepare_parts(
        folder, documents, lambda document: len(document[1]), partial(_encode_documents, tokenizer), num_bytes, summarize
    )
    notes[:] = complete["notes"]
    return map_parts(cache.part_files(folder, complete["parts"]), complete["digest"])


def map_tokens(path: Path, view_format: Literal["B", "H", "I", "q"]) -> memoryview:
    """Maps a file of integers as a read-only view.

    The map is shared and read-only, so that a file can be larger than the memory. For a private, writable map, as from
    PyTorch's `from_file`, Linux would reserve memory.
    """
    assert sys.byteorder == "little", "token files are little-endian"
    with path.open("rb") as file:
        return memoryview(mmap(file.fileno(), 0, access=ACCESS_READ)).cast(view_format)


def token_stream(config: TokensConfig, split: Split) -> Stream:
    """Returns the token files of a split as one mapped stream.

    With `documents = "cut"`, the stream is one document. Otherwise, files without an index are searched for `end_of_document`,
    at about 3 s per GB. Raises PlanError with all files that are missing, empty or not a whole number of tokens long.
    """
    files, problems = token_files(config, split)
    if split == "held_out":
        problems += find_copied_tokens(token_files(config, "train")[0], files)
    if problems:
        raise merge_problems(problems)
    parts = [map_tokens(file.path, FORMATS[file.dtype(config)]) for file in files]
    if config.documents == "cut":
        return Stream(parts, memoryview(array("q", [0, sum(map(len, parts))])))
    offsets, part_start = array("q", [0]), 0
    for file, part in zip(files, parts, strict=True):
        for end in _document_ends(file, part, config):
            if part_start + end > offsets[-1]:
                offsets.append(part_start + end)
        part_start += len(part)
    if part_start > offsets[-1]:
        offsets.append(part_start)
    return Stream(parts, memoryview(offsets))


def _document_ends(file: File, part: memoryview, config: TokensConfig) -> Iterator[int]:
    """Yields the ends of the documents in a file, ascending. May also yield the start of the first document."""
    if file.index is not None:
        yield from file.index.offsets
        return
    assert config.end_of_document is not None, file
    content, width = cast(mmap, part.obj), part.itemsize
    token = config.end_of_document.to_bytes(width, "little")
    for start in range(0, len(content), _SCAN_BYTES):
        stop = min(start + _SCAN_BYTES, len(content))
        offset = content.find(token, start, stop)
        while offset >= 0:
            if offset % width == 0:
                yield offset // width + 1
            offset = content.find(token, offset + 1, stop)
        content.madvise(MADV_DONTNEED, start, stop - start)


class TokenRows:
    """The samples of a split of `data.text` or `data.tokens` as lists of numbers, as `api.data.DataRows`."""

    def __init__(self, config: TextConfig | TokensConfig, context: DataContext) -> None:
        """Loads the data. Raises the same PlanError as the datasets."""
        self._config = config
        if isinstance(config, TokensConfig):
            self._stream = token_stream(config, context.split)
        else:
            self._stream = text_stream(config, context.split, load_tokenizer(config), [])
        self._lengths = array("q", (stop - start for start, stop in pairwise(self._stream.offsets)))
        if not len(self):
            raise short_data_error(len(self._stream), config.sequence)

    def __len__(self) -> int:
        if self._config.documents == "pad":
            return num_chunks(self._lengths, self._config.sequence)
        return num_windows(len(self._stream), self._config.sequence)

    @property
    def counts(self) -> dict[str, Any]:
        """The counts, as in `DataRows`. Documents of token files with `documents = "cut"` are unknown."""
        config, num_tokens = self._config, len(self._stream)
        trained = num_tokens - (1 if config.documents == "cut" else len(self._lengths))
        positions = len(self) * config.sequence
        are_known = config.documents != "cut" or isinstance(config, TextConfig)
        return {
            "documents": len(self._lengths) if are_known else None,
            "tokens": num_tokens,
            "trained": trained,
            "positions": positions,
            "padding": positions - trained if config.documents == "pad" else 0,
            "longest": max(self._lengths) if are_known else None,
            "dropped": {},
        }

    def row(self, index: int) -> dict[str, list[int]]:
        """Returns sample `index` of the dataset."""
        sequence = self._config.sequence
        if self._config.documents == "pad":
            return self._padded_row(index)
        start, num_covered = locate_window(index, len(self._stream), sequence)
        values = self._stream.read(start, start + sequence + 1)
        row = {"tokens": values[:-1], "labels": [IGNORE_INDEX] * num_covered + values[1 + num_covered :]}
        if self._config.documents == "pack":
            boundaries = self._boundaries(start)
            for boundary in boundaries:
                row["labels"][boundary - 1] = IGNORE_INDEX
            starts = [0, *(boundary for boundary in boundaries if boundary < sequence)]
            row["positions"] = [position for start, end in pairwise([*starts, sequence]) for position in range(end - start)]
            row["cu_seqlens"] = starts + [sequence] * (self._max_documents + 1 - len(starts))
        return row

    def _padded_row(self, index: int) -> dict[str, list[int]]:
        sequence, offsets = self._config.sequence, self._stream.offsets
        document = bisect_right(self._chunk_ends, index)
        first_sample = self._chunk_ends[document - 1] if document else 0
        start = offsets[document] + (index - first_sample) * sequence
        values = self._stream.read(start, min(start + sequence + 1, offsets[document + 1]))
        num_padding = sequence + 1 - len(values)
        return {"tokens": values[:-1] + [0] * num_padding, "labels": values[1:] + [IGNORE_INDEX] * num_padding}

    @cached_property
    def _chunk_ends(self) -> list[int]:
        return list(accumulate(num_chunks([length], self._config.sequence) for length in self._lengths))

    def _boundaries(self, start: int) -> list[int]:
        """Returns the document starts, relative to `start`, in (start, start + sequence]."""
        offsets = self._stream.offsets
        first, last = bisect_right(offsets, start), bisect_right(offsets, start + self._config.sequence)
        return [offset - start for offset in offsets[first:last]]

    @cached_property
    def _max_documents(self) -> int:
        """The largest number of documents in a sample."""
        sequence, num_tokens = self._config.sequence, len(self._stream)
        starts = (locate_window(index, num_tokens, sequence)[0] for index in range(len(self)))
        return max(1 + sum(boundary < sequence for boundary in self._boundaries(start)) for start in starts)


def short_data_error(num_tokens: int, sequence: int) -> PlanError:
    """Returns the PlanError "data-short" for data of `num_tokens`."""
    message = f"the data has {num_tokens} tokens, but a sample needs {sequence} tokens and a label for the last token"
    return PlanError("data-short", message, path=("data", "sequence"), hint="use more text or a smaller `sequence`")
