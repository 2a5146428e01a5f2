"""The plugin `naive`: the simplest part of a kind that holds its contract, and some that are broken, one fault each."""

from __future__ import annotations

from sley_core.api.plan import SequenceConfig, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, Record, SequenceAttentionRecord, WeightCommunicatorRecord

REDUCERS = ("Late", "Halves", "Hoards")
WRONG_REDUCERS = (
    "Mean",
    "World",
    "Early",
    "Tail",
    "Reverse",
    "Twice",
    "Chatty",
    "Types",
    "Noisy",
    "Apart",
    "Coarse",
    "Watches",
)
INEXACT = ("Noisy", "Apart", "Coarse")
WEIGHTS = ("Naive", "Mean", "Own", "Cached", "Eager", "Left", "Shards", "Hoards")
ATTENTIONS = ("Naive", "Local", "Unsummed", "Together", "Stays", "Silent")


class Nothing(Table):
    """A table without keys."""


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    early = "naive_handlers:Early"
    return [
        GradientHandlerRecord(name="early", config=Nothing, build=early, role="observer", before=("reducer",)),
        *(
            GradientHandlerRecord(name=name.lower(), config=Nothing, build=f"naive_handlers:{name}", role="reducer")
            for name in REDUCERS
        ),
        *(
            GradientHandlerRecord(
                name=name.lower() if name != "Early" else "too_early",
                config=Nothing,
                build=f"wrong_handlers:{name}",
                role="reducer",
                exact=name not in INEXACT,
                tolerance=2**-6,
            )
            for name in WRONG_REDUCERS
        ),
    ]


@hookimpl
def sley_records() -> list[Record]:
    return [
        *[WeightCommunicatorRecord(name=name.lower(), config=Nothing, build=f"naive_weights:{name}") for name in WEIGHTS],
        *[
            SequenceAttentionRecord(name=name.lower(), config=SequenceConfig, build=f"naive_attention:{name}")
            for name in ATTENTIONS
        ],
    ]
