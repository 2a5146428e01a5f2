"""Finds the files that a `[data]` table names, and looks at their first bytes; torch-free.

A file is refused by name if it is no text, or no raw token ids of the width and byte order that the table says.
"""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import os
import re
import sys
import sysconfig
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from io import BufferedIOBase
from math import log2
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Literal, TypeVar

from sley_core.api.data import Split
from sley_core.errors import Diagnostic, KeyPath, PlanError, SleyError
from sley_core.records import Problem
from sley_data.config import TOKEN_BYTES, ChatConfig, TextConfig, TokensConfig
from sley_data.megatron import MAGIC, Index, read_index

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
except ImportError:
    zstd = None  # type: ignore[assignment]

_HEAD = 512
"""Bytes of a file that are searched for marks; the mark of tar is at byte 257."""

Opener = Callable[[Path], BufferedIOBase]
T = TypeVar("T")

_ZSTD = rb"(?:\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"  # a frame, or one to skip, with which several may begin

_OPENED: dict[bytes, Opener] = {
    rb"\x1f\x8b\x08": gzip.GzipFile,
    rb"BZh[1-9]1AY&SY": bz2.BZ2File,
    rb"\xfd7zXZ\x00": lzma.LZMAFile,
    **({_ZSTD: zstd.ZstdFile} if zstd is not None else {}),
}
"""Formats of a single compressed file, by their mark, with their readers."""

_BROKEN = (zlib.error, lzma.LZMAError, *([zstd.ZstdError] if zstd is not None else []))

SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".zst"})
"""The last suffix of such a file; the suffix before it tells the content: `.jsonl.gz`."""

PARQUET = rb"PAR1\x15"
ARROW_FILE = rb"ARROW1\x00\x00"
_ARROW_STREAM = rb"\xff{4}..\x00\x00\x10\x00\x00\x00"  # a message follows, of less than 64 KiB: the schema
_TABLES = re.compile(b"|".join((PARQUET, ARROW_FILE, _ARROW_STREAM)), re.DOTALL)

_UNPACK = "unpack it, and name the files that come out"
_COLUMN = 'name its column of texts: `field = "text"`'
_INSTALL_ZSTD = """install sley-data[zstd], in a clone of Sley's repository: `pip install -e "packages/data[zstd]"`"""
_MARKS = {
    rb"PK\x03\x04": ("a zip archive", _UNPACK),
    _ZSTD: (
        "compressed by zstd",
        'install sley-data[zstd], in a clone of Sley\'s repository: `pip install -e "packages/data[zstd]"`',
    ),
    rb"\x04\x22\x4d\x18": ("compressed by lz4", "unpack it: `lz4 -d`; gzip, bzip2, xz and zstd are read as they are"),
    rb"\x1f\x9d": ("compressed by compress", "unpack it: `uncompress`; gzip, bzip2, xz and zstd are read as they are"),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    rb"Rar!\x1a\x07": ("a rar archive", _UNPACK),
    rb".{257}ustar": ("a tar archive", _UNPACK),
    PARQUET: ("a Parquet table", _COLUMN),
    ARROW_FILE: ("an Arrow table", _COLUMN),
    _ARROW_STREAM: ("an Arrow table", _COLUMN),
    rb"\x89HDF\r\n\x1a\n": ("an HDF5 file", "write its content as text or as raw token ids"),
    rb"SQLite format 3\x00": ("an SQLite database", "write its texts to files"),
    rb"%PDF-\d\.\d": ("a PDF", "convert it to text"),
    rb"\x00\x05\x16\x07": ("a file of macOS's attributes, not the file itself", "leave out names that begin with `._`"),
    rb"version https://git-lfs": ("a pointer of Git LFS, not the file itself", "download the file: `git lfs pull`"),
    re.escape(MAGIC): ("an index of Megatron's token files", 'say `use = "data.tokens"`'),
    rb"\x93NUMPY": (
        "a file of numpy, and its header would be read as data",
        'write raw ids, for `data.tokens`: `numpy.load("...").astype("uint16").tofile("tokens.bin")`',
    ),
}
"""Refused formats, by their mark: the name of the format, and a hint."""


_ANY = re.compile(b"|".join((*_OPENED, *_MARKS)), re.DOTALL)


@dataclass(frozen=True)
class Format:
    """Describes a file by its first bytes.

    is_compressed: whether `opened` decompresses it. is_table: whether it is a table of Parquet or Arrow. refused: name of
    its format and a hint, if it is neither text nor raw ids.
    """

    is_compressed: bool = False
    is_table: bool = False
    refused: tuple[str, str] | None = None


PLAIN = Format()


def format_of(path: Path) -> Format:
    """Returns the format of a file; `PLAIN` for one that cannot be read: the code that reads it reports the error."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        if not _ANY.match(head):
            return PLAIN
        if _marked(head, _OPENED) is None:
            return Format(is_table=_TABLES.match(head) is not None, refused=_marked(head, _MARKS))
        with opened(path) as inside:
            return Format(is_compressed=True, refused=_marked(inside.read(_HEAD), _MARKS))
    except OSError:
        return PLAIN
    except PlanError:
        return Format(is_compressed=True)


@contextmanager
def opened(path: Path) -> Iterator[BufferedIOBase]:
    """Opens a file for reading; decompresses gzip, bzip2, xz and zstd.

    Raises OSError; PlanError "data-format" for compressed content that is damaged or incomplete.
    """
    with path.open("rb") as file:
        opener = _marked(file.read(_HEAD), _OPENED)
        if opener is None:
            file.seek(0)
            yield file
            return
    try:
        with opener(path) as file:
            yield file
    except (EOFError, OSError, *_BROKEN) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's; gzip and bz2 give none
            raise
        message = f"`{path}` is compressed, and damaged or incomplete: {error}"
        raise PlanError("data-format", message, path=("data", "files")) from None


def _marked(head: bytes, marks: dict[bytes, T]) -> T | None:
    """Returns the value of the first mark with which `head` begins; None if there is none."""
    return next((value for mark, value in marks.items() if re.match(mark, head, re.DOTALL)), None)


_BLOCK = 1 << 13
"""Bytes of a sample."""

_NUM_BLOCKS = 16
_ENOUGH = 64
"""Ids that a sample must have before rare patterns mean anything."""

_CODES = {"uint16": "H", "uint32": "I"}
_LLM_C = (20240520).to_bytes(4, "little")
"""How a token file of llm.c begins; its header has 1024 bytes."""


def wrong_ids(path: Path, dtype: Literal["uint16", "uint32"], vocab_size: int) -> tuple[str, str] | None:
    """Returns why the ids of a file are not `dtype`, little-endian and below `vocab_size`, and a hint.

    Reads at most 128 KiB of the file, spread over it; None if nothing shows it, or if the file cannot be read.
    """
    try:
        sample = sample_of(path)
    except OSError:
        return None  # the code that opens it later reports the error
    if sample[:4] == _LLM_C:
        return "begins with the header of llm.c, which would be read as tokens", "write the ids alone: `tail -c +1025`"
    ids = _ids(sample, dtype)
    if len(ids) < _ENOUGH:
        return None
    if _is_padded(ids):
        advice = f'write them as {dtype}: `numpy.fromfile("...", "<i8").astype("{dtype}").tofile("...")`'
        if dtype == "uint16":
            advice = f'say `dtype = "uint32"`; or, if they have 64 bits, {advice}'
        return f"has 0 or a small number after every id: its ids are wider than {dtype}", advice
    if max(ids) >= vocab_size:
        return _beyond(sample, dtype, max(ids), vocab_size)
    if dtype == "uint16" and len(ids) >= 1 << 12 and _spread(ids, 8) > _spread(ids, 0) + 1:
        advice = 'write them in little-endian order: `numpy.fromfile("...", ">u2").astype("<u2").tofile("...")`'
        return "has ids whose upper bytes vary more than their lower ones: they are big-endian", advice
    return None


def _beyond(sample: bytes, dtype: str, largest: int, vocab_size: int) -> tuple[str, str]:
    """Returns that an id is beyond the vocabulary, and a hint with the byte order or width in which the ids would fit."""
    fits = [name for name in _CODES if name != dtype and max(_ids(sample, name)) < vocab_size]
    swapped = _ids(sample, dtype)
    swapped.byteswap()
    if max(swapped) < vocab_size:
        hint = "they fit if they are big-endian: write them in little-endian order"
    elif fits:
        hint = f'they fit as `dtype = "{fits[0]}"`'
    else:
        hint = "`vocab_size` is that of another tokenizer, or these are no raw ids"
    return f"has the id {largest} as {dtype}, and `vocab_size` is {vocab_size}", hint


def sample_of(path: Path) -> bytes:
    """Returns the file's first bytes, and blocks from places that are spread over it, each at a multiple of 8 bytes."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size <= _BLOCK * _NUM_BLOCKS:
            file.seek(0)
            return file.read()
        blocks = []
        for number in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK) * number // (_NUM_BLOCKS - 1) // 8 * 8)
            blocks.append(file.read(_BLOCK))
        return b"".join(blocks)


def _ids(sample: bytes, dtype: str) -> array[int]:
    ids = array(_CODES[dtype])
    ids.frombytes(sample[: len(sample) // ids.itemsize * ids.itemsize])
    return ids


def _is_padded(ids: Sequence[int]) -> bool:
    """Returns whether every second id is 0, or small beside the others, as the upper halves of wider ids are."""
    lower, upper = ids[::2], ids[1::2]
    return (max(upper) == 0 and len(set(lower)) > 4) or (max(upper) < 16 and max(lower) >= 1 << 12)


def _spread(ids: Sequence[int], shift: int) -> float:
    """Returns the entropy of one byte of the ids, in bits."""
    counts = [0] * 256
    for value in ids:
        counts[value >> shift & 255] += 1
    return -sum(count / len(ids) * log2(count / len(ids)) for count in counts if count)


NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
JSON_LINES = frozenset({".jsonl", ".ndjson"})
WILDCARDS = frozenset("*?[")


@dataclass(frozen=True)
class File:
    """Names a file, with its name within the corpus in forward slashes: `sub/one.txt` of `corpus/**/*.txt`.

    num_bytes: its stored size. is_compressed: whether that is the size of compressed content. is_table: whether it is a table
    of Parquet or Arrow. index: Megatron's, if it is a token file that has one.
    """

    name: str
    path: Path
    num_bytes: int
    is_compressed: bool = False
    is_table: bool = False
    index: Index | None = dataclasses.field(default=None, compare=False)

    def dtype(self, config: TokensConfig) -> Literal["uint16", "uint32"]:
        """Returns the dtype of its tokens, if it is a token file of the table."""
        return config.dtype if self.index is None else self.index.dtype


Found = tuple[list[File], list[Problem]]
"""Files, and problems of the paths and patterns that name them."""


def as_error(problems: Iterable[Problem]) -> PlanError:
    """Returns one PlanError that carries all `problems`."""
    error = PlanError.many(Diagnostic(p.code, p.message, path=p.path, hint=p.hint) for p in problems)
    assert isinstance(error, PlanError)
    return error


def find_files(patterns: Sequence[Path], key: KeyPath) -> Found:
    """Returns the files that paths and patterns name, each once, and their problems.

    patterns: as `table.PlanPattern` has them. A file that links lead to twice counts once, by its first name. Files are in the
    order of `patterns`, sorted within one. A problem is a path that is missing, not a regular file or empty, a pattern without
    a match, and a file or folder that may not be read. An empty file matched by a pattern is skipped.
    """
    files: dict[str, File] = {}
    problems = []
    for number, pattern in enumerate(patterns):
        try:
            for file in _named_by(str(pattern)):
                if not os.access(file.path, os.R_OK):
                    raise _BadPathError("data-missing", f"`{file.path}` may not be read", "change its permissions")
                files.setdefault(os.path.realpath(file.path), file)
        except _BadPathError as wrong:
            problems.append(Problem((*key, number), wrong.message, wrong.hint, wrong.code))
        except (OSError, ValueError) as error:
            message = f"`{_literal(str(pattern))}` cannot be read: {error}"
            problems.append(Problem((*key, number), message, None, "data-missing"))
    return list(files.values()), problems


class _BadPathError(Exception):
    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


_ESCAPED = re.compile(r"\[([*?\[])\]")


def _literal(pattern: str) -> str:
    """Returns the path that a pattern names if no character of it is special."""
    return _ESCAPED.sub(r"\1", pattern)


def _is_special(pattern: str) -> bool:
    return not WILDCARDS.isdisjoint(_ESCAPED.sub("", pattern))


def _named_by(pattern: str) -> Iterator[File]:
    """Yields the files of one path or pattern, sorted; raises `_BadPathError` if there is none."""
    if pattern.startswith("hf:/"):
        from sley_data import hub  # only for a name on the hub

        try:
            pattern = hub.downloaded(pattern)
        except SleyError as error:
            (wrong,) = error.diagnostics
            raise _BadPathError(wrong.code, wrong.message, wrong.hint) from None
    alone = Path(_literal(pattern))
    if not _is_special(pattern) or alone.exists():
        yield from _of_saved_dataset(alone) if (alone / _SAVED).is_file() else [_alone(alone)]
        return
    parts = Path(pattern).parts
    first = next(number for number, part in enumerate(parts) if _is_special(part))
    root = Path(_literal(str(Path(*parts[:first]))))
    matching = sorted(_matching(root, parts[first:])) if root.is_dir() else []
    stats = ((path, path.stat()) for path in matching)
    sizes = {path: stat.st_size for path, stat in stats if S_ISREG(stat.st_mode)}
    if not sizes:
        hint = "`**` stands for folders of any depth, `*` for a part of one name, `[[]` for a bracket in a name"
        hint = hint if root.exists() else f"there is no `{root}`"
        raise _BadPathError("data-missing", f"`{alone}` matches no file", hint)
    if not any(sizes.values()):
        raise _BadPathError("data-empty", f"every file that `{alone}` matches is empty")
    yield from (File(path.relative_to(root).as_posix(), path, size) for path, size in sizes.items() if size)


def _matching(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yields what `parts`, a pattern by folders, matches in `folder`; links to folders are followed.

    As in a shell, `*` and `**` leave out names that begin with a dot.
    """
    first, rest = parts[0], parts[1:]
    if first == "**":
        for inner in _folders(folder, set()):
            yield from _matching(inner, rest or ("*",))
        return
    for name in _names(folder) if _is_special(first) else [_literal(first)]:
        if name == _literal(first) or (fnmatchcase(name, first) and (first[0] == "." or name[0] != ".")):
            path = folder / name
            if rest and path.is_dir():
                yield from _matching(path, rest)
            elif not rest and os.path.lexists(path):
                yield path


def _folders(folder: Path, known: set[str]) -> Iterator[Path]:
    """Yields `folder` and all folders below it, each real folder once; without those whose names begin with a dot."""
    real = os.path.realpath(folder)
    if real in known:
        return
    known.add(real)
    yield folder
    for name in _names(folder):
        if name[0] != "." and (folder / name).is_dir():
            yield from _folders(folder / name, known)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


_SAVED = "state.json"


def _of_saved_dataset(folder: Path) -> list[File]:
    """Returns the files of a folder that `save_to_disk` of `datasets` has written."""
    try:
        names = [each["filename"] for each in json.loads((folder / _SAVED).read_text("utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise _BadPathError("data-missing", f"`{folder / _SAVED}` does not name the data set's files: {error!r}") from None
    return [replace(_alone(folder / name), name=f"{folder.name}/{name}") for name in names]


def _alone(path: Path) -> File:
    """Returns the file at a plain path; raises `_BadPathError` if it is missing, empty or not a regular file."""
    if not path.exists():
        raise _BadPathError("data-missing", f"there is no file `{path}`", "a relative path starts at the plan's folder")
    stat = path.stat()
    if S_ISDIR(stat.st_mode):
        splits = "its splits" if (path / "dataset_dict.json").is_file() else "its files"
        raise _BadPathError("data-missing", f"`{path}` is a folder", f"name {splits}: `{path.name}/*`")
    if not S_ISREG(stat.st_mode):
        raise _BadPathError("data-missing", f"`{path}` is not a regular file")
    if not stat.st_size:
        raise _BadPathError("data-empty", f"`{path}` is empty")
    return File(path.name, path, stat.st_size)


def standard_library() -> Found:
    """Returns the source files of the running Python's standard library, sorted, without tests and installed packages."""
    root = sysconfig.get_path("stdlib")
    if files := _sources(root):
        return [*files], []
    message = f"this Python has no source files in `{root}`"
    return [], [Problem(("data", "source"), message, "name `files` instead", "data-missing")]


@cache
def _sources(root: str) -> tuple[File, ...]:
    """Returns the files with source of a library, which stays as it is while a program runs."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        prefix = Path(folder, "_").relative_to(root).as_posix()[:-1]
        paths = [(name, Path(folder, name)) for name in names if name.endswith(".py")]
        files += [File(prefix + name, path, path.stat().st_size) for name, path in paths]
    return tuple(sorted((file for file in files if file.num_bytes), key=lambda file: file.name))


def text_files(config: TextConfig, split: Split) -> Found:
    """Returns the files that hold a split of a `data.text` table: all files for both splits without `held_out_files`."""
    if config.source is not None and not (split == "held_out" and config.held_out_files):
        return standard_library()
    key = "held_out_files" if split == "held_out" and config.held_out_files else "files"
    files, problems = find_files(getattr(config, key), ("data", key))
    lines = [file for file in files if _suffix(file.path) in JSON_LINES]
    if lines and config.field is None and config.separator is None:
        message = f"`{lines[0].path}` has JSON lines: braces, keys and escapes would be text too"
        hint = 'name the key of the text, as `field = "text"`; or `separator = "\\n"`, for lines as they stand'
        problems.append(Problem(("data", key), message, hint, "data-json"))
    return _marked_files(files, problems, ("data", key), tables=config.field is not None)


C = TypeVar("C", TextConfig, ChatConfig)


def deciding_files(config: C, split: Split, files_of: Callable[[C, Split], Found]) -> tuple[list[File], list[File]]:
    """Returns the files that hold a split, and those whose documents are left out of it.

    files_of: returns a split's files and their problems. Raises PlanError with every problem.
    """
    found = [files_of(config, split)]
    if split == "train":
        found += [files_of(each, "held_out") for each in config.all_sources if each.held_out_files]
    if problems := [problem for _, each in found for problem in each]:
        raise as_error(problems)
    return found[0][0], [file for files, _ in found[1:] for file in files]


def row_files(patterns: Sequence[Path], key: KeyPath) -> Found:
    """Returns the files of rows that paths and patterns name, as `find_files` does, and their problems."""
    return _marked_files(*find_files(patterns, key), key, tables=True)


def _marked_files(files: Sequence[File], problems: list[Problem], key: KeyPath, *, tables: bool) -> Found:
    """Returns the files, each with what its first bytes say. tables: whether a table of Parquet or Arrow is none of the
    problems.
    """
    formats = [format_of(file.path) for file in files]
    if tables:
        formats = [replace(form, refused=None) if form.is_table and not form.is_compressed else form for form in formats]
    pairs = zip(files, formats, strict=True)
    marked = [replace(file, is_compressed=form.is_compressed, is_table=form.is_table) for file, form in pairs]
    return marked, [*problems, *_refused(files, formats, key)]


def _suffix(path: Path) -> str:
    """Returns how a file's name ends, in lower case: `.jsonl`, also of `a.jsonl.gz`."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in SUFFIXES else suffix


def _refused(files: Sequence[File], formats: Sequence[Format], key: KeyPath) -> Iterator[Problem]:
    """Yields a problem for each file that has a format of its own."""
    for file, form in zip(files, formats, strict=True):
        if form.refused is not None:
            yield Problem(key, f"`{file.path}` is {form.refused[0]}", form.refused[1], "data-format")


def token_files(config: TokensConfig, split: Split) -> Found:
    """Returns the files of a split of a `data.tokens` table, and their problems, such as ids of another width."""
    key, patterns = ("files", config.files) if split == "train" else ("held_out_files", config.held_out_files)
    files, problems = find_files(patterns, ("data", key))
    try:
        files = list({os.path.realpath(file.path): file for file in map(_with_index, files)}.values())
    except _BadPathError as wrong:
        return files, [*problems, Problem(("data", key), wrong.message, wrong.hint, wrong.code)]
    formats = [format_of(file.path) for file in files]
    packed = ("compressed", "unpack it: token files are mapped into memory")
    formats = [replace(form, refused=packed) if form.is_compressed else form for form in formats]
    problems += _refused(files, formats, ("data", key))
    for file in [] if problems else files:
        dtype = file.dtype(config)
        if file.num_bytes % TOKEN_BYTES[dtype]:
            message = f"`{file.path}` has {file.num_bytes} bytes, which is no whole number of {dtype} tokens"
            problems.append(Problem(("data", key), message, "is `dtype` right?", "data-size"))
        elif wrong_id := wrong_ids(file.path, dtype, config.vocab_size):
            problems.append(Problem(("data", key), f"`{file.path}` {wrong_id[0]}", wrong_id[1], "data-format"))
        elif file.index is None and config.documents != "cut" and config.end_of_document is None:
            message = f'`documents = "{config.documents}"` needs the `end_of_document` token id: `{file.path}` has no index'
            problems.append(Problem(("data", "end_of_document"), message, None, "data-documents"))
    return files, problems


def _with_index(file: File) -> File:
    """Returns a token file with Megatron's index if there is one, whichever of both is named; raises `_BadPathError`."""
    index, tokens = file.path.with_suffix(".idx"), file
    try:
        with file.path.open("rb") as content:
            if content.read(len(MAGIC)) == MAGIC:
                index, tokens = file.path, _alone(file.path.with_suffix(".bin"))
        if not index.exists():
            return tokens
        return replace(tokens, index=read_index(index, tokens.num_bytes))
    except ValueError as error:
        raise _BadPathError("data-format", f"`{index}` {error}", f"it is read as the index of `{tokens.path}`") from None
    except OSError as error:
        raise _BadPathError("data-missing", f"`{index}` cannot be read: {error}") from None
