"""Declares the records of the plugin `pp`."""

from __future__ import annotations

from typing import Any

from sley_core.api.plan import Table
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, PartitionerRecord, Record, ScheduleRecord, StageLinkRecord
from sley_pp import config


def _schedule(name: str, table: type[Table], summary: str) -> ScheduleRecord:
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
        _schedule(
            "one_f_one_b",
            config.OneFOneBConfig,
            "One forward, one backward; holds at most as many micro-batches as there are stages.",
        ),
        _schedule("gpipe", config.GPipeConfig, "All forwards, then all backwards."),
        _schedule(
            "interleaved",
            config.InterleavedConfig,
            "1F1B over several parts of the model per stage; a smaller bubble, more transfers.",
        ),
        _schedule(
            "zero_bubble_h1", config.ZeroBubbleH1Config, "1F1B with weight gradients in its bubble: a third of it is left."
        ),
        _schedule(
            "zero_bubble_v",
            config.ZeroBubbleVConfig,
            "Two parts of the model per stage in a V, weight gradients in the bubble: almost none is left.",
        ),
        _schedule("csv", config.CsvConfig, "A schedule from a file, in the form of torch.distributed.pipelining."),
        StageLinkRecord(
            name="link",
            config=config.LinkConfig,
            build="sley_pp.link:Link",
            summary="Messages posted before they are sent, a communicator for each direction along the stages.",
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
            summary="The heaviest part as light as can be, by parameters or by given costs.",
        ),
        PartitionerRecord(
            name="measured",
            config=config.MeasuredConfig,
            build="sley_pp.partitioners:build_balanced",
            timer="sley_estimate.calibrate.bench:layer_seconds",
            summary="The slowest part as fast as can be, by a timed forward and backward of each layer.",
        ),
        PartitionerRecord(
            name="explicit",
            config=config.ExplicitConfig,
            build="sley_pp.partitioners:build_explicit",
            summary="Numbers of layers as written in the plan.",
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
            takes_shards=True,
            fixed_order=True,  # two terms, whose order does not matter: the model's check refuses more
            after=("reducer",),
            summary="Sums the gradients of parameters that several stages hold.",
        )
    ]
