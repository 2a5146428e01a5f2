"""Compares two estimates part by part: where one layout's seconds and bytes go, and where the other's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sley_estimate.bytes.rank import RankBytes
    from sley_estimate.seconds.result import StepSeconds


@dataclass(frozen=True)
class Part:
    """One line: what it is of, and its value with the one layout and with the other."""

    name: str
    one: float
    other: float


def seconds_parts(one: StepSeconds, other: StepSeconds) -> Iterator[Part]:
    """Yields the parts of two steps' seconds, the largest first, each on its step's stage that computes longest: actions,
    update, waiting for each kind of exchange and for the host; and what that idles besides, before its first micro-batch and
    behind its update. They sum to the steps.
    """
    yield from _parts(_seconds(one), _seconds(other))


def bytes_parts(one: RankBytes, other: RankBytes) -> Iterator[Part]:
    """Yields the parts of the most bytes on two layouts' fullest stages, the largest first, by the part of the run that has
    them. They sum to the peaks.
    """
    yield from _parts(one.alive, other.alive)


def _seconds(step: StepSeconds) -> Mapping[str, float]:
    """Returns the parts of a step's seconds, by name, on the stage that computes longest; their sum is the step."""
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
    return parts


def _parts(one: Mapping[str, float], other: Mapping[str, float]) -> Iterator[Part]:
    """Yields the values of both by name, the largest first; 0 where one has no such name."""
    names = sorted({*one, *other}, key=lambda name: -max(one.get(name, 0.0), other.get(name, 0.0)))
    yield from (Part(name, one.get(name, 0.0), other.get(name, 0.0)) for name in names)
