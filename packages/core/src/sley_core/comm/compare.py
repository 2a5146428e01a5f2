"""Compares numbers of all ranks through one sum, such as what each rank has exchanged through backends without marks.

In each group one rank adds size - 1 times a hash of its number, and the others subtract theirs: one sum for any number of
groups, which is 0 if all agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from sley_core.comm.collectives import gather_objects
from sley_core.comm.exchange_log import Exchanged
from sley_core.comm.groups import Group
from sley_core.comm.marks import HINT
from sley_core.errors import RunError

Exchanges = dict[str, Exchanged]
"""A summary of a rank's exchanges without marks, by the label of the group."""

_NOTHING = ((), 0, 0, "")


def difference(group: Group, number: int) -> int:
    """Returns this rank's summand of a sum over all ranks that is 0 if the ranks of `group` have the same `number`.

    An integer below 2^32 x the group's size; float64 sums are exact below 2^53. If ranks differ the sum is 0 with a chance of
    2^-32. The hash includes the group, so that differences in two groups do not cancel, as they could with a linear function.
    """
    told = blake2b(f"{group.axis} {group.ranks[0]} {number}".encode(), digest_size=4)
    return int.from_bytes(told.digest(), "little") * (group.size - 1 if group.ranks[0] == group.rank else -1)


def exchanges_of(groups: Iterable[Group]) -> Exchanges:
    """Returns this rank's exchanges since the logs of `groups` were cleared, by the group's label."""
    # Runs in every step, so labels, which list the group's ranks, are made only for groups with exchanges.
    return {str(group): exchanged for group in groups if (exchanged := group.log.exchanged(group.ranks)) is not None}


def exchanges_differ(groups: Iterable[Group]) -> int:
    """Returns this rank's summand of a sum over all ranks that is 0 if the ranks of each group have exchanged the same."""
    noted = ((group, group.log.exchanged(group.ranks)) for group in groups)
    return sum(difference(group, exchanged.number) for group, exchanged in noted if exchanged is not None)


def differing(when: str, own: Exchanges, control: Group) -> RunError:
    """Gathers how many exchanges each rank counted in each of its groups, and returns the error `ranks-differ`, which names the
    first group in which they differ, and who; the same on all ranks. For ranks that are known to differ: asserts that they do.

    A blocking collective on `control`. own: this rank's counts.
    """
    views = gather_objects(own, control, what="what ranks have exchanged")
    groups: dict[str, Sequence[int]] = {label: one[0] for view in views for label, one in view.items()}
    for label, ranks in groups.items():
        found = {rank: tuple(views[rank].get(label, _NOTHING))[1:] for rank in ranks}
        (usual, _), *others = Counter(found.values()).most_common()
        if others:
            other = next(rank for rank, one in found.items() if one == usual)
            odd = next(rank for rank, one in found.items() if one != usual)
            message = f"{when}: of {label}, rank {odd} made {_told(found[odd])}, rank {other} {_told(usual)}"
            return RunError("ranks-differ", message, hint=HINT)
    raise AssertionError(f"all ranks have exchanged the same: {views}")


def _told(exchanged: Sequence[Any]) -> str:
    times, _, last = exchanged
    return f"{times} exchanges, the last of {last}" if times else "none"
