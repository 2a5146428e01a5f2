"""The ranks of one axis, as one of them sees it: what transports and errors need to know of a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from sley_core.comm.progress import Progress


@dataclass(frozen=True)
class Members:
    """Names the ranks of one axis with which this rank communicates.

    ranks: global, ascending. rank: this one's, among them. progress: what this rank has exchanged in all of its groups.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    progress: Progress = field(default_factory=Progress, compare=False, repr=False, kw_only=True)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def coord(self) -> int:
        """This rank's index in `ranks`."""
        return self.ranks.index(self.rank)

    @property
    def peers(self) -> list[int]:
        """The coordinates of the other members."""
        coord = self.coord
        return [*range(coord), *range(coord + 1, self.size)]

    def __str__(self) -> str:
        return f"{self.axis}{list(self.ranks)}"
