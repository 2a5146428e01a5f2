"""Reads the documents of a text corpus, split by split; torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path

from sley_core.api.data import Split
from sley_core.errors import PlanError
from sley_data.config import TextConfig
from sley_data.documents import File, as_error, text_files
from sley_data.formats import opened
from sley_data.split import Content, among, content_of, content_of_file, in_share

_COMPARED = 1 << 30
"""Bytes of documents inside files that are read at most, to compare those of an evaluation with them."""


def read_documents(
    files: Sequence[File], config: TextConfig, split: Split, notes: list[str] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of the documents of a split, in the order of `files`, which `text_files` returned.

    A document that `held_out_files` has, too, is not trained on, which is appended to `notes`. If each file is one document,
    the other split's files are not read.
    """
    inside = documents_inside(config)
    if inside is None:
        chosen = of_split(files, config, split)
        count, num_left_out = len(files), len(files) - len(chosen)
    else:
        documents = [document for file in files for document in inside(file)]
        is_chosen = _chosen([content_of(text) for _, text in documents], config, split)
        count, num_left_out = len(documents), is_chosen.count(False)
    if num_left_out and config.held_out_files and notes is not None:
        notes.append(
            f"{num_left_out} of {count} documents in `files` are in `held_out_files` too: they are not trained on"
        )
    if inside is None:
        yield from ((file.name, read(file.path)) for file in chosen)
    else:
        yield from compress(documents, is_chosen)


def contents_of(files: Sequence[File], config: TextConfig) -> list[Content]:
    """Returns the contents of all documents in `files`; reads these if they have several documents."""
    inside = documents_inside(config)
    if inside is None:
        return [content_of_file(file) for file in files]
    return [content_of(text) for file in files for _, text in inside(file)]


def trained_on(own: TextConfig, evaluated: TextConfig) -> str:
    """Returns in words which held-out documents of `evaluated` a run on `own` has trained on; "" if it is none.

    own: the run's own table. Compares contents; if files have several documents, it reads all that the run was trained on.
    """
    if (own.separator, own.field) != (evaluated.separator, evaluated.field):
        return "documents are cut otherwise than in the run's own data: whether it has trained on them is not known"
    held, trained = text_files(evaluated, "held_out"), text_files(own, "train")
    if held[1]:
        return ""  # the evaluation reports it
    unknown = "whether the run has trained on the held-out documents is not known"
    if trained[1]:
        return f"{unknown}: {trained[1][0].message}"
    if documents_inside(own) is not None and sum(file.num_bytes for file in trained[0]) > _COMPARED:
        return f"{unknown}: the run's data have more than {_COMPARED >> 30} GiB, and are not read for it"
    known, asked = contents_of(trained[0], own), contents_of(held[0], evaluated)
    known = list(compress(known, _chosen(known, own, "train")))
    asked = list(compress(asked, _chosen(asked, evaluated, "held_out")))
    count = sum(among(asked, known))
    return (
        f"the run has trained on {count} of the {len(asked)} held-out documents: this is no held-out loss"
        if count
        else ""
    )


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
    if not config.held_out and not config.held_out_files:
        return list(files) if split == "train" else []
    return list(compress(files, _chosen([content_of_file(file) for file in files], config, split)))


def _chosen(contents: Sequence[Content], config: TextConfig, split: Split) -> list[bool]:
    """Returns for each document whether it belongs to the split. Asks for no key that does not decide it."""
    if config.held_out_files and split == "held_out":
        return [True] * len(contents)
    if config.held_out_files:
        return [not is_held_out for is_held_out in among(contents, held_out_contents(config))]
    return [is_held_out == (split == "held_out") for is_held_out in in_share(contents, config.held_out)]


def held_out_contents(config: TextConfig) -> list[Content]:
    """Returns the contents of the documents in `held_out_files`. Raises PlanError with every file that has a problem."""
    files, problems = text_files(config, "held_out")
    if problems:
        raise as_error(problems)
    return contents_of(files, config)


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
