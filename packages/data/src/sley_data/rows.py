"""Reads the rows of JSON lines, JSON arrays, Parquet and Arrow files as dicts; torch-free.

The first bytes of a file decide its format. Parquet and Arrow need the optional package `pyarrow`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sley_core.errors import PlanError, PluginError
from sley_data.files import DataFile
from sley_data.formats import ARROW_FILE, PARQUET, open_decompressed

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
