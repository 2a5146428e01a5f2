"""The plugin `askew`: schedules that are broken, one fault each; their links and partitions are those of `wave`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

from sley_core.api.actions import Action, Kind, Schedule
from sley_core.api.plan import Table
from sley_core.hookspecs import hookimpl
from sley_core.records import ScheduleRecord

Lists = list[list[Action]]


class Nothing(Table):
    """A table without keys."""


def forwards_first(micros: int) -> list[Action]:
    """All forwards, then all backwards."""
    return [Action(kind, 0, micro) for kind in (Kind.FORWARD, Kind.BACKWARD) for micro in range(micros)]


def one_by_one(stages: int, chunks: int, micros: int) -> Lists:
    """Right, and slow: a micro-batch goes through all stages and back before the next one begins."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [[Action(kind, 0, micro) for micro in range(micros) for kind in kinds] for _ in range(stages)]


def blocked(stages: int, chunks: int, micros: int) -> Lists:
    """The last stage wants the last micro-batch first, which comes when it has finished the first one."""
    lists = one_by_one(stages, chunks, micros)
    if stages > 1:
        lists[-1] = [action for micro in reversed(range(micros)) for action in lists[-1] if action.micro == micro]
    return lists


def careless(stages: int, chunks: int, micros: int) -> Lists:
    """Of five micro-batches or more the last one has a backward too few."""
    lists = one_by_one(stages, chunks, micros)
    return [actions[:-1] for actions in lists] if micros >= 5 else lists


def greedy(stages: int, chunks: int, micros: int) -> Lists:
    """Holds all micro-batches, and says that it holds one."""
    return [forwards_first(micros) for _ in range(stages)]


def forgetful(calls: count[int], stages: int, chunks: int, micros: int) -> Lists:
    """Every second call writes another list."""
    return greedy(stages, chunks, micros) if next(calls) % 2 else one_by_one(stages, chunks, micros)


GENERATORS: dict[str, Callable[[int, int, int], Lists]] = {
    "one_by_one": one_by_one,
    "blocked": blocked,
    "careless": careless,
    "greedy": greedy,
    "forgetful": partial(forgetful, count()),
}


def build(name: str, config: Nothing) -> Schedule:
    return Schedule(GENERATORS[name])


build_one_by_one, build_blocked, build_careless, build_greedy, build_forgetful = (partial(build, name) for name in GENERATORS)


@hookimpl
def sley_records() -> list[ScheduleRecord]:
    return [
        ScheduleRecord(
            name=name, config=Nothing, build=f"broken_schedules:build_{name}", link="wave.link", partition="wave.even"
        )
        for name in GENERATORS
    ]
