"""The plugin `wrong`: for each kind a part that holds its contract, and some that are wrong on purpose, one fault each."""

from __future__ import annotations

from sley_core.api.plan import Table
from sley_core.hookspecs import hookimpl
from sley_core.records import (
    LRScheduleRecord,
    MemoryPoolRecord,
    MetricsWriterRecord,
    OffloadManagerRecord,
    Record,
    SchedulerHookRecord,
)

POOLS = ("Naive", "Shared", "Elements", "Inferred", "Hoards", "Loses", "Counts", "Frees", "Keeps", "Silent", "Again")
RATES = ("naive", "counting", "negative", "short", "nothing", "none")
WRITERS = ("Naive", "Begins", "First", "Whole", "Late", "Deaf", "Eager", "Once", "Mute", "Strict")
MANAGERS = ("Naive", "Careless", "Skips", "Open", "Vague", "Twice", "Stays", "Half", "Silent")
MOVED = ("weights", "buffers", "masters", "optimizer_states")
HOOKS = ("Naive", "Scales", "Keeps", "Asks", "Differs", "Unbalanced", "Asked", "Hooked")


class Nothing(Table):
    """A table without keys."""


@hookimpl
def sley_records() -> list[Record]:
    return [
        *[MemoryPoolRecord(name=name.lower(), config=Nothing, build=f"wrong_pools:{name}") for name in POOLS],
        *[LRScheduleRecord(name=name, config=Nothing, build=f"wrong_rates:{name}") for name in RATES],
        *[MetricsWriterRecord(name=name.lower(), config=Nothing, build=f"wrong_writers:{name}") for name in WRITERS],
        *[
            OffloadManagerRecord(name=name.lower(), config=Nothing, build=f"wrong_offload:{name}", parts=lambda _: MOVED)
            for name in MANAGERS
        ],
    ]


@hookimpl
def sley_scheduler_hooks() -> list[SchedulerHookRecord]:
    return [SchedulerHookRecord(name=name.lower(), config=Nothing, build=f"wrong_hooks:{name}") for name in HOOKS]
