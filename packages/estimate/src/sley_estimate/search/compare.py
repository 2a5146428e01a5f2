"""Compares two estimates part by part: where one layout's seconds and bytes go, and where the other's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sley_estimate.seconds.result import StepSeconds


class Part(NamedTuple):
    """One line: its name, and its value with the one layout and with the other."""

    name: str
    one: float
    other: float


def parts_of_seconds(step: StepSeconds) -> Mapping[str, float]:
    """Returns the parts of a step's seconds, by name, on the stage that computes longest; their sum is the step: actions,
    update, waiting for each kind of exchange and for the host; and what the stage idles besides, before its first micro-batch
    and behind its update.
    """
    stage = max(range(len(step.computing_s)), key=lambda at: step.computing_s[at])
    updating_s = step.updating_s[stage]
    parts: dict[str, float] = defaultdict(
        float, {"actions": step.computing_s[stage] - updating_s, "norm and update": updating_s}
    )
    for lane, seconds in step.exposed_s(stage).items():
        parts[f"waiting for {lane}"] += seconds
    if step.seconds > step.devices_s:
        parts["waiting for the host"] = step.seconds - step.devices_s
    parts["idle besides"] = step.seconds - sum(parts.values())
    return dict(parts)


def side_by_side(one: Mapping[str, float], other: Mapping[str, float]) -> Iterator[Part]:
    """Yields the values of both by name, the largest first; 0 where one has no such name."""
    names = sorted({*one, *other}, key=lambda name: -max(one.get(name, 0.0), other.get(name, 0.0)))
    yield from (Part(name, one.get(name, 0.0), other.get(name, 0.0)) for name in names)
