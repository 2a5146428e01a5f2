"""Reads the documents of a text corpus, split by split; torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path

from sley_core.data.config import TextConfig
from sley_core.data.dataset import Split
from sley_core.data.documents import File, held_out
from sley_core.data.formats import opened
from sley_core.errors import PlanError


def read_documents(files: Sequence[File], config: TextConfig, split: Split) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of the documents of a split, in the order of `files`, which `text_files` returned.

    If each file is one document, the other split's files are not opened.
    """
    inside = documents_inside(config)
    if inside is None:
        for file in of_split(files, config, split):
            yield file.name, read(file.path)
        return
    documents = [document for file in files for document in inside(file)]
    yield from compress(documents, _chosen([name for name, _ in documents], config, split))


def documents_inside(config: TextConfig) -> Callable[[File], Iterable[tuple[str, bytes]]] | None:
    """Returns a function that yields the documents of a file as (name, content); None if each file is one document.

    The function raises PlanError "data-json" with file and line for a line that is not a JSON object with text in
    `field`.
    """
    field, separator = config.field, config.separator
    if field is not None:
        return lambda file: _json_lines(file, field)
    return None if separator is None else lambda file: _separated(file, separator.encode())


def of_split(files: Sequence[File], config: TextConfig, split: Split) -> list[File]:
    """Returns the files of a split, if each file is one document."""
    return list(compress(files, _chosen([file.name for file in files], config, split)))


def _chosen(names: Sequence[str], config: TextConfig, split: Split) -> list[bool]:
    if config.held_out_files:
        return [True] * len(names)
    return [side == (split == "held_out") for side in held_out(names, config.held_out)]


def read(path: Path) -> bytes:
    """Returns what a file contains, decompressed. Raises OSError, and PlanError as `opened` does."""
    with opened(path) as file:
        return file.read()


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


def _json_lines(file: File, field: str) -> Iterator[tuple[str, bytes]]:
    """Yields the non-empty texts of a file of JSON lines, named by line: `file#1`, `file#2`, ..."""
    with opened(file.path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip() and (text := _text_of(line, file, number, field)):
                yield f"{file.name}#{number}", text


def _text_of(line: bytes, file: File, number: int, field: str) -> bytes:
    """Returns the text of one line as UTF-8; raises PlanError "data-json" with the line's number if it has none."""
    try:
        found = json.loads(line)
        text = found[field] if isinstance(found, dict) else None
        if isinstance(text, str):
            return text.encode()
        why = "is no JSON object" if not isinstance(found, dict) else f"has no text as `{field}`"
        hint = None
    except KeyError:
        why = f"has no `{field}`"
        hint = f"its keys are {', '.join(f'`{key}`' for key in found)}" if found else None
    except (ValueError, RecursionError) as error:  # UnicodeEncodeError, for half of a surrogate pair, is a ValueError
        why, hint = f"cannot be read: {str(error) or type(error).__name__}", None
    raise PlanError("data-json", f"line {number} of `{file.path}` {why}", path=("data", "field"), hint=hint)
