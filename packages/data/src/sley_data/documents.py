"""Reads the documents of one split of a text corpus; torch-free.

The content of a document decides whether it is held out, so that all copies are in the same split. Ranks, the order of the
files, the seed and the path of the corpus have no influence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import file_digest, sha256
from itertools import chain, compress, pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.api.data import Split
from sley_core.records import Problem
from sley_data.config import TOKEN_BYTES, TextConfig, TokensConfig
from sley_data.files import C, File, merge_problems, text_files
from sley_data.formats import opened
from sley_data.rows import bad_row, rows_of

if TYPE_CHECKING:
    from sley_data.tokenizer import Tokenizer

_PIECE_BYTES = 1 << 10
"""The size of each piece of a held-out token file that is searched for in the training files."""

_MAX_SEARCH_BYTES = 1 << 30
"""The number of bytes of all files that are searched for copies of held-out tokens, in about a second."""


@dataclass(frozen=True)
class Content:
    """Identifies the content of a document.

    size: its number of bytes. source: its digest, or the file whose content it is.
    """

    size: int
    source: bytes | Path

    def key(self) -> bytes:
        """Returns the digest of the content; may read a file."""
        if isinstance(self.source, bytes):
            return self.source
        with self.source.open("rb") as file:
            return file_digest(file, "sha256").digest()


def content_of(text: bytes) -> Content:
    """Returns the content of a text."""
    return Content(len(text), sha256(text).digest())


def content_of_file(file: File) -> Content:
    """Returns the content of a file; reads a compressed file. Raises OSError, and the same PlanError as `opened`."""
    return content_of(read(file.path)) if file.is_compressed else Content(file.num_bytes, file.path)


def is_in_share(content: Content, share: float) -> bool:
    """Returns whether the key of a document, uniform over [0, 1), is below `share`; computes no key if the share is 0."""
    return share > 0 and int.from_bytes(content.key()[:8], "big") < share * 2**64


class ContentSet:
    """A set of documents by content; computes keys only for documents of equal sizes."""

    def __init__(self, contents: Iterable[Content]) -> None:
        self._contents: dict[int, list[Content]] = {}
        self._keys: dict[int, set[bytes]] = {}
        for content in contents:
            self._contents.setdefault(content.size, []).append(content)

    def __contains__(self, content: Content) -> bool:
        size = content.size
        if size not in self._contents:
            return False
        if size not in self._keys:
            self._keys[size] = {known.key() for known in self._contents[size]}
        return content.key() in self._keys[size]

    def count(self, contents: Iterable[Content]) -> int:
        """Returns the number of `contents` that are in the set."""
        return sum(content in self for content in contents)


def find_copied_tokens(trained: Sequence[File], held_out: Sequence[File]) -> list[Problem]:
    """Returns a problem for each held-out token file whose tokens are in a training file.

    Searches for three pieces of each held-out file. Large training files are searched only at their start and end.
    """
    budget = _MAX_SEARCH_BYTES // max(1, len(trained) * len(held_out))
    problems = []
    for evaluated in held_out:
        try:
            pieces = _pieces(evaluated)
            copy = next((file for file in trained if pieces and _contains_all(file, pieces, budget)), None)
        except OSError:
            continue  # the code that opens it later reports the error
        if copy is not None:
            message = f"the tokens of `{evaluated.path}` are also in `{copy.path}`, and would be trained on"
            hint = "remove the held-out tokens from `files`"
            problems.append(Problem(("data", "held_out_files"), message, hint, "held-out-trained"))
    return problems


def _contains_all(file: File, pieces: Sequence[bytes], budget: int) -> bool:
    with file.path.open("rb") as stored, mmap(stored.fileno(), 0, access=ACCESS_READ) as content:
        return all(_contains(content, piece, budget) for piece in pieces)


def _pieces(file: File) -> list[bytes]:
    """Returns pieces from the start, the middle and the end of a token file, without uniform pieces."""
    pieces = []
    with file.path.open("rb") as content:
        for start in (0, (file.num_bytes - _PIECE_BYTES) // 2, file.num_bytes - _PIECE_BYTES):
            content.seek(max(0, start))
            pieces.append(content.read(_PIECE_BYTES))
    return [piece for piece in dict.fromkeys(pieces) if len(set(piece)) > 4]


def _contains(content: mmap, piece: bytes, budget: int) -> bool:
    if len(content) <= budget:
        return content.find(piece) >= 0
    return content.find(piece, 0, budget // 2) >= 0 or content.find(piece, len(content) - budget // 2) >= 0


_MAX_COMPARE_BYTES = 1 << 30
"""The number of bytes that are read only to compare or select documents, in about a second."""


def read_documents(
    files: Sequence[File], config: TextConfig, split: Split, notes: list[str] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the content of each document of a split, in the order of `files`, the result of `text_files`.

    Excludes documents that are also in `held_out_files`, and adds a sentence about them to `notes`.
    """
    if split == "held_out" and not (config.held_out or config.held_out_files):
        return
    read_file = document_reader(config) or _read_whole_file
    is_chosen = split_filter(config, split, _held_out_contents)
    count = num_excluded = 0
    for name, text in chain.from_iterable(map(read_file, files)):
        count += 1
        if is_chosen is None or is_chosen(content_of(text)):
            yield name, text
        else:
            num_excluded += 1
    if num_excluded and not config.largest_share and notes is not None:
        notes.append(f"{num_excluded} of {count} documents in `files` are also in `held_out_files`: training excludes them")


def contents_of(files: Sequence[File], config: TextConfig) -> list[Content]:
    """Returns the contents of all documents in `files`. Reads files with several documents."""
    read_file = document_reader(config)
    if read_file is None:
        return [content_of_file(file) for file in files]
    return [content_of(text) for file in files for _, text in read_file(file)]


def describe_overlap(training: TextConfig, evaluated: TextConfig) -> str:
    """Describes the held-out documents of `evaluated` on which a run with the table `training` is trained; "" without any.

    Compares contents, and may read all data of the run.
    """
    if (training.separator, training.field) != (evaluated.separator, evaluated.field):
        return "the run splits its files into other documents: it is not known whether it was trained on these"
    held_out_files, problems = text_files(evaluated, "held_out")
    if problems:
        return ""  # the evaluation reports them
    training_files, problems = text_files(training, "train")
    if problems:
        return f"it is not known whether the run was trained on the held-out documents: {problems[0].message}"
    if _is_large(training_files):
        reason = f"its data have more than {_MAX_COMPARE_BYTES >> 30} GiB, and are not read for this"
        return f"it is not known whether the run was trained on the held-out documents: {reason}"
    trained, held_out = contents_of(training_files, training), contents_of(held_out_files, evaluated)
    trained = list(compress(trained, _belong_to_split(trained, training, "train")))
    held_out = list(compress(held_out, _belong_to_split(held_out, evaluated, "held_out")))
    count = ContentSet(trained).count(held_out)
    if not count:
        return ""
    return f"the run was trained on {count} of the {len(held_out)} held-out documents: this is no held-out loss"


def document_reader(config: TextConfig) -> Callable[[File], Iterable[tuple[str, bytes]]] | None:
    """Returns a function that yields the name and the content of each document in a file; None if each file is one document.

    The function raises PlanError "data-json" for a row without text in `field`.
    """
    field, separator = config.field, config.separator
    if field is not None:
        return lambda file: _read_rows(file, field)
    return None if separator is None else lambda file: _split_file(file, separator.encode())


def select_files(files: Sequence[File], config: TextConfig, split: Split) -> list[File]:
    """Returns the files of a split, where each file is one document."""
    if not config.largest_share and not any(table.held_out_files for table in config.all_sources):
        return list(files) if split == "train" else []
    return list(compress(files, _belong_to_split([content_of_file(file) for file in files], config, split)))


def _is_large(files: Sequence[File]) -> bool:
    """Returns whether the files are too large to read them only to compare or select documents."""
    return sum(file.num_bytes for file in files) > _MAX_COMPARE_BYTES


def _belong_to_split(contents: Sequence[Content], config: TextConfig, split: Split) -> list[bool]:
    """Returns for each document whether it belongs to the split. Computes only the keys that decide this."""
    is_chosen = split_filter(config, split, _held_out_contents)
    return [is_chosen is None or is_chosen(content) for content in contents]


def split_filter(
    config: C, split: Split, held_out_contents: Callable[[C], Iterable[Content]]
) -> Callable[[Content], bool] | None:
    """Returns a function that returns whether a document belongs to the split; None if all documents do.

    held_out_contents: returns the contents in the `held_out_files` of a table. The training split also excludes the held-out
    documents of the other sources of a mixture.
    """
    if split == "held_out":
        return None if config.held_out_files else lambda content: is_in_share(content, config.held_out)
    share = config.largest_share
    with_files = [table for table in config.all_sources if table.held_out_files]
    if not share and not with_files:
        return None
    held_out = ContentSet(chain.from_iterable(map(held_out_contents, with_files)))
    return lambda content: not is_in_share(content, share) and content not in held_out


def _held_out_contents(config: TextConfig) -> list[Content]:
    """Returns the contents of the documents in `held_out_files`. Raises PlanError with all problems of the files."""
    files, problems = text_files(config, "held_out")
    if problems:
        raise merge_problems(problems)
    return contents_of(files, config)


def read(path: Path) -> bytes:
    """Returns the decompressed content of a file. Raises OSError, and the same PlanError as `opened`."""
    with opened(path) as file:
        return file.read()


def _read_whole_file(file: File) -> Iterator[tuple[str, bytes]]:
    yield file.name, read(file.path)


def _split_file(file: File, separator: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields the non-empty documents of a file, with the names `file#0`, `file#1`, ..., without their separators.

    A `\\n` in the separator also matches `\\r\\n`. At most a block and a document are in memory.
    """
    pattern = re.compile(re.sub(rb"(?:\\\r)?\\\n", rb"\r?\n", re.escape(separator)))
    number, rest = 0, b""
    with opened(file.path) as content:
        while block := content.read(max(_READ_BYTES, len(rest))):
            *texts, rest = pattern.split(rest + block)
            for text in texts:
                if text:
                    yield f"{file.name}#{number}", text
                number += 1
    if rest:
        yield f"{file.name}#{number}", rest


def _read_rows(file: File, field: str) -> Iterator[tuple[str, bytes]]:
    """Yields the non-empty texts in the rows of a file, with the names `file#1`, `file#2`, ..."""
    for number, row in rows_of(file, (field,) if file.is_table else None):
        text = row.get(field, "" if file.is_table else None)  # null in a table
        if not isinstance(text, str):
            keys = ", ".join(f"`{key}`" for key in row)
            reason = f"has no text as `{field}`" if field in row else f"has no `{field}`"
            raise bad_row(file, number, reason, f"its keys are {keys}" if keys and field not in row else None)
        try:
            content = text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise bad_row(file, number, f"cannot be read: {error}") from None
        if content:
            yield f"{file.name}#{number}", content


def num_windows(num_tokens: int, sequence: int) -> int:
    """Returns the number of windows over `num_tokens`: ceil((num_tokens - 1) / sequence), or 0 if no window is full."""
    return -(-(num_tokens - 1) // sequence) if num_tokens > sequence else 0


def window(index: int, num_tokens: int, sequence: int) -> tuple[int, int]:
    """Returns the start of window `index` in the stream, and the number of its labels that earlier windows contain.

    The last window starts earlier so that it is full. No token is dropped or added, and each label counts once.

        stream   0 1 2 3 4 5 6 7 8 9       N = 10, sequence = 4
        window 0 a b c d .                 labels 1..4
        window 1         a b c d .         labels 5..8
        window 2           x x x d .       starts at 5; labels 6..8 are ignored, 9 is new
    """
    regular = index * sequence
    start = min(regular, num_tokens - 1 - sequence)
    return start, regular - start


def num_chunks(lengths: Iterable[int], sequence: int) -> int:
    """Returns the number of samples of padded documents: ceil((length - 1) / sequence) for each document."""
    return sum(-(-(length - 1) // sequence) for length in lengths if length > 1)


ALWAYS_READ = 1 << 20
"""The size of text up to which it is read and tokenized for an exact number of samples."""

_READ_BYTES = 1 << 20


def count_samples(config: TextConfig | TokensConfig, split: Split, files: Sequence[File]) -> int | None:
    """Returns the number of samples in an epoch of a split; None if the number is only known when the data is loaded.

    files: the result of `text_files` or `token_files` for this split.
    """
    lengths = _text_lengths(config, split, files) if isinstance(config, TextConfig) else _token_lengths(config, files)
    if lengths is None:
        return None
    if config.documents == "pad":
        return num_chunks(lengths, config.sequence)
    return num_windows(sum(lengths), config.sequence)


def _token_lengths(config: TokensConfig, files: Sequence[File]) -> list[int] | None:
    """Returns the number of all tokens as one length, or the length of each padded document; None if only the tokens tell."""
    if config.documents != "pad":
        return [sum(file.num_bytes // TOKEN_BYTES[file.dtype(config)] for file in files)]
    indices = [file.index for file in files if file.index is not None]
    if len(indices) < len(files):
        return None
    return [stop - start for index in indices for start, stop in pairwise(index.offsets)]


def _text_lengths(config: TextConfig, split: Split, files: Sequence[File]) -> Sequence[int] | None:
    """Returns the number of tokens of each document; None if a large corpus must be read for it."""
    has_file_sizes = document_reader(config) is None and config.tokenizer is None
    if has_file_sizes and not any(file.is_compressed for file in files) and not (config.largest_share and _is_large(files)):
        return [file.num_bytes for file in select_files(files, config, split)]
    if sum(file.num_bytes for file in files) > ALWAYS_READ:
        return None
    documents = read_documents(files, config, split)
    tokenizer = load_tokenizer(config)
    return [len(text) for _, text in documents] if tokenizer is None else tokenizer.encode(documents)[1]


def load_tokenizer(config: TextConfig) -> Tokenizer | None:
    """Returns the tokenizer of a table, or None for bytes."""
    if config.tokenizer is None:
        return None
    from sley_data.tokenizer import Tokenizer  # bytes need none

    return Tokenizer(config.tokenizer, config.end_of_document)
