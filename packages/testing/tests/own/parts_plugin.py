"""The plugin `parts`: the simplest correct part of each type, and parts with one bug each."""

from __future__ import annotations

from typing import Any

from sley_core.api.plan import SequenceConfig, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import (
    GradientHandlerRecord,
    LRScheduleRecord,
    MetricsWriterRecord,
    OffloadManagerRecord,
    Record,
    SchedulerHookRecord,
    SequenceAttentionRecord,
    WeightCommunicatorRecord,
)


class Empty(Table):
    """A table without keys."""


MOVABLE_PARTS = ("weights", "buffers", "masters", "optimizer_states")
PARTS: dict[str, tuple[type[Record], str]] = {
    "hook": (SchedulerHookRecord, "Naive Scales Keeps Asks Differs Unbalanced Asked Hooked"),
    "learning_rate": (LRScheduleRecord, "naive counting negative short nothing"),
    "offload": (OffloadManagerRecord, "Naive Careless Skips Open Twice Stays Half Silent"),
    "sequence": (SequenceAttentionRecord, "Naive Local Unsummed Patched Silent"),
    "weights": (WeightCommunicatorRecord, "Naive Mean Cached Eager Patched Shards Hoards"),
    "writer": (MetricsWriterRecord, "Naive Begins First Integers Late Deaf Once Mute Strict"),
}
"""By type of part: its record, and the names of its parts in the module `parts_TYPE`."""

EXTRA_FIELDS: dict[str, dict[str, Any]] = {
    "offload": {"parts": lambda _: MOVABLE_PARTS},
    "sequence": {"config": SequenceConfig},
}
"""Further fields of the records of a type."""


def records(part_type: str) -> list[Any]:
    record, names = PARTS[part_type]
    return [
        record(
            **{
                "name": f"{part_type}_{name.lower()}",
                "config": Empty,
                "build": f"parts_{part_type}:{name}",
                **EXTRA_FIELDS.get(part_type, {}),
            }
        )
        for name in names.split()
    ]


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    inexact = {"Noisy": 2**-6, "Rounded": 2**-6, "Coarse": 2**-6}
    correct = {"Naive": "Late", "Halves": "Halves", "Hoards": "Hoards"}
    buggy = "World Early Chatty Watches Noisy Rounded Coarse"
    builds = {name: f"naive_handlers:{cls}" for name, cls in correct.items()}
    builds |= {name: f"parts_handler:{name}" for name in buggy.split()}
    return [
        GradientHandlerRecord(
            name=f"handler_{name.lower()}", config=Empty, build=build, role="reducer", tolerance=inexact.get(name, 0.0)
        )
        for name, build in builds.items()
    ]


@hookimpl
def sley_records() -> list[Record]:
    return [record for part_type in PARTS if part_type != "hook" for record in records(part_type)]


@hookimpl
def sley_scheduler_hooks() -> list[SchedulerHookRecord]:
    return records("hook")
