"""Reads the documents of a split, which are texts or conversations; torch-free.

Only the content of a document decides whether it is held out. All copies of a document are therefore in the same split, which
depends neither on the ranks, nor on the order of the files, the seed, or the path of the corpus.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from mmap import ACCESS_READ, mmap
from typing import NamedTuple, TypeAlias

from sley_core.api.data import Split
from sley_core.records import Problem
from sley_data.conversations import Conversation, content_key, read_conversations
from sley_data.files import DataFile, build_plan_error, find_document_files
from sley_data.formats import build_row_error, open_decompressed, read_rows
from sley_data.plugin import ChatConfig, DocumentsConfig, TextConfig


class TextDocument(NamedTuple):
    """A text. name: the file name, with the number of the row or piece. content: the bytes of the text."""

    name: str
    content: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.content)

    @property
    def key(self) -> bytes:
        """The digest that identifies the content."""
        return content_key(self.content)


Document: TypeAlias = TextDocument | Conversation
"""A document of `data.text` or `data.chat`."""

_PIECE_BYTES = 1 << 10
"""The size of each piece of a held-out token file for which the training files are searched."""

_MAX_SEARCH_BYTES = 1 << 30
"""The maximum number of bytes that are searched for copies of held-out tokens, which takes about a second."""

_READ_BYTES = 1 << 20


def is_in_share(key: bytes, share: float) -> bool:
    """Returns whether the key of a document, as a number in [0, 1), is below `share`."""
    return share > 0 and int.from_bytes(key[:8], "big") < share * 2**64


def find_copied_tokens(training_files: Sequence[DataFile], held_out_files: Sequence[DataFile]) -> list[Problem]:
    """Returns a problem for each held-out token file whose tokens are also in a training file. Searches for three pieces of
    each held-out file, and only at the start and end of large training files.
    """
    max_bytes = _MAX_SEARCH_BYTES // max(1, len(training_files) * len(held_out_files))
    problems = []
    for held_out in held_out_files:
        try:
            pieces = _read_pieces(held_out)
            copy = next((file for file in training_files if pieces and _contains_all(file, pieces, max_bytes)), None)
        except OSError:
            continue  # the code that opens the file later reports the error
        if copy is not None:
            message = f"the tokens of `{held_out.path}` are also in `{copy.path}`, and would be trained on"
            hint = "remove the held-out tokens from `files`"
            problems.append(Problem(("data", "held_out_files"), message, hint, "held-out-trained"))
    return problems


def _contains_all(file: DataFile, pieces: Sequence[bytes], max_bytes: int) -> bool:
    """Returns whether a file contains all `pieces`. Searches at most `max_bytes`, at the start and end of the file."""
    with file.path.open("rb") as raw_file, mmap(raw_file.fileno(), 0, access=ACCESS_READ) as content:
        size = len(content)
        ranges = [(0, size)] if size <= max_bytes else [(0, max_bytes // 2), (size - max_bytes // 2, size)]
        return all(any(content.find(piece, start, stop) >= 0 for start, stop in ranges) for piece in pieces)


def _read_pieces(file: DataFile) -> list[bytes]:
    """Returns pieces from the start, middle and end of a token file. Leaves out pieces with at most four different bytes."""
    pieces = []
    with file.path.open("rb") as content:
        for start in (0, (file.num_bytes - _PIECE_BYTES) // 2, file.num_bytes - _PIECE_BYTES):
            content.seek(max(0, start))
            pieces.append(content.read(_PIECE_BYTES))
    return [piece for piece in dict.fromkeys(pieces) if len(set(piece)) > 4]


_MAX_COMPARE_BYTES = 1 << 30
"""The maximum number of bytes that are read only to compare documents, which takes about a second."""


def read_split(config: DocumentsConfig, split: Split, files: Sequence[DataFile]) -> Iterator[tuple[Document, bool]]:
    """Yields each document in `files`, the files of a split, and whether the document belongs to the split.

    Yields nothing for a held-out split if the table holds nothing out. Raises a PlanError that lists all problems of the
    held-out files, or PlanError "data-json" for the first row that is not a document.
    """
    if split == "held_out" and not (config.held_out or config.held_out_files):
        return
    is_selected = build_split_filter(config, split)
    for document in chain.from_iterable(read_file(config, file) for file in files):
        yield document, is_selected(document.key)


def read_documents(
    files: Sequence[DataFile], config: TextConfig, split: Split, notes: list[str] | None = None
) -> Iterator[TextDocument]:
    """Yields each document of a split, in the order of `files`, the files of the split.

    Excludes documents that are also in `held_out_files`, and appends a sentence with their number to `notes`, if it is a list.
    """
    count = num_excluded = 0
    for document, is_selected in read_split(config, split, files):
        assert isinstance(document, TextDocument), document
        count += 1
        if is_selected:
            yield document
        else:
            num_excluded += 1
    if num_excluded and not config.largest_share and notes is not None:
        notes.append(f"{num_excluded} of {count} documents in `files` are also in `held_out_files`: training excludes them")


def _read_split_keys(config: DocumentsConfig, split: Split) -> list[bytes]:
    files, problems = find_document_files(config, split)
    if problems:
        raise build_plan_error(problems)
    return [document.key for document, is_selected in read_split(config, split, files) if is_selected]


def describe_overlap(training: DocumentsConfig, evaluation: DocumentsConfig) -> str:
    """Returns a sentence about the held-out documents of the table `evaluation` on which the table `training` trains.

    Returns "" if there are none. Compares the contents of the documents, and may read all data of the run. If it cannot compare
    them, for example because the training files have more than 1 GiB, the sentence says so.
    """
    noun = "documents" if isinstance(training, TextConfig) else "conversations"
    if isinstance(training, TextConfig) and any(
        getattr(training, key) != getattr(evaluation, key) for key in ("separator", "field")
    ):
        return "the run splits its files into other documents: it is not known whether it was trained on these"
    if find_document_files(evaluation, "held_out")[1]:
        return ""  # the evaluation reports the problems
    files, problems = find_document_files(training, "train")
    reason = problems[0].message if problems else ""
    if not problems and sum(file.num_bytes for file in files) > _MAX_COMPARE_BYTES:
        reason = f"its data have more than {_MAX_COMPARE_BYTES >> 30} GiB, and are not read for this"
    if reason:
        return f"it is not known whether the run was trained on the held-out {noun}: {reason}"
    held_out, trained = _read_split_keys(evaluation, "held_out"), set(_read_split_keys(training, "train"))
    count = sum(key in trained for key in held_out)
    if not count:
        return ""
    return f"the run was trained on {count} of the {len(held_out)} held-out {noun}, so this is not a held-out loss"


def build_split_filter(config: DocumentsConfig, split: Split) -> Callable[[bytes], bool]:
    """Returns a function that takes the key of a document, and returns whether the document belongs to the split.

    The training split also excludes the held-out documents of a mixture's other sources.
    """
    if split == "held_out":
        return lambda key: bool(config.held_out_files) or is_in_share(key, config.held_out)
    share = config.largest_share
    tables = (table for table in config.all_sources if table.held_out_files)
    held_out = set(chain.from_iterable(_read_split_keys(table, "held_out") for table in tables))
    return lambda key: not is_in_share(key, share) and key not in held_out


def read_file(config: DocumentsConfig, file: DataFile) -> Iterator[Document]:
    """Yields each document in a file. Raises PlanError "data-json" for a wrong row, and the errors of `open_decompressed`."""
    if isinstance(config, ChatConfig):
        yield from read_conversations(file, config.field)
    elif config.field is not None:
        yield from _read_texts(file, config.field)
    elif isinstance(config, TextConfig) and config.separator is not None:
        yield from _split_file(file, config.separator.encode())
    else:
        with open_decompressed(file.path) as content:
            yield TextDocument(file.name, content.read())


def _split_file(file: DataFile, separator: bytes) -> Iterator[TextDocument]:
    """Yields the non-empty documents of a file as `file#0`, `file#1`, ... A `\\n` in the separator also matches `\\r\\n`."""
    pattern = re.compile(re.sub(rb"(?:\\\r)?\\\n", rb"\r?\n", re.escape(separator)))
    number, remainder = 0, b""
    with open_decompressed(file.path) as content:
        while block := content.read(max(_READ_BYTES, len(remainder))):
            *texts, remainder = pattern.split(remainder + block)
            for text in texts:
                if text:
                    yield TextDocument(f"{file.name}#{number}", text)
                number += 1
    if remainder:
        yield TextDocument(f"{file.name}#{number}", remainder)


def _read_texts(file: DataFile, field: str) -> Iterator[TextDocument]:
    for number, row in read_rows(file, (field,) if file.format.is_table else None):
        text = row.get(field, "" if file.format.is_table else None)  # tables omit null values
        if not isinstance(text, str):
            keys = ", ".join(f"`{key}`" for key in row)
            reason = f"has no text in the field `{field}`" if field in row else f"has no `{field}`"
            raise build_row_error(
                file, number, reason, f"set `field` to one of these keys: {keys}" if keys and field not in row else None
            )
        try:
            content = text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise build_row_error(file, number, f"cannot be read: {error}") from None
        if content:
            yield TextDocument(f"{file.name}#{number}", content)
