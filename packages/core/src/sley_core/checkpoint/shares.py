"""Decides which rank writes what: everything once, as evenly as possible, the same result on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from sley_core.checkpoint.index import TensorFacts
from sley_core.checkpoint.rectangles import Rectangle, all_of
from sley_core.checkpoint.tensor_file import TensorPiece
from sley_core.errors import RunError
from sley_core.weight_files.write import BY_NAME, DTYPES


class Listed(NamedTuple):
    """Describes a piece for other ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rectangle: Rectangle

    @property
    def num_bytes(self) -> int:
        return self.rectangle.numel * BY_NAME[self.dtype].itemsize


def listed(pieces: Sequence[TensorPiece]) -> list[Listed]:
    """Returns the descriptions of a rank's pieces, for the other ranks."""
    return [Listed(one.name, DTYPES[one.tensor.dtype], one.shape, one.rectangle) for one in pieces]


def from_lists(found: Sequence[Sequence[Any]]) -> list[Listed]:
    """Rebuilds the descriptions from lists, which JSON made of them."""
    return [
        Listed(name, dtype, tuple(shape), Rectangle(tuple(offsets), tuple(sizes)))
        for name, dtype, shape, (offsets, sizes) in found
    ]


class Shares(NamedTuple):
    """Says who writes what. of_rank: by rank, the numbers of those of its pieces that it writes, file by file. tensors: the
    index of all.
    """

    of_rank: list[list[list[int]]]
    tensors: dict[str, TensorFacts]


def share_out(everyone: Sequence[Sequence[Listed]]) -> Shares:
    """Returns who writes what, from the lists of all ranks: in order of size, each piece goes to the one of its holders that
    has the fewest bytes so far.

    A file has each name once, so of several rectangles of one tensor the second goes into the rank's second file, and so on.
    Raises RunError `checkpoint-ranks` if ranks hold tensors of one name that do not fit together.
    """
    holders: dict[Listed, list[tuple[int, int]]] = {}
    for rank, pieces in enumerate(everyone):
        for number, piece in enumerate(pieces):
            holders.setdefault(piece, []).append((rank, number))
    _check(holders)
    loads = [0] * len(everyone)
    chosen: list[list[int]] = [[] for _ in everyone]
    for piece in sorted(holders, key=lambda one: (-one.num_bytes, one)):
        rank, number = min(holders[piece], key=lambda one: (loads[one[0]], one))
        loads[rank] += piece.num_bytes
        chosen[rank].append(number)
    of_rank = [_files(pieces, sorted(numbers)) for pieces, numbers in zip(everyone, chosen, strict=True)]
    tensors: dict[str, TensorFacts] = {}
    for rank, files in enumerate(of_rank):
        for at, numbers in enumerate(files):
            for number in numbers:
                one = everyone[rank][number]
                facts = tensors.setdefault(one.name, TensorFacts(one.dtype, one.shape, []))
                facts.pieces.append((file_name(rank, at), one.rectangle))
    return Shares(of_rank, tensors)


def file_name(rank: int, number: int) -> str:
    """Returns the name of a rank's file with this number, from 0."""
    return f"rank-{rank:05}{f'-{number}' if number else ''}.safetensors"


def _files(pieces: Sequence[Listed], numbers: Sequence[int]) -> list[list[int]]:
    """Distributes the numbers over files, wide formats first, so that all are aligned; at least one file."""
    files: list[list[int]] = [[]]
    seen: dict[str, int] = {}
    for number in numbers:
        at = seen[pieces[number].name] = seen.get(pieces[number].name, -1) + 1
        if at == len(files):
            files.append([])
        files[at].append(number)
    for file in files:
        file.sort(key=lambda number: -BY_NAME[pieces[number].dtype].itemsize)
    return files


def _check(pieces: dict[Listed, list[tuple[int, int]]]) -> None:
    """Raises RunError unless the pieces of each name have one format and one shape, and cover all of it without overlap."""
    known: dict[str, Listed] = {}
    numel: dict[str, int] = {}
    for piece, holders in pieces.items():
        first = known.setdefault(piece.name, piece)
        if (first.dtype, first.shape) != (piece.dtype, piece.shape):
            rank = holders[0][0]
            message = f"{piece.name!r} is {piece.dtype} {list(piece.shape)} on rank {rank}"
            raise RunError("checkpoint-ranks", f"{message}, and {first.dtype} {list(first.shape)} on another")
        assert piece.rectangle.common(all_of(piece.shape)) in (piece.rectangle, None), piece
        numel[piece.name] = numel.get(piece.name, 0) + piece.rectangle.numel
    for name, found in numel.items():
        assert found == prod(known[name].shape), f"{found} elements of {known[name]} are on ranks"
