"""Reads the documents of a split of a text corpus; torch-free.

Only the content of a document decides whether it is held out, so all copies are in the same split, whatever the ranks, the
order of the files, the seed and the path of the corpus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain, pairwise
from mmap import ACCESS_READ, mmap
from typing import TYPE_CHECKING, Any

from sley_core.api.data import Split
from sley_core.errors import PlanError, PluginError
from sley_core.records import Problem
from sley_data.files import ConfigT, DataFile, FilesAndProblems, merge_problems, text_files
from sley_data.formats import ARROW_FILE, PARQUET, open_decompressed
from sley_data.plugin import NUM_BYTES, TOKEN_BYTES, TextConfig, TokensConfig

if TYPE_CHECKING:
    from sley_data.tokenizer import Tokenizer

_PIECE_BYTES = 1 << 10
"""The size of a piece of a held-out token file to search for in the training files."""

_MAX_SEARCH_BYTES = 1 << 30
"""The maximum number of bytes to search for copies of held-out tokens, in about a second."""


def content_key(text: bytes) -> bytes:
    """Returns the digest that identifies the content of a document."""
    return sha256(text).digest()


def is_in_share(key: bytes, share: float) -> bool:
    """Returns whether the key of a document, as a number in [0, 1), is below `share`."""
    return share > 0 and int.from_bytes(key[:8], "big") < share * 2**64


def find_copied_tokens(training_files: Sequence[DataFile], held_out_files: Sequence[DataFile]) -> list[Problem]:
    """Returns a problem for each held-out token file whose tokens are in a training file.

    Searches for three pieces of each held-out file, in large training files only at their start and end.
    """
    max_bytes = _MAX_SEARCH_BYTES // max(1, len(training_files) * len(held_out_files))
    problems = []
    for held_out in held_out_files:
        try:
            pieces = _sample_pieces(held_out)
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


def _sample_pieces(file: DataFile) -> list[bytes]:
    """Returns pieces from the start, middle and end of a token file, except pieces with few different bytes."""
    pieces = []
    with file.path.open("rb") as content:
        for start in (0, (file.num_bytes - _PIECE_BYTES) // 2, file.num_bytes - _PIECE_BYTES):
            content.seek(max(0, start))
            pieces.append(content.read(_PIECE_BYTES))
    return [piece for piece in dict.fromkeys(pieces) if len(set(piece)) > 4]


_MAX_COMPARE_BYTES = 1 << 30
"""The maximum number of bytes to read only to compare or select documents, in about a second."""


def read_documents(
    files: Sequence[DataFile], config: TextConfig, split: Split, notes: list[str] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yields the name and text of each document of a split, in the order of `files`, the result of `text_files`.

    Excludes documents that are also in `held_out_files`, and appends a sentence about them to `notes`.
    """
    if split == "held_out" and not (config.held_out or config.held_out_files):
        return
    is_selected = split_filter(config, split, _held_out_keys)
    count = num_excluded = 0
    for name, text in chain.from_iterable(read_file(config, file) for file in files):
        count += 1
        if is_selected(content_key(text)):
            yield name, text
        else:
            num_excluded += 1
    if num_excluded and not config.largest_share and notes is not None:
        notes.append(f"{num_excluded} of {count} documents in `files` are also in `held_out_files`: training excludes them")


def document_keys(config: TextConfig, split: Split, files: Sequence[DataFile]) -> list[bytes]:
    """Returns the keys of the documents of a split. files: the result of `text_files` for the split."""
    return [content_key(text) for _, text in read_documents(files, config, split)]


def describe_overlap(training: TextConfig, evaluation: TextConfig) -> str:
    """Describes the held-out documents of the table `evaluation` that the table `training` trains on, or returns ""."""
    if (training.separator, training.field) != (evaluation.separator, evaluation.field):
        return "the run splits its files into other documents: it is not known whether it was trained on these"
    return compare_documents(training, evaluation, text_files, document_keys, "documents")


def compare_documents(
    training: ConfigT,
    evaluation: ConfigT,
    find_files: Callable[[ConfigT, Split], FilesAndProblems],
    read_keys: Callable[[ConfigT, Split, Sequence[DataFile]], list[bytes]],
    noun: str,
) -> str:
    """Describes the held-out documents of the table `evaluation` that the table `training` trains on, or returns "".

    Compares contents, and may read all data of the run. find_files: returns the files of a split. read_keys: reads these files
    and returns the keys of the split's documents. noun: the word for a document in the description.
    """
    held_out_files, problems = find_files(evaluation, "held_out")
    if problems:
        return ""  # the evaluation reports them
    training_files, problems = find_files(training, "train")
    reason = problems[0].message if problems else ""
    if not problems and sum(file.num_bytes for file in training_files) > _MAX_COMPARE_BYTES:
        reason = f"its data have more than {_MAX_COMPARE_BYTES >> 30} GiB, and are not read for this"
    if reason:
        return f"it is not known whether the run was trained on the held-out {noun}: {reason}"
    held_out, trained = read_keys(evaluation, "held_out", held_out_files), set(read_keys(training, "train", training_files))
    count = sum(key in trained for key in held_out)
    if not count:
        return ""
    return f"the run was trained on {count} of the {len(held_out)} held-out {noun}, so this is not a held-out loss"


def _is_filtered(config: TextConfig) -> bool:
    """Returns whether documents must be read to find those of a split."""
    return bool(config.largest_share or any(table.held_out_files for table in config.all_sources))


def split_filter(config: ConfigT, split: Split, held_out_keys: Callable[[ConfigT], Iterable[bytes]]) -> Callable[[bytes], bool]:
    """Returns a function that tells by the key of a document whether the document belongs to the split.

    held_out_keys: returns the keys of the documents in the `held_out_files` of a table. The training split also excludes the
    held-out documents of a mixture's other sources.
    """
    if split == "held_out":
        return lambda key: bool(config.held_out_files) or is_in_share(key, config.held_out)
    share = config.largest_share
    held_out = set(chain.from_iterable(held_out_keys(table) for table in config.all_sources if table.held_out_files))
    return lambda key: not is_in_share(key, share) and key not in held_out


def _held_out_keys(config: TextConfig) -> list[bytes]:
    """Returns the keys of the documents in `held_out_files`. Raises PlanError with all problems of the files."""
    files, problems = text_files(config, "held_out")
    if problems:
        raise merge_problems(problems)
    return document_keys(config, "held_out", files)


def read_file(config: TextConfig, file: DataFile) -> Iterator[tuple[str, bytes]]:
    """Yields the name and text of each document in a file. Raises PlanError "data-json" for a row without text in `field`."""
    if config.field is not None:
        yield from _read_texts(file, config.field)
    elif config.separator is not None:
        yield from _split_file(file, config.separator.encode())
    else:
        with open_decompressed(file.path) as content:
            yield file.name, content.read()


def _split_file(file: DataFile, separator: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields the names (`file#0`, `file#1`, ...) and texts of the non-empty documents of a file, without separators.

    A `\\n` in the separator also matches `\\r\\n`. At most a block and a document are in memory.
    """
    pattern = re.compile(re.sub(rb"(?:\\\r)?\\\n", rb"\r?\n", re.escape(separator)))
    number, remainder = 0, b""
    with open_decompressed(file.path) as content:
        while block := content.read(max(_READ_BYTES, len(remainder))):
            *texts, remainder = pattern.split(remainder + block)
            for text in texts:
                if text:
                    yield f"{file.name}#{number}", text
                number += 1
    if remainder:
        yield f"{file.name}#{number}", remainder


def _read_texts(file: DataFile, field: str) -> Iterator[tuple[str, bytes]]:
    """Yields the names (`file#1`, `file#2`, ...) and texts of the non-empty rows of a file."""
    for number, row in read_rows(file, (field,) if file.is_table else None):
        text = row.get(field, "" if file.is_table else None)  # null in a table
        if not isinstance(text, str):
            keys = ", ".join(f"`{key}`" for key in row)
            reason = f"has no text as `{field}`" if field in row else f"has no `{field}`"
            raise row_error(file, number, reason, f"use one of the keys {keys}" if keys and field not in row else None)
        try:
            content = text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise row_error(file, number, f"cannot be read: {error}") from None
        if content:
            yield f"{file.name}#{number}", content


INSTALL = """install sley-data[arrow]; in a clone of Sley's repository, run `pip install -e "packages/data[arrow]"`"""

_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_BATCH_ROWS = 256
"""The number of table rows that are in memory at a time."""


def read_rows(file: DataFile, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number of each row, from 1, and the row. In JSON lines, the row number is the line number.

    columns: the columns of tables to read, or None for all. Null values of tables are omitted, even in nested dicts, since
    every row of a table has the keys of all rows. Raises PlanError "data-json" or "data-format" for an unreadable row, and
    PluginError "pyarrow-missing" if `pyarrow` is not installed.
    """
    if file.is_table:
        yield from _read_table(file, columns)
        return
    with open_decompressed(file.path) as content:
        start = content.read(512).removeprefix(_BOM).lstrip(_BLANK)
    yield from _read_array(file) if start[:1] == b"[" else _read_lines(file)


def row_error(file: DataFile, number: int, reason: str, hint: str | None = None) -> PlanError:
    """Returns the PlanError "data-json" for a row. reason: the predicate of a sentence whose subject is the row."""
    return PlanError("data-json", f"row {number} of `{file.path}` {reason}", path=("data", "files"), hint=hint)


def _read_lines(file: DataFile) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_decompressed(file.path) as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield number, _require_object(file, number, _parse_json(file, number, line))


def _read_array(file: DataFile) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_decompressed(file.path) as content:
        values = _parse_json(file, 1, content.read().removeprefix(_BOM))
    for number, value in enumerate(values if isinstance(values, list) else [values], start=1):
        yield number, _require_object(file, number, value)


def _parse_json(file: DataFile, number: int, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise row_error(file, number, f"cannot be read: {str(error) or type(error).__name__}") from None


def _require_object(file: DataFile, number: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise row_error(file, number, "is not a JSON object")
    return value


def _read_table(file: DataFile, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows of a Parquet or Arrow file."""
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError:
        message = f"`{file.path}` is a Parquet or Arrow table, which needs `pyarrow`"
        raise PluginError("pyarrow-missing", message, path=("data", "files"), hint=INSTALL) from None
    number = 0
    try:
        for batch in _read_batches(file, columns):
            batch.validate(full=True)  # reading a damaged batch would crash the process
            selected = [name for name in batch.schema.names if columns is None or name in columns]
            if not selected:
                names = ", ".join(f"`{name}`" for name in batch.schema.names)
                missing = " or ".join(f"`{name}`" for name in columns or ())
                raise row_error(file, 1, f"has no {missing}", f"use one of the columns {names}")
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in batch.select(selected).slice(start, _BATCH_ROWS).to_pylist():
                    number += 1
                    yield number, _remove_nulls(row)
    except (pyarrow.ArrowException, KeyError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the disk; errors of pyarrow have no number
            raise
        message = f"`{file.path}` is damaged or incomplete after row {number}: {error}"
        raise PlanError("data-format", message, path=("data", "files")) from None


def _read_batches(file: DataFile, columns: Sequence[str] | None) -> Iterator[Any]:
    """Yields the record batches of a Parquet file, an Arrow file, or an Arrow stream, which `save_to_disk` writes."""
    import pyarrow as pa

    with file.path.open("rb") as content:
        head = content.read(8)
    if re.match(PARQUET, head):
        from pyarrow import parquet

        table = parquet.ParquetFile(file.path)
        names = table.schema_arrow.names
        selected = [name for name in names if columns is None or name in columns]
        yield from table.iter_batches(_BATCH_ROWS, columns=selected or names)
    elif re.match(ARROW_FILE, head):
        reader = pa.ipc.open_file(pa.OSFile(str(file.path)))
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(pa.OSFile(str(file.path)))


def _remove_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _remove_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_remove_nulls(inner) for inner in value] if isinstance(value, list) else value


def num_windows(num_tokens: int, sequence: int) -> int:
    """Returns the number of windows over `num_tokens`: ceil((num_tokens - 1) / sequence), or 0 if no window is full."""
    return -(-(num_tokens - 1) // sequence) if num_tokens > sequence else 0


def locate_window(index: int, num_tokens: int, sequence: int) -> tuple[int, int]:
    """Returns the start of window `index` in the stream, and the number of its labels that earlier windows include.

    The last window starts earlier, so that it is full. No token is dropped or added, and each label counts once.

        stream   0 1 2 3 4 5 6 7 8 9       N = 10, sequence = 4
        window 0 a b c d .                 labels 1..4
        window 1         a b c d .         labels 5..8
        window 2           x x x d .       starts at 5; labels 6..8 are ignored, 9 is new
    """
    regular_start = index * sequence
    start = min(regular_start, num_tokens - 1 - sequence)
    return start, regular_start - start


def num_chunks(lengths: Iterable[int], sequence: int) -> int:
    """Returns the number of samples of padded documents: ceil((length - 1) / sequence) for each document."""
    return sum(-(-(length - 1) // sequence) for length in lengths if length > 1)


ALWAYS_READ = 1 << 20
"""The maximum size of text that is read and tokenized only to count samples."""

_READ_BYTES = 1 << 20


def count_samples(config: TextConfig | TokensConfig, split: Split, files: Sequence[DataFile]) -> int | None:
    """Returns the number of samples per epoch of a split, or None if only loading the data can show it.

    files: the result of `text_files` or `token_files` for this split.
    """
    lengths = _text_lengths(config, split, files) if isinstance(config, TextConfig) else _token_lengths(config, files)
    if lengths is None:
        return None
    if config.documents == "pad":
        return num_chunks(lengths, config.sequence)
    return num_windows(sum(lengths), config.sequence)


def _token_lengths(config: TokensConfig, files: Sequence[DataFile]) -> list[int] | None:
    """Returns the length of each padded document, or the number of all tokens as one length, or None if it is unknown."""
    if config.documents != "pad":
        return [sum(file.num_bytes // TOKEN_BYTES[file.dtype(config)] for file in files)]
    indices = [file.index for file in files if file.index is not None]
    if len(indices) < len(files):
        return None
    return [stop - start for index in indices for start, stop in pairwise(index.offsets)]


def _text_lengths(config: TextConfig, split: Split, files: Sequence[DataFile]) -> Sequence[int] | None:
    """Returns the number of tokens of each document, or None if a large corpus must be read for it."""
    has_compressed = any(file.is_compressed for file in files)
    is_plain = config.field is None and config.separator is None and config.tokenizer is None and not has_compressed
    if is_plain and not _is_filtered(config):
        return [file.num_bytes for file in files] if split == "train" else []
    if sum(file.num_bytes for file in files) > (_MAX_COMPARE_BYTES if is_plain else ALWAYS_READ):
        return None
    documents = read_documents(files, config, split)
    tokenizer = load_tokenizer(config)
    return [len(text) for _, text in documents] if tokenizer is None else tokenizer.encode(documents)[1]


def load_tokenizer(config: TextConfig | TokensConfig) -> Tokenizer | None:
    """Loads the tokenizer of a table, or returns None for bytes and token files."""
    if isinstance(config, TokensConfig) or config.tokenizer is None:
        return None
    from sley_data.tokenizer import Tokenizer  # bytes need none

    return Tokenizer(config.tokenizer, config.end_of_document)


def num_ids(config: TextConfig | TokensConfig, tokenizer: Tokenizer | None) -> int:
    """Returns the number of token ids of a table. tokenizer: the result of `load_tokenizer`."""
    if isinstance(config, TokensConfig):
        return config.vocab_size
    return NUM_BYTES if tokenizer is None else tokenizer.vocab_size
