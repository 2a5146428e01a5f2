"""Before the first step all ranks agree on what they are about to do, and the odd one is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sley_core.comm.collectives import gather_objects
from sley_core.comm.groups import Group
from sley_core.errors import RunError


def agree(facts: Mapping[str, str], control: Group) -> None:
    """Compares `facts` (plan digest, versions, group table) over all ranks; a collective on `control`.

    Raises RunError `ranks-disagree` on every rank alike, with the fact, the ranks that differ from the most, and both
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
            raise RunError(
                "ranks-disagree",
                f"rank {rank}{others} has {name} {value}, rank {usual} has {most}",
                hint="install the same versions and give the same plan on every node",
            )
