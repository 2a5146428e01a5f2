"""Compares, before the first step, what all ranks are about to run; the error names the rank that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

from sley_core.comm.collectives import gather_objects
from sley_core.comm.groups import Group
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
            raise RunError(
                "ranks-disagree", message, hint="install the same versions and give the same plan on every node"
            )


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Returns in words which parts differ, the first of them with both values."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    said = [
        f"`{name}` is {one.get(name, 'left out')}, not {other.get(name, 'left out')}" for name in names[:MOST_PARTS]
    ]
    more = f", and {len(names) - MOST_PARTS} more" if len(names) > MOST_PARTS else ""
    return "; ".join(said) + more
