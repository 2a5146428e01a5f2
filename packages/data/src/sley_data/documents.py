"""Reads the documents of a text corpus, split by split; torch-free.

A document is held out by its content, and never trained on: copies are all on one side, whatever their names. Neither a rank,
an order, a seed nor the place of the corpus matters.
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
from sley_data.files import C, File, as_error, opened, text_files
from sley_data.rows import bad_row, rows_of

if TYPE_CHECKING:
    from sley_data.tokenizer import Tokenizer

_PIECE = 1 << 10
"""Bytes of each piece of a held-out token file that is searched for in the files to train on."""

_SEARCHED = 1 << 30
"""The most bytes of all files together that are searched for copies of held-out tokens: about a second."""


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


def in_share(contents: Iterable[Content], share: float) -> list[bool]:
    """Returns for each document whether its key, uniform over [0, 1), is below `share`; computes no key if that is 0."""
    return [share > 0 and int.from_bytes(each.key()[:8], "big") < share * 2**64 for each in contents]


class AmongOthers:
    """Says of a document whether it is among others; computes keys only where sizes are equal."""

    def __init__(self, others: Iterable[Content]) -> None:
        self._others: dict[int, list[Content]] = {}
        self._keys: dict[int, set[bytes]] = {}
        for each in others:
            self._others.setdefault(each.size, []).append(each)

    def __call__(self, content: Content) -> bool:
        size = content.size
        if size not in self._others:
            return False
        if size not in self._keys:
            self._keys[size] = {each.key() for each in self._others[size]}
        return content.key() in self._keys[size]


def among(contents: Iterable[Content], others: Iterable[Content]) -> list[bool]:
    """Returns for each document whether it is among `others`."""
    return list(map(AmongOthers(others), contents))


def copied_tokens(trained: Sequence[File], held_out: Sequence[File]) -> list[Problem]:
    """Returns a problem for each held-out token file whose tokens a file to train on contains.

    Searches for pieces from three places of each held-out file; of large files to train on, only the beginning and the end.
    """
    budget = _SEARCHED // max(1, len(trained) * len(held_out))
    problems = []
    for evaluated in held_out:
        try:
            pieces = _pieces(evaluated)
            copied = next((file for file in trained if pieces and _has_all(file, pieces, budget)), None)
        except OSError:
            continue  # the code that opens it later reports the error
        if copied is not None:
            message = f"the tokens of `{evaluated.path}` are in `{copied.path}` too, and would be trained on"
            hint = "held-out data must not be trained on: cut them out of `files`"
            problems.append(Problem(("data", "held_out_files"), message, hint, "held-out-trained"))
    return problems


def _has_all(file: File, pieces: Sequence[bytes], budget: int) -> bool:
    with file.path.open("rb") as stored, mmap(stored.fileno(), 0, access=ACCESS_READ) as content:
        return all(_is_in(content, piece, budget) for piece in pieces)


def _pieces(file: File) -> list[bytes]:
    """Returns bytes from the beginning, the middle and the end of a token file, without uniform pieces."""
    pieces = []
    with file.path.open("rb") as content:
        for start in (0, (file.num_bytes - _PIECE) // 2, file.num_bytes - _PIECE):
            content.seek(max(0, start))
            pieces.append(content.read(_PIECE))
    return [piece for piece in dict.fromkeys(pieces) if len(set(piece)) > 4]


def _is_in(content: mmap, piece: bytes, budget: int) -> bool:
    if len(content) <= budget:
        return content.find(piece) >= 0
    return content.find(piece, 0, budget // 2) >= 0 or content.find(piece, len(content) - budget // 2) >= 0


_COMPARED = 1 << 30
"""The most bytes of files that are read only to compare documents, or to choose a split's: about a second."""


def read_documents(
    files: Sequence[File], config: TextConfig, split: Split, notes: list[str] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of the documents of a split, in the order of `files`, which `text_files` returned.

    Leaves out documents that are in `held_out_files` too, and says so in `notes`.
    """
    if split == "held_out" and not (config.held_out or config.held_out_files):
        return
    inside = documents_inside(config) or _whole
    is_chosen = _chooser(config, split)
    count = num_left_out = 0
    for name, text in chain.from_iterable(map(inside, files)):
        count += 1
        if is_chosen is None or is_chosen(content_of(text)):
            yield name, text
        else:
            num_left_out += 1
    if num_left_out and not config.largest_share and notes is not None:
        notes.append(f"{num_left_out} of {count} documents in `files` are in `held_out_files` too: they are not trained on")


def contents_of(files: Sequence[File], config: TextConfig) -> list[Content]:
    """Returns the contents of all documents in `files`; reads these if they have several documents."""
    inside = documents_inside(config)
    if inside is None:
        return [content_of_file(file) for file in files]
    return [content_of(text) for file in files for _, text in inside(file)]


def describe_overlap(own: TextConfig, evaluated: TextConfig) -> str:
    """Says how many held-out documents of `evaluated` a run on `own` was trained on; returns "" if there are none.

    own: the table of the run. Compares contents, for which it may read all data of the run.
    """
    if (own.separator, own.field) != (evaluated.separator, evaluated.field):
        return "these documents are separated in another way than the run's own: whether it has trained on them is not known"
    held_out, trained = text_files(evaluated, "held_out"), text_files(own, "train")
    if held_out[1]:
        return ""  # the evaluation reports it
    unknown = "whether the run has trained on the held-out documents is not known"
    if trained[1]:
        return f"{unknown}: {trained[1][0].message}"
    if _is_large(trained[0]):
        return f"{unknown}: the run's data have more than {_COMPARED >> 30} GiB, and are not read for it"
    known, asked = contents_of(trained[0], own), contents_of(held_out[0], evaluated)
    known = list(compress(known, _chosen(known, own, "train")))
    asked = list(compress(asked, _chosen(asked, evaluated, "held_out")))
    count = sum(among(asked, known))
    return f"the run has trained on {count} of the {len(asked)} held-out documents: this is no held-out loss" if count else ""


def documents_inside(config: TextConfig) -> Callable[[File], Iterable[tuple[str, bytes]]] | None:
    """Returns a function that yields the documents of a file as (name, content); None if each file is one document.

    The function raises PlanError "data-json" with file and row for a row that has no text in `field`.
    """
    field, separator = config.field, config.separator
    if field is not None:
        return lambda file: _texts(file, field)
    return None if separator is None else lambda file: _separated(file, separator.encode())


def of_split(files: Sequence[File], config: TextConfig, split: Split) -> list[File]:
    """Returns the files of a split, if each file is one document."""
    if not config.largest_share and not any(each.held_out_files for each in config.all_sources):
        return list(files) if split == "train" else []
    return list(compress(files, _chosen([content_of_file(file) for file in files], config, split)))


def _is_large(files: Sequence[File]) -> bool:
    """Returns whether reading the files, only to compare or choose documents, would take too long."""
    return sum(file.num_bytes for file in files) > _COMPARED


def _chosen(contents: Sequence[Content], config: TextConfig, split: Split) -> list[bool]:
    """Returns for each document whether it belongs to the split. Computes only the keys that decide it."""
    is_chosen = _chooser(config, split)
    return [is_chosen is None or is_chosen(each) for each in contents]


def chooser(config: C, split: Split, held_out_files: Callable[[C], Iterable[Content]]) -> Callable[[Content], bool] | None:
    """Returns a function that says whether a document belongs to the split; None if every one does.

    held_out_files: returns the contents of those documents of a table that names such files. What other sources of a mixture
    hold out is not trained on.
    """
    if split == "held_out":
        return None if config.held_out_files else lambda content: in_share([content], config.held_out) == [True]
    share = config.largest_share
    with_files = [each for each in config.all_sources if each.held_out_files]
    if not share and not with_files:
        return None
    is_copy = AmongOthers(chain.from_iterable(map(held_out_files, with_files)))
    return lambda content: in_share([content], share) == [False] and not is_copy(content)


def _chooser(config: TextConfig, split: Split) -> Callable[[Content], bool] | None:
    return chooser(config, split, held_out_contents)


def held_out_contents(config: TextConfig) -> list[Content]:
    """Returns the contents of the documents in `held_out_files`. Raises PlanError with every file that has a problem."""
    files, problems = text_files(config, "held_out")
    if problems:
        raise as_error(problems)
    return contents_of(files, config)


def read(path: Path) -> bytes:
    """Returns the content of a file, decompressed. Raises OSError, and PlanError as `opened` does."""
    with opened(path) as file:
        return file.read()


def _whole(file: File) -> Iterator[tuple[str, bytes]]:
    yield file.name, read(file.path)


def _separated(file: File, separator: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields the non-empty documents of a file, named `file#0`, `file#1`, ...; the separator belongs to none of them.

    A line end of the separator stands for that of Windows, too.
    """
    content = read(file.path)
    if b"\n" in separator and b"\r\n" in content:
        texts = re.split(re.sub(rb"(?:\\\r)?\\\n", rb"\r?\n", re.escape(separator)), content)
    else:
        texts = content.split(separator)
    for number, text in enumerate(texts):
        if text:
            yield f"{file.name}#{number}", text


def _texts(file: File, field: str) -> Iterator[tuple[str, bytes]]:
    """Yields the non-empty texts of a file's rows, named by row: `file#1`, `file#2`, ..."""
    for number, row in rows_of(file, (field,) if file.is_table else None):
        text = row.get(field, "" if file.is_table else None)  # null in a table
        if not isinstance(text, str):
            keys = ", ".join(f"`{key}`" for key in row)
            why = f"has no text as `{field}`" if field in row else f"has no `{field}`"
            raise bad_row(file, number, why, f"its keys are {keys}" if keys and field not in row else None)
        try:
            content = text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise bad_row(file, number, f"cannot be read: {error}") from None
        if content:
            yield f"{file.name}#{number}", content


def num_windows(num_tokens: int, sequence: int) -> int:
    """Returns the windows over a stream of `num_tokens`: ceil((num_tokens - 1) / sequence), or 0 if not even one is full."""
    return -(-(num_tokens - 1) // sequence) if num_tokens > sequence else 0


def window(index: int, num_tokens: int, sequence: int) -> tuple[int, int]:
    """Returns where window `index` starts in the stream, and how many of its labels earlier windows have already covered.

    The last window is moved back so that it is full: no token is dropped or made up, and each label counts once.

        stream   0 1 2 3 4 5 6 7 8 9       N = 10, sequence = 4
        window 0 a b c d .                 labels 1..4
        window 1         a b c d .         labels 5..8
        window 2           x x x d .       starts at 5; labels 6..8 counted before, 9 new
    """
    regular = index * sequence
    start = min(regular, num_tokens - 1 - sequence)
    return start, regular - start


def num_chunks(lengths: Iterable[int], sequence: int) -> int:
    """Returns the samples of padded documents: ceil((length - 1) / sequence) each; a document of one token has no label."""
    return sum(-(-(length - 1) // sequence) for length in lengths if length > 1)


ALWAYS_READ = 1 << 20
"""Text of at most this many bytes is read, and tokenized, for an exact count."""


def count_samples(config: TextConfig | TokensConfig, split: Split, files: Sequence[File]) -> int | None:
    """Returns the samples in an epoch of a split; None if that needs loading the data.

    files: those that `text_files` or `token_files` returns for this split.
    """
    lengths = _lengths(config, split, files) if isinstance(config, TextConfig) else _total(config, files)
    if lengths is None:
        return None
    if config.documents == "pad":
        return num_chunks(lengths, config.sequence)
    return num_windows(sum(lengths), config.sequence)


def _total(config: TokensConfig, files: Sequence[File]) -> list[int] | None:
    """Returns the number of all tokens as one length, or, for padded documents, that of each; None if only tokens say it."""
    if config.documents != "pad":
        return [sum(file.num_bytes // TOKEN_BYTES[file.dtype(config)] for file in files)]
    indices = [file.index for file in files if file.index is not None]
    if len(indices) < len(files):
        return None
    return [stop - start for index in indices for start, stop in pairwise(index.offsets)]


def _lengths(config: TextConfig, split: Split, files: Sequence[File]) -> Sequence[int] | None:
    """Returns the tokens of each document, or None if a large corpus would have to be read."""
    is_as_read = documents_inside(config) is None and config.tokenizer is None
    if is_as_read and not any(file.is_compressed for file in files) and not (config.largest_share and _is_large(files)):
        return [file.num_bytes for file in of_split(files, config, split)]
    if sum(file.num_bytes for file in files) > ALWAYS_READ:
        return None
    documents = read_documents(files, config, split)
    tokenizer = tokenizer_of(config)
    return [len(text) for _, text in documents] if tokenizer is None else tokenizer.encode(documents)[1]


def tokenizer_of(config: TextConfig) -> Tokenizer | None:
    """Returns the tokenizer of a table; None for bytes."""
    if config.tokenizer is None:
        return None
    from sley_data.tokenizer import Tokenizer  # bytes need none

    return Tokenizer(config.tokenizer, config.end_of_document)
