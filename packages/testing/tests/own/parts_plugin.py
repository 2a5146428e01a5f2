"""The plugin `parts`: the simplest correct part of each type, and parts with one bug each."""

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
    "handler": (GradientHandlerRecord, "World Early Chatty Watches Noisy Rounded Coarse"),
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
    "handler": {"role": "reducer"},
    **{f"handler_{name}": {"role": "reducer", "tolerance": 2**-6} for name in ("Noisy", "Rounded", "Coarse")},
}
"""Further fields of the records of a type, or of one record."""


@hookimpl
def sley_records() -> list[Record]:
    records = []
    for part_type, (record, names) in PARTS.items():
        for name in names.split():
            fields = EXTRA_FIELDS.get(f"{part_type}_{name}", EXTRA_FIELDS.get(part_type, {}))
            build = f"parts_{part_type}:{name}"
            records.append(record(**{"name": f"{part_type}_{name.lower()}", "config": Empty, "build": build, **fields}))
    return records


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    classes = {"naive": "Late", "halves": "Halves", "hoards": "Hoards"}
    return [
        GradientHandlerRecord(name=f"handler_{name}", config=Empty, build=f"naive_handlers:{cls}", role="reducer")
        for name, cls in classes.items()
    ]
