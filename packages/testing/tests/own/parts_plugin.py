"""The plugin `parts`: of each kind the simplest part that holds its contract, and some that are broken, one fault each."""

from __future__ import annotations

from typing import Any

from sley_core.api.plan import SequenceConfig, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import (
    GradientHandlerRecord,
    LRScheduleRecord,
    MemoryPoolRecord,
    MetricsWriterRecord,
    OffloadManagerRecord,
    Record,
    SchedulerHookRecord,
    SequenceAttentionRecord,
    WeightCommunicatorRecord,
)


class Nothing(Table):
    """A table without keys."""


MOVED = ("weights", "buffers", "masters", "optimizer_states")
PARTS: dict[str, tuple[type[Record], str]] = {
    "hook": (SchedulerHookRecord, "Naive Scales Keeps Asks Differs Unbalanced Asked Hooked"),
    "learning_rate": (LRScheduleRecord, "naive counting negative short nothing none"),
    "offload": (OffloadManagerRecord, "Naive Careless Skips Open Vague Twice Stays Half Silent"),
    "pool": (MemoryPoolRecord, "Naive Shared Elements Inferred Hoards Loses Counts Frees Keeps Silent Again"),
    "sequence": (SequenceAttentionRecord, "Naive Local Unsummed Together Stays Silent"),
    "weights": (WeightCommunicatorRecord, "Naive Mean Own Cached Eager Left Shards Hoards"),
    "writer": (MetricsWriterRecord, "Naive Begins First Whole Late Deaf Eager Once Mute Strict"),
}
"""By kind: its record, and the names of its parts in the module `parts_KIND`."""

MORE: dict[str, dict[str, Any]] = {"offload": {"parts": lambda _: MOVED}, "sequence": {"config": SequenceConfig}}
"""What records of a kind say besides."""


def records(kind: str) -> list[Any]:
    record, names = PARTS[kind]
    return [
        record(**{"name": f"{kind}_{name.lower()}", "config": Nothing, "build": f"parts_{kind}:{name}", **MORE.get(kind, {})})
        for name in names.split()
    ]


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    inexact = {"Noisy": 2**-6, "Apart": 2**-6, "Coarse": 2**-6}
    right = {"Naive": "Late", "Halves": "Halves", "Hoards": "Hoards"}
    wrong = "Mean World Early Tail Reverse Twice Chatty Types Watches Noisy Apart Coarse"
    builds = {name: f"naive_handlers:{of}" for name, of in right.items()}
    builds |= {name: f"parts_handler:{name}" for name in wrong.split()}
    early = "naive_handlers:Early"
    return [
        GradientHandlerRecord(name="handler_before", config=Nothing, build=early, role="observer", before=("reducer",)),
        *(
            GradientHandlerRecord(
                name=f"handler_{name.lower()}",
                config=Nothing,
                build=build,
                role="reducer",
                exact=name not in inexact,
                tolerance=inexact.get(name, 0.0),
            )
            for name, build in builds.items()
        ),
    ]


@hookimpl
def sley_records() -> list[Record]:
    return [record for kind in PARTS if kind != "hook" for record in records(kind)]


@hookimpl
def sley_scheduler_hooks() -> list[SchedulerHookRecord]:
    return records("hook")
