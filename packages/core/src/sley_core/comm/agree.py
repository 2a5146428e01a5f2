"""Ranks compare, before the first step, the plan and versions that they are about to run, and in each step the exchanges that
they made; an error names the rank that differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from sley_core.comm.collectives import gather_objects
from sley_core.comm.groups import Group
from sley_core.comm.marks import HINT, Exchanged
from sley_core.errors import RunError

MOST_PARTS = 3
"""How many differing parts an error names."""

Parts = Callable[[], Mapping[str, str]]


def agree(facts: Mapping[str, str], control: Group, parts: Mapping[str, Parts] = MappingProxyType({})) -> None:
    """Compares `facts` (plan digest, versions, group table) over all ranks; a blocking collective on `control`.

    parts: by name of a fact, a function that returns the pieces that make it up; called and gathered only if ranks differ, to
    name the piece. Raises RunError `ranks-disagree` on every rank alike, with the fact, the ranks in the minority, and both
    values.
    """
    everyone = gather_objects(dict(facts), control, what="the facts that ranks agree on")
    for name in facts:
        values = [str(theirs.get(name)) for theirs in everyone]
        most, _ = Counter(values).most_common(1)[0]
        odd = [(rank, value) for rank, value in zip(control.ranks, values, strict=True) if value != most]
        if odd:
            rank, value = odd[0]
            usual = next(r for r, v in zip(control.ranks, values, strict=True) if v == most)
            others = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            message = f"rank {rank}{others} has {name} {value}, rank {usual} has {most}"
            if name in parts:
                # All ranks get here: they have compared the same values.
                every = gather_objects(dict(parts[name]()), control, what=f"what {name} is made of")
                of = dict(zip(control.ranks, every, strict=True))
                if pieces := differing(of[rank], of[usual]):
                    message = f"rank {rank}{others} has another {name.removeprefix('the ')} than rank {usual}: {pieces}"
            raise RunError("ranks-disagree", message, hint="install the same versions and give the same plan on every node")


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Returns in words which parts differ, the first of them with both values."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    said = [f"`{name}` is {one.get(name, 'left out')}, not {other.get(name, 'left out')}" for name in names[:MOST_PARTS]]
    more = f", and {len(names) - MOST_PARTS} more" if len(names) > MOST_PARTS else ""
    return "; ".join(said) + more


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
    """Returns this rank's summand of a sum over all ranks that is 0 if the ranks of each group have exchanged the same.

    In each group one rank adds size - 1 times a hash of its number, and the others subtract theirs: one sum for any number of
    groups, which is 0 if all agree.
    """
    noted = ((group, group.log.exchanged(group.ranks)) for group in groups)
    return sum(difference(group, exchanged.number) for group, exchanged in noted if exchanged is not None)


def exchanges_error(when: str, own: Exchanges, control: Group) -> RunError:
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
