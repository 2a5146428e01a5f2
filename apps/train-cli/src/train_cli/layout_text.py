"""Formats which rank computes what and communicates with whom: rank by rank in a small world, by pattern in a large one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sley_core.topology import GroupEntry, Topology

MOST_RANKS = 32
"""In a larger world ranks are told as kinds."""

_MOST_STAGES = 16
_MOST_GROUPS = 4
"""How many groups of one axis are listed."""

_SIZES = ("pp", "dp", "sp", "wdp", "wp")


def sizes(topology: Topology) -> str:
    """Returns the sizes of all axes as text: `pp 2, dp 1, sp 1, wdp 1, wp 1`."""
    return ", ".join(f"{name} {getattr(topology, name)}" for name in _SIZES)


def rank_lines(topology: Topology, rank: int | None) -> Iterator[str]:
    """Yields a table of the coordinates of all ranks, or of `rank`; for a large world a summary of what its ranks have in
    common.
    """
    if rank is None and topology.world > MOST_RANKS:
        yield from _kinds(topology)
        return
    yield "  rank  stage    dp    sp   wdp    wp"
    for each in range(topology.world) if rank is None else (rank,):
        at = topology.coordinates(each)
        yield "".join(f"{number:6}" for number in (at.rank, at.stage, at.dp, at.sp, at.wdp, at.wp))


def _kinds(topology: Topology) -> Iterator[str]:
    """Yields the ranks of each stage, and how a rank's place in its stage gives its coordinates."""
    size = topology.ranks_per_stage
    rows = [f"  stage {stage:<5} ranks {stage * size}-{stage * size + size - 1}" for stage in range(topology.pp)]
    yield from rows if len(rows) <= _MOST_STAGES else [*rows[:3], f"  ... {len(rows)} stages in all", rows[-1]]
    yield f"  the n-th rank of a stage of {size}, from 0, has"
    for outer, inner, length in (("dp", "sp", topology.sp), ("wdp", "wp", topology.wp)):
        yield f"    {_place(topology, outer, f'n // {length}'):20} {_place(topology, inner, f'n % {length}')}"
    yield "  --rank N shows one rank, --format json all"


def _place(topology: Topology, axis: str, formula: str) -> str:
    """Returns a coordinate as a formula of the place in a stage, as short as the axis allows."""
    length = getattr(topology, axis)
    if length == 1:
        return f"{axis} = 0"
    return f"{axis} = {'n' if length == topology.ranks_per_stage else formula}"


def group_lines(entries: Sequence[GroupEntry]) -> Iterator[str]:
    """Yields one line per axis and lane with its groups, in the order of `entries`; of many groups only the first ones and the
    last.
    """
    lines: dict[tuple[str, str], list[GroupEntry]] = {}
    for entry in entries:  # the lanes of a group follow each other
        lines.setdefault((entry.axis, entry.lane), []).append(entry)
    for (axis, lane), every in lines.items():
        name = axis if lane == "main" else f"{axis}.{lane}"
        shown = "  ".join(each.label for each in every[:_MOST_GROUPS])
        if len(every) > _MOST_GROUPS:
            first, second, last = every[0], every[1], every[-1]
            shown = f"{len(every)} groups of {len(first.ranks)}: {first.label}  {second.label}  ...  {last.label}"
        yield f"  {name:14} {every[0].backend:7} {shown}"
