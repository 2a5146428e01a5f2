"""Detects file formats by their first bytes, decompresses files, and reads rows and Megatron's indices. Does not import torch.

Refuses files in unsupported formats, and token files whose ids have another width or byte order than their plan table says.
Megatron's index `NAME.idx` contains the token dtype and the documents of `NAME.bin`. It is little-endian and has these fields,
the first five with their sizes in bytes:

    magic, 9 | version 1, 8 | code of the token dtype, 1 | number of sequences, 8 | number of documents + 1, 8
    length of each sequence, int32 | first byte of each sequence, int64 | first sequence of each document, and the end, int64
    mode of each sequence, int8: only for multimodal data
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from sley_core.errors import PlanError, PluginError, install_hint
from sley_data.plugin import TOKEN_BYTES

if TYPE_CHECKING:
    from sley_data.files import DataFile

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
except ImportError:
    zstd = None  # type: ignore[assignment]

TokenDtype: TypeAlias = Literal["uint16", "uint32"]  # the dtypes of token files

_HEAD_BYTES = 512
"""The number of bytes at the start of a file that are compared with signatures. The signature of tar is at byte 257."""

T = TypeVar("T")
IntegerArray = NDArray[np.integer[Any]]  # an array of any integer dtype

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
"""The first bytes of a Megatron index."""
_ZSTD_SIGNATURE = rb"(?:\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"  # a frame, or a skippable frame before it

_OPENERS: dict[bytes, Callable[[Path], BufferedIOBase]] = {
    rb"\x1f\x8b\x08": gzip.GzipFile,
    rb"BZh[1-9]1AY&SY": bz2.BZ2File,
    rb"\xfd7zXZ\x00": lzma.LZMAFile,
    **({_ZSTD_SIGNATURE: zstd.ZstdFile} if zstd is not None else {}),
}
"""The readers of compressed files, keyed by the signature at the start of the file (a regular expression)."""

_DECOMPRESSION_ERRORS = (zlib.error, lzma.LZMAError, *([zstd.ZstdError] if zstd is not None else []))
"""The errors that the readers raise for damaged content, besides EOFError and OSError."""

COMPRESSED_SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".zst"})
"""The suffixes of compressed files. The suffix before such a suffix names the content, as in `.jsonl.gz`."""

_PARQUET_SIGNATURE = rb"PAR1\x15"
_ARROW_FILE_SIGNATURE = rb"ARROW1\x00\x00"
_ARROW_STREAM_SIGNATURE = rb"\xff{4}..\x00\x00\x10\x00\x00\x00"  # the schema follows, in a message of less than 64 KiB
_TABLE_SIGNATURES = re.compile(b"|".join((_PARQUET_SIGNATURE, _ARROW_FILE_SIGNATURE, _ARROW_STREAM_SIGNATURE)), re.DOTALL)

_UNPACK_HINT = "unpack it, and name the unpacked files"  # the hint for archives
_COLUMN_HINT = 'name its column of texts, such as `field = "text"`'  # the hint for tables in `data.text`
_UNSUPPORTED = {
    rb"PK\x03\x04": ("a zip archive", _UNPACK_HINT),
    _ZSTD_SIGNATURE: ("compressed by zstd", install_hint("data", "zstd")),
    rb"\x04\x22\x4d\x18": ("compressed by lz4", "unpack it with `lz4 -d`, or use gzip, bzip2, xz or zstd"),
    rb"\x1f\x9d": ("compressed by compress", "unpack it with `uncompress`, or use gzip, bzip2, xz or zstd"),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK_HINT),
    rb"Rar!\x1a\x07": ("a rar archive", _UNPACK_HINT),
    rb".{257}ustar": ("a tar archive", _UNPACK_HINT),
    _PARQUET_SIGNATURE: ("a Parquet table", _COLUMN_HINT),
    _ARROW_FILE_SIGNATURE: ("an Arrow table", _COLUMN_HINT),
    _ARROW_STREAM_SIGNATURE: ("an Arrow table", _COLUMN_HINT),
    rb"\x89HDF\r\n\x1a\n": ("an HDF5 file", "write its content as text or as raw token ids"),
    rb"SQLite format 3\x00": ("an SQLite database", "write its texts to files"),
    rb"%PDF-\d\.\d": ("a PDF", "convert it to text"),
    rb"\x00\x05\x16\x07": ("a file with attributes for macOS, not the file itself", "leave out names that begin with `._`"),
    rb"version https://git-lfs": ("a Git LFS pointer, not the file itself", "download the file with `git lfs pull`"),
    re.escape(MEGATRON_MAGIC): ("an index of Megatron's token files", 'set `use = "data.tokens"`'),
    rb"\x93NUMPY": (
        "a numpy file, whose header would be read as data",
        'write raw ids, for `data.tokens`: `numpy.load("...").astype("uint16").tofile("tokens.bin")`',
    ),
}
"""The description and hint of each unsupported format, keyed by signature (a regular expression)."""


@dataclass(frozen=True)
class Format:
    """The format of a file. is_compressed: whether `open_decompressed` decompresses the file. is_table: whether it is a Parquet
    or Arrow table. unsupported: a description of the format and a hint; None for text and raw token ids. It is not None for a
    table, since only code that reads rows supports tables.
    """

    is_compressed: bool = False
    is_table: bool = False
    unsupported: tuple[str, str] | None = None


PLAIN_FORMAT = Format()
"""The format of a file without a known signature: text or raw token ids."""


def detect_format(path: Path) -> Format:
    """Returns the format of a file. The format of a compressed file has the `unsupported` of its content."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if _match_signature(head, _OPENERS) is None:
            return Format(is_table=_TABLE_SIGNATURES.match(head) is not None, unsupported=_match_signature(head, _UNSUPPORTED))
        with open_decompressed(path) as content:
            return Format(is_compressed=True, unsupported=_match_signature(content.read(_HEAD_BYTES), _UNSUPPORTED))
    except PlanError:
        return Format(is_compressed=True)


@contextmanager
def open_decompressed(path: Path) -> Iterator[BufferedIOBase]:
    """A context manager that opens the file at `path` for reading bytes. Decompresses gzip, bzip2, xz and zstd.
    Raises OSError if the file cannot be read, and PlanError "data-format" if compressed content is damaged or incomplete.
    """
    with path.open("rb") as file:
        opener = _match_signature(file.read(_HEAD_BYTES), _OPENERS)
        if opener is None:
            file.seek(0)
            yield file
            return
    try:
        with opener(path) as file:
            yield file
    except (EOFError, OSError, *_DECOMPRESSION_ERRORS) as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the disk; the errors of gzip and bz2 have no number
            raise
        message = f"the compressed file `{path}` is damaged or incomplete: {error}"
        raise PlanError("data-format", message, path=("data", "files")) from None


def _match_signature(head: bytes, signatures: dict[bytes, T]) -> T | None:
    """Returns the value of the first signature that matches the start of `head`, or None."""
    return next((value for signature, value in signatures.items() if re.match(signature, head, re.DOTALL)), None)


_BLOCK_BYTES = 1 << 13  # the size in bytes of a block that `read_blocks` reads
_NUM_BLOCKS = 16  # the number of blocks of `_BLOCK_BYTES` bytes that `read_blocks` reads: 128 KiB in total

_MIN_IDS = 64
"""The minimum number of ids that `check_token_ids` checks. In fewer ids, a suspicious pattern may be chance."""

_LLM_C_MAGIC = (20240520).to_bytes(4, "little")
"""The first bytes of an llm.c token file, which begins with a header of 1024 bytes."""


def check_token_ids(path: Path, dtype: TokenDtype, vocab_size: int) -> tuple[str, str] | None:
    """Returns a reason and a hint if the ids in a token file seem to have another dtype than `dtype`, or are not all less than
    `vocab_size`. Returns None if the ids are plausible, or if there are fewer than `_MIN_IDS`. Reads at most 128 KiB. The
    reason is a predicate whose subject is the file.
    """
    sample = read_blocks(path)
    if sample[:4] == _LLM_C_MAGIC:
        return "begins with the header of llm.c, which would be read as tokens", "remove the header with `tail -c +1025`"
    ids = _view_ids(sample, dtype)
    if len(ids) < _MIN_IDS:
        return None
    if _is_padded(ids):
        advice = f'write them as {dtype}: `numpy.fromfile("...", "<i8").astype("{dtype}").tofile("...")`'
        if dtype == "uint16":
            advice = f'set `dtype = "uint32"`; or, if the ids have 64 bits, {advice}'
        return f"has 0 or a small number after every id, so its ids seem to be wider than {dtype}", advice
    if (largest := ids.max()) < vocab_size:
        return None
    fitting_dtypes = [name for name in TOKEN_BYTES if name != dtype and _view_ids(sample, name).max() < vocab_size]
    hint = "set the `vocab_size` of the tokenizer that wrote the file, or write raw ids"
    hint = f'set `dtype = "{fitting_dtypes[0]}"`, with which all ids fit' if fitting_dtypes else hint
    return f"has the id {largest} as {dtype}, but `vocab_size` is {vocab_size}", hint


def read_blocks(path: Path) -> bytes:
    """Returns 16 concatenated blocks of 8 KiB, spread evenly from the start to the end of a file, or all bytes of a smaller
    file. Each block begins at a multiple of 8 bytes.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size <= _BLOCK_BYTES * _NUM_BLOCKS:
            file.seek(0)
            return file.read()
        blocks = []
        for number in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1) // 8 * 8)
            blocks.append(file.read(_BLOCK_BYTES))
        return b"".join(blocks)


def _view_ids(sample: bytes, dtype: str) -> IntegerArray:
    return np.frombuffer(sample, dtype, len(sample) // TOKEN_BYTES[dtype])


def _is_padded(ids: IntegerArray) -> bool:
    """Returns whether every second id is 0 or small, as if it were the upper half of an id of twice the width."""
    lower, upper = ids[::2], ids[1::2]
    return bool((upper.max() == 0 and len(np.unique(lower)) > 4) or (upper.max() < 16 and lower.max() >= 1 << 12))


_HEADER = struct.Struct("<9sQBQQ")  # the first five fields of a Megatron index
_DTYPES_BY_CODE: dict[int, TokenDtype] = {4: "uint32", 8: "uint16"}  # 4 is int32, and no id is negative
_UNSUPPORTED_DTYPES_BY_CODE = {1: "uint8", 2: "int8", 3: "int16", 5: "int64", 6: "float64", 7: "float32"}


@dataclass(frozen=True)
class MegatronIndex:
    """The content of a Megatron index. dtype: the dtype of the tokens. offsets: the start of each document in tokens, and the
    number of all tokens, int64 [num_documents + 1].
    """

    dtype: TokenDtype
    offsets: IntegerArray


def read_index(path: Path, num_bytes: int) -> MegatronIndex:
    """Returns the Megatron index at `path`. num_bytes: the size of its token file. Raises OSError if the index cannot be read,
    and ValueError if the index is wrong or does not fit the token file. Messages of ValueError are predicates about the index.
    """
    content = path.read_bytes()
    head = content[: _HEADER.size]
    if head[: len(MEGATRON_MAGIC)] != MEGATRON_MAGIC[: len(head)]:
        raise ValueError(f"is not an index of Megatron: it begins with {head[:9]!r}")
    if len(head) < _HEADER.size:
        raise ValueError(f"is cut off in its header, after {len(head)} bytes")
    _, version, code, count, num_ends = _HEADER.unpack(head)
    if version != 1:
        raise ValueError(f"is an index of version {version}, but must have version 1")
    if code not in _DTYPES_BY_CODE:
        raise ValueError(f"has tokens of the type {_UNSUPPORTED_DTYPES_BY_CODE.get(code, code)}, but must have uint16 or int32")
    size = len(head) + 12 * count + 8 * num_ends
    if len(content) not in (size, size + count):
        raise ValueError(f"has {len(content)} bytes, but {count} sequences in {num_ends - 1} documents need {size}")
    lengths = np.frombuffer(content, "<i4", count, len(head))
    starts = np.frombuffer(content, "<i8", count, len(head) + 4 * count)
    ends = np.frombuffer(content, "<i8", num_ends, len(head) + 12 * count)
    if (lengths < 0).any():
        raise ValueError("has a sequence of a negative length")
    bounds, width = np.cumsum(np.concatenate([[0], lengths]), dtype=np.int64), TOKEN_BYTES[_DTYPES_BY_CODE[code]]
    if bounds[-1] * width != num_bytes:
        raise ValueError(f"has {bounds[-1]} tokens of {width} bytes, but the `.bin` file has {num_bytes} bytes")
    if (starts != bounds[:-1] * width).any():
        raise ValueError("has sequences with gaps or overlaps")
    if not num_ends or ends[0] != 0 or ends[-1] != count or (np.diff(ends) < 0).any():
        raise ValueError(f"has documents that do not contain its {count} sequences in order")
    return MegatronIndex(_DTYPES_BY_CODE[code], bounds[ends])


_WHITESPACE = b" \t\r\n"  # the whitespace characters of JSON
_BOM = b"\xef\xbb\xbf"  # the byte order mark that may begin a UTF-8 file
_BATCH_ROWS = 256  # the number of table rows that are in memory at a time


def read_rows(file: DataFile, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number, from 1, and the content of each row of a file. In JSON lines, the number is the line number. columns:
    the columns to read from a table; None for all. Null values of tables are left out, also in nested dicts, since every row of
    a table has the keys of all rows. Raises PlanError "data-json" for a row that is not a JSON object, "data-format" for a
    damaged file, and PluginError "pyarrow-missing" for a table if `pyarrow` is not installed.
    """
    if file.format.is_table:
        yield from _read_table(file, columns)
        return
    with open_decompressed(file.path) as content:
        is_array = content.read(512).removeprefix(_BOM).lstrip(_WHITESPACE)[:1] == b"["
    for number, value in _read_array(file) if is_array else _read_lines(file):
        if not isinstance(value, dict):
            raise build_row_error(file, number, "is not a JSON object")
        yield number, value


def build_row_error(file: DataFile, number: int, reason: str, hint: str | None = None) -> PlanError:
    """Returns PlanError "data-json" for row `number` of `file`. reason: a predicate about the row. hint: advice, or None."""
    return PlanError("data-json", f"row {number} of `{file.path}` {reason}", path=("data", "files"), hint=hint)


def _read_lines(file: DataFile) -> Iterator[tuple[int, Any]]:
    """Yields the number and the JSON value of each line that is not empty."""
    with open_decompressed(file.path) as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(_BOM) if number == 1 else line
            if content.strip():
                yield number, _parse_json(file, number, content)


def _read_array(file: DataFile) -> Iterator[tuple[int, Any]]:
    """Yields the number, from 1, and the value of each item of a file that is one JSON array."""
    with open_decompressed(file.path) as content:
        yield from enumerate(_parse_json(file, 1, content.read().removeprefix(_BOM)), start=1)


def _parse_json(file: DataFile, number: int, text: bytes) -> Any:
    """Returns the JSON value in `text`, row `number` of the file. Raises PlanError "data-json"."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise build_row_error(file, number, f"cannot be read: {str(error) or type(error).__name__}") from None


def _read_table(file: DataFile, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number, from 1, and the content of each row of a Parquet or Arrow table. columns: None for all."""
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError:
        message = f"`{file.path}` is a Parquet or Arrow table, which needs `pyarrow`"
        raise PluginError("pyarrow-missing", message, path=("data", "files"), hint=install_hint("data", "arrow")) from None
    number = 0
    try:
        for batch in _read_batches(file, columns):
            batch.validate(full=True)  # reading a damaged batch would crash the process
            selected = [name for name in batch.schema.names if columns is None or name in columns]
            if not selected:
                names = ", ".join(f"`{name}`" for name in batch.schema.names)
                missing = " or ".join(f"`{name}`" for name in columns or ())
                raise build_row_error(file, 1, f"has no {missing}", f"use one of the columns {names}")
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in batch.select(selected).slice(start, _BATCH_ROWS).to_pylist():
                    number += 1
                    yield number, _remove_nulls(row)
    except (pyarrow.ArrowException, KeyError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the disk; the errors of pyarrow have no number
            raise
        message = f"`{file.path}` is damaged or incomplete after row {number}: {error}"
        raise PlanError("data-format", message, path=("data", "files")) from None


def _read_batches(file: DataFile, columns: Sequence[str] | None) -> Iterator[Any]:
    """Yields the record batches of a Parquet file, an Arrow file, or an Arrow stream, which `save_to_disk` writes."""
    import pyarrow as pa

    with file.path.open("rb") as content:
        head = content.read(8)
    if re.match(_PARQUET_SIGNATURE, head):
        from pyarrow import parquet

        table = parquet.ParquetFile(file.path)
        names = table.schema_arrow.names
        selected = [name for name in names if columns is None or name in columns]
        yield from table.iter_batches(_BATCH_ROWS, columns=selected or names)
    elif re.match(_ARROW_FILE_SIGNATURE, head):
        reader = pa.ipc.open_file(pa.OSFile(str(file.path)))
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(pa.OSFile(str(file.path)))


def _remove_nulls(value: Any) -> Any:
    """Returns a copy of nested dicts and lists without the keys whose value is None."""
    if isinstance(value, dict):
        return {key: _remove_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_remove_nulls(inner) for inner in value] if isinstance(value, list) else value
