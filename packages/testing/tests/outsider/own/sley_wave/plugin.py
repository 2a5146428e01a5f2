"""What the plugin `wave` has: all that a pipeline needs."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, PartitionerRecord, Record, ScheduleRecord, StageLinkRecord
from sley_wave import config


@hookimpl
def sley_records() -> list[Record]:
    parts = {"link": "wave.link", "partition": "wave.even", "ties": "wave.ties"}
    return [
        ScheduleRecord(name="hanayo", config=config.HanayoConfig, build="sley_wave.hanayo:build", **parts),
        StageLinkRecord(name="link", config=config.LinkConfig, build="sley_wave.link:Link"),
        PartitionerRecord(name="even", config=config.EvenConfig, build="sley_wave.even:build"),
    ]


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    build = "sley_wave.ties:Ties"
    return [GradientHandlerRecord(name="ties", config=config.TiesConfig, build=build, role="tie", after=("reducer",))]
