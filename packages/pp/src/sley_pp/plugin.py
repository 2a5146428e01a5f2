"""Declares the records of the plugin `pp`."""

from __future__ import annotations

from typing import Any

from sley_core.api.plan import Table
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, PartitionerRecord, Record, ScheduleRecord, StageLinkRecord
from sley_pp import config


def _schedule_record(name: str, table: type[Table]) -> ScheduleRecord:
    return ScheduleRecord(
        name=name,
        config=table,
        build="sley_pp.schedules:build_csv" if table is config.CsvConfig else "sley_pp.schedules:build",
        link="pp.link",
        partition="pp.balanced",
        ties="pp.shared_modules",
    )


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    return {
        "pp.one_f_one_b": {"variants": [{}]},
        "pp.interleaved": {"variants": [{"chunks": 2}, {"chunks": 4}]},
        "pp.zero_bubble_h1": {"variants": [{}]},
        "pp.zero_bubble_v": {"variants": [{}]},
    }


@hookimpl
def sley_records() -> list[Record]:
    return [
        _schedule_record("one_f_one_b", config.OneFOneBConfig),
        _schedule_record("gpipe", config.GPipeConfig),
        _schedule_record("interleaved", config.InterleavedConfig),
        _schedule_record("zero_bubble_h1", config.ZeroBubbleH1Config),
        _schedule_record("zero_bubble_v", config.ZeroBubbleVConfig),
        _schedule_record("csv", config.CsvConfig),
        StageLinkRecord(name="link", config=config.LinkConfig, build="sley_pp.link:Link"),
        PartitionerRecord(name="uniform", config=config.UniformConfig, build="sley_pp.partitioners:build_uniform"),
        PartitionerRecord(name="balanced", config=config.BalancedConfig, build="sley_pp.partitioners:build_balanced"),
        PartitionerRecord(
            name="measured",
            config=config.MeasuredConfig,
            build="sley_pp.partitioners:build_balanced",
            timer="sley_estimate.calibrate.bench:layer_seconds",
        ),
        PartitionerRecord(name="explicit", config=config.ExplicitConfig, build="sley_pp.partitioners:build_explicit"),
    ]


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="shared_modules",
            config=config.SharedModulesConfig,
            build="sley_pp.shared:SharedModules",
            role="tie",
            accepts_shards=True,
            fixed_order=True,  # sums have two terms, whose order does not matter; the model's check refuses more
            after=("reducer",),
        )
    ]
