"""Tells by its first bytes whether a file is compressed, and reads it; or that it is no text at all. Torch-free."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import TypeVar

from sley_core.errors import PlanError

_HEAD = 512
"""Bytes that the marks are looked for in; tar has its mark at byte 257."""

Opener = Callable[[Path], BufferedIOBase]
T = TypeVar("T")

_OPENED: dict[bytes, Opener] = {
    rb"\x1f\x8b\x08": gzip.GzipFile,
    rb"BZh[1-9]1AY&SY": bz2.BZ2File,
    rb"\xfd7zXZ\x00": lzma.LZMAFile,
}
"""Formats of one compressed file each, by their mark, with what reads them."""

SUFFIXES = frozenset({".gz", ".bz2", ".xz"})
"""How the names of such files end, for the suffix before it: `.jsonl.gz`."""

_UNPACK = "unpack it, and name the files that come out"
_MARKS = {
    rb"PK\x03\x04": ("a zip archive", _UNPACK),
    rb"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it: `zstd -d`; gzip, bzip2 and xz are read as they are"),
    rb"\x04\x22\x4d\x18": ("compressed by lz4", "unpack it: `lz4 -d`; gzip, bzip2 and xz are read as they are"),
    rb"\x1f\x9d": ("compressed by compress", "unpack it: `uncompress`; gzip, bzip2 and xz are read as they are"),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    rb"Rar!\x1a\x07": ("a rar archive", _UNPACK),
    rb".{257}ustar": ("a tar archive", _UNPACK),
    rb"PAR1\x15": ("a Parquet table", 'write its column of texts as JSON lines, for `field = "text"`'),
    rb"ARROW1\x00\x00": ("an Arrow table", 'write its column of texts as JSON lines, for `field = "text"`'),
    rb"\x89HDF\r\n\x1a\n": ("an HDF5 file", "write what is to be read as text or as raw token ids"),
    rb"SQLite format 3\x00": ("an SQLite database", "write its texts to files"),
    rb"%PDF-\d\.\d": ("a PDF", "convert it to text"),
    rb"\x00\x05\x16\x07": ("what macOS keeps beside a file, and not the file", "leave names that begin with `._` out"),
    rb"version https://git-lfs": ("a pointer of Git LFS, and not the file", "download the file: `git lfs pull`"),
    rb"\x93NUMPY": (
        "a file of numpy, whose header would be read too",
        'write raw ids, for `data.tokens`: `numpy.load("...").astype("uint16").tofile("tokens.bin")`',
    ),
}
"""Formats that are refused, by their mark: which they are, and what to do."""


_ANY = re.compile(b"|".join((*_OPENED, *_MARKS)), re.DOTALL)


@dataclass(frozen=True)
class Format:
    """Describes a file by its first bytes. is_compressed: whether `opened` gives other bytes than it has. refused: which format
    it has, and what to do, if it can be no text and no raw ids.
    """

    is_compressed: bool = False
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
            return Format(refused=_marked(head, _MARKS))
        with opened(path) as inside:
            return Format(is_compressed=True, refused=_marked(inside.read(_HEAD), _MARKS))
    except OSError:
        return PLAIN
    except PlanError:
        return Format(is_compressed=True)


@contextmanager
def opened(path: Path) -> Iterator[BufferedIOBase]:
    """Opens a file for reading; of one that gzip, bzip2 or xz compressed, what it contains.

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
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        message = f"`{path}` is compressed, and damaged or incomplete: {error}"
        raise PlanError("data-format", message, path=("data", "files")) from None


def _marked(head: bytes, marks: dict[bytes, T]) -> T | None:
    """Returns the value of the first mark with which `head` begins; None if there is none."""
    return next((value for mark, value in marks.items() if re.match(mark, head, re.DOTALL)), None)
