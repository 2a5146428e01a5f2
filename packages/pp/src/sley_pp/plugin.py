"""What the plugin `pp` has."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, PartitionerRecord, ScheduleRecord
from sley_pp import config

LINK = "sley_pp.link:Link"


@hookimpl
def sley_schedules() -> list[ScheduleRecord]:
    return [
        ScheduleRecord(
            name="one_f_one_b",
            config=config.OneFOneBConfig,
            build="sley_pp.schedules.build:build_one_f_one_b",
            link=LINK,
            summary="One forward, one backward; holds at most as many micro-batches as there are stages.",
        ),
        ScheduleRecord(
            name="gpipe",
            config=config.GPipeConfig,
            build="sley_pp.schedules.build:build_gpipe",
            link=LINK,
            summary="All forwards, then all backwards.",
        ),
        ScheduleRecord(
            name="interleaved",
            config=config.InterleavedConfig,
            build="sley_pp.schedules.build:build_interleaved",
            link=LINK,
            summary="1F1B over several parts of the model per stage; a smaller bubble, more transfers.",
        ),
        ScheduleRecord(
            name="zero_bubble_h1",
            config=config.ZeroBubbleH1Config,
            build="sley_pp.schedules.build:build_zero_bubble_h1",
            link=LINK,
            summary="1F1B with weight gradients in its bubble: a third of it is left.",
        ),
        ScheduleRecord(
            name="zero_bubble_v",
            config=config.ZeroBubbleVConfig,
            build="sley_pp.schedules.build:build_zero_bubble_v",
            link=LINK,
            summary="Two parts of the model per stage in a V, weight gradients in the bubble: almost none is left.",
        ),
        ScheduleRecord(
            name="csv",
            config=config.CsvConfig,
            build="sley_pp.schedules.build:build_csv",
            link=LINK,
            summary="A schedule from a file, in the form of torch.distributed.pipelining.",
        ),
    ]


@hookimpl
def sley_partitioners() -> list[PartitionerRecord]:
    return [
        PartitionerRecord(
            name="uniform",
            config=config.UniformConfig,
            build="sley_pp.partition.build:build_uniform",
            summary="Equal numbers of layers.",
        ),
        PartitionerRecord(
            name="balanced",
            config=config.BalancedConfig,
            build="sley_pp.partition.build:build_balanced",
            summary="The heaviest part as light as can be, by parameters or by given costs.",
        ),
        PartitionerRecord(
            name="measured",
            config=config.MeasuredConfig,
            build="sley_pp.partition.build:build_balanced",
            costs="seconds",
            summary="The slowest part as fast as can be, by a timed forward and backward of each layer.",
        ),
        PartitionerRecord(
            name="explicit",
            config=config.ExplicitConfig,
            build="sley_pp.partition.build:build_explicit",
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
            after=("reducer",),
            summary="Sums the gradients of parameters that several stages hold.",
        )
    ]
