"""Reads rows, each a dict, from JSON lines, a JSON array, Parquet and Arrow; a file's first bytes say which it is. Torch-free.

Parquet and Arrow need the optional package `pyarrow`; of them only the columns that are asked for are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sley_core.errors import PlanError, PluginError
from sley_data.files import ARROW_FILE, PARQUET, File, opened

INSTALL = """install sley-data[arrow], in a clone of Sley's repository: `pip install -e "packages/data[arrow]"`"""

_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_BATCH = 256
"""Rows of a Parquet file that are in memory at a time."""


def rows_of(file: File, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each row of a file with its number, from 1; of JSON lines, the number of the line.

    columns: those to read, where a file has them; None reads all. Values of Parquet and Arrow that are null are left out, in
    dicts inside too: a column has every key of its rows.
    Raises PlanError "data-json" or "data-format" with file and row for what cannot be read; PluginError "pyarrow-missing".
    """
    if file.is_table:
        yield from _of_table(file, columns)
        return
    with opened(file.path) as content:
        start = content.read(512).removeprefix(_BOM).lstrip(_BLANK)
    yield from _of_array(file) if start[:1] == b"[" else _of_lines(file)


def bad_row(file: File, number: int, why: str, hint: str | None = None) -> PlanError:
    """Returns the PlanError "data-json" for a row. why: goes on from "row 3 of `file`"."""
    return PlanError("data-json", f"row {number} of `{file.path}` {why}", path=("data", "files"), hint=hint)


def _of_lines(file: File) -> Iterator[tuple[int, dict[str, Any]]]:
    with opened(file.path) as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield number, _object(file, number, _loaded(file, number, line))


def _of_array(file: File) -> Iterator[tuple[int, dict[str, Any]]]:
    with opened(file.path) as content:
        values = _loaded(file, 1, content.read().removeprefix(_BOM))
    for number, value in enumerate(values if isinstance(values, list) else [values], start=1):
        yield number, _object(file, number, value)


def _loaded(file: File, number: int, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_row(file, number, f"cannot be read: {str(error) or type(error).__name__}") from None


def _object(file: File, number: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_row(file, number, "is no JSON object")
    return value


def _of_table(file: File, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows of a Parquet or Arrow file."""
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError:
        message = f"`{file.path}` is a table of Parquet or Arrow, and `pyarrow` is not installed"
        raise PluginError("pyarrow-missing", message, path=("data", "files"), hint=INSTALL) from None
    number = 0
    try:
        for batch in _batches(file, columns):
            batch.validate(full=True)  # reading a damaged one would crash the process
            chosen = [name for name in batch.schema.names if columns is None or name in columns]
            if not chosen:
                names = ", ".join(f"`{name}`" for name in batch.schema.names)
                wanted = " or ".join(f"`{name}`" for name in columns or ())
                raise bad_row(file, 1, f"has no {wanted}", f"its columns are {names}")
            for start in range(0, batch.num_rows, _BATCH):
                for row in batch.select(chosen).slice(start, _BATCH).to_pylist():
                    number += 1
                    yield number, _without_nulls(row)
    except (pyarrow.ArrowException, KeyError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's; pyarrow gives none for bad content
            raise
        message = f"`{file.path}` is damaged or incomplete after row {number}: {error}"
        raise PlanError("data-format", message, path=("data", "files")) from None


def _batches(file: File, columns: Sequence[str] | None) -> Iterator[Any]:
    """Yields pyarrow's record batches, one in memory at a time; a stream is what `save_to_disk` writes."""
    import pyarrow as pa

    with file.path.open("rb") as content:
        head = content.read(8)
    if re.match(PARQUET, head):
        from pyarrow import parquet

        table = parquet.ParquetFile(file.path)
        names = table.schema_arrow.names
        chosen = [name for name in names if columns is None or name in columns]
        yield from table.iter_batches(_BATCH, columns=chosen or names)
    elif re.match(ARROW_FILE, head):
        reader = pa.ipc.open_file(pa.OSFile(str(file.path)))
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(pa.OSFile(str(file.path)))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
