"""Declares the records of the plugin `pp`."""

from __future__ import annotations

from typing import Any

from sley_core.api.plan import Table
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, PartitionerRecord, Record, ScheduleRecord, StageLinkRecord
from sley_pp import config


def _schedule_record(name: str, table: type[Table], summary: str) -> ScheduleRecord:
    return ScheduleRecord(
        name=name,
        config=table,
        build=f"sley_pp.schedules:build_{name}",
        link="pp.link",
        partition="pp.balanced",
        ties="pp.shared_modules",
        summary=summary,
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
        _schedule_record(
            "one_f_one_b",
            config.OneFOneBConfig,
            "Alternates forwards and backwards; holds at most as many microbatches as there are stages.",
        ),
        _schedule_record("gpipe", config.GPipeConfig, "All forwards, then all backwards."),
        _schedule_record(
            "interleaved",
            config.InterleavedConfig,
            "1F1B over several model chunks per stage, with a smaller bubble and more transfers.",
        ),
        _schedule_record(
            "zero_bubble_h1", config.ZeroBubbleH1Config, "1F1B with weight gradients in its bubble, which shrinks to a third."
        ),
        _schedule_record(
            "zero_bubble_v",
            config.ZeroBubbleVConfig,
            "Two model chunks per stage in a V, with weight gradients in the bubble, which almost vanishes.",
        ),
        _schedule_record("csv", config.CsvConfig, "A schedule from a CSV file of torch.distributed.pipelining."),
        StageLinkRecord(
            name="link",
            config=config.LinkConfig,
            build="sley_pp.link:Link",
            summary="Point-to-point messages with receives posted ahead, over one communicator per direction.",
        ),
        PartitionerRecord(
            name="uniform",
            config=config.UniformConfig,
            build="sley_pp.partitioners:build_uniform",
            summary="Equal numbers of layers.",
        ),
        PartitionerRecord(
            name="balanced",
            config=config.BalancedConfig,
            build="sley_pp.partitioners:build_balanced",
            summary="The heaviest part as light as possible, by parameters or by costs in the plan.",
        ),
        PartitionerRecord(
            name="measured",
            config=config.MeasuredConfig,
            build="sley_pp.partitioners:build_balanced",
            timer="sley_estimate.calibrate.bench:layer_seconds",
            summary="The slowest part as fast as possible, by measured times of each layer.",
        ),
        PartitionerRecord(
            name="explicit",
            config=config.ExplicitConfig,
            build="sley_pp.partitioners:build_explicit",
            summary="The numbers of layers in the plan.",
        ),
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
            summary="Sums the gradients of parameters that several stages hold.",
        )
    ]
