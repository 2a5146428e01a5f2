"""Decides by their content which documents are held out; torch-free.

Held out means never trained on, so documents of equal content are always on one side, whatever their names. It depends on
nothing else: not on a rank, an order, a seed, or where the corpus lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from mmap import ACCESS_READ, mmap

from sley_core.records import Problem
from sley_data.documents import File
from sley_data.formats import opened

_PIECE = 1 << 10
"""Bytes of each of the pieces of a token file that are looked for in others."""

_SEARCHED = 1 << 30
"""Bytes that are searched at most for copies of held-out tokens, in all files together: about a second."""

_END = 1 << 12
"""Bytes at either end of a document that its key is made of, with its length: a file need not be read for it."""


@dataclass(frozen=True)
class Content:
    """The content of a document, as far as it decides about its split. size: in bytes. key: returns its key, the same for equal
    contents; may read a file.
    """

    size: int
    key: Callable[[], bytes]


def content_of(text: bytes) -> Content:
    """Returns the content of a text."""
    return Content(len(text), lambda: _key(len(text), text[:_END], text[-_END:]))


def content_of_file(file: File) -> Content:
    """Returns the content of a file; one that is compressed is read for it. Raises OSError, and PlanError as `opened` does."""
    if file.is_compressed:
        with opened(file.path) as whole:
            return content_of(whole.read())
    return Content(file.num_bytes, lambda: _key_of_file(file))


def _key_of_file(file: File) -> bytes:
    with file.path.open("rb") as content:
        head = content.read(_END)
        content.seek(max(0, file.num_bytes - _END))
        return _key(file.num_bytes, head, content.read(_END))


def _key(size: int, head: bytes, tail: bytes) -> bytes:
    return blake2b(b"%d/%b/%b" % (size, head, tail), digest_size=8).digest()


def in_share(contents: Iterable[Content], share: float) -> list[bool]:
    """Returns for each document whether its key, uniform over [0, 1), is below `share`; asks for none if that is 0."""
    return [share > 0 and int.from_bytes(each.key(), "big") < share * 2**64 for each in contents]


def among(contents: Sequence[Content], others: Iterable[Content]) -> list[bool]:
    """Returns for each document whether it is one of `others`, too. Keys are asked for only where sizes are equal."""
    sizes = {each.size for each in contents}
    keys = {(each.size, each.key()) for each in others if each.size in sizes}
    known = {size for size, _ in keys}
    return [each.size in known and (each.size, each.key()) in keys for each in contents]


def copied_tokens(trained: Sequence[File], held_out: Sequence[File]) -> list[Problem]:
    """Returns a problem for each held-out token file whose tokens are in a file to train on, all of them or as a part of it.

    Pieces from three places of each held-out file are searched, in beginnings and ends of files to train on if these are large.
    """
    budget = _SEARCHED // max(1, len(trained) * len(held_out))
    problems = []
    for held in held_out:
        try:
            pieces = _pieces(held)
            copied = next((file for file in trained if pieces and _has_all(file, pieces, budget)), None)
        except OSError:
            continue  # the code that opens it later reports the error
        if copied is not None:
            message = f"the tokens of `{held.path}` are in `{copied.path}` too, and would be trained on"
            hint = "held-out data are others than those to train on: cut them out of `files`"
            problems.append(Problem(("data", "held_out_files"), message, hint, "held-out-trained"))
    return problems


def _has_all(file: File, pieces: Sequence[bytes], budget: int) -> bool:
    with file.path.open("rb") as stored, mmap(stored.fileno(), 0, access=ACCESS_READ) as content:
        return all(_is_in(content, piece, budget) for piece in pieces)


def _pieces(file: File) -> list[bytes]:
    """Returns bytes from the beginning, the middle and the end of a token file; not those in which hardly any byte differs."""
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
