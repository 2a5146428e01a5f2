"""The plan tables and records of the plugin `pp`. Imports no torch."""

from typing import Annotated, Any

from pydantic import Field, PositiveInt

from sley_core.api.plan import Array, PlanPath, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, PartitionerRecord, Record, ScheduleRecord, StageLinkRecord


class GPipeConfig(Table):
    """Runs all forwards, then all backwards. Keeps the activations of all microbatches of a step in memory."""


class OneFOneBConfig(Table):
    """Alternates forwards and backwards. It is as fast as GPipe, but a stage keeps the activations of at most as many
    microbatches as there are stages.
    """


class InterleavedConfig(Table):
    """Runs 1F1B over several model chunks per stage. With n chunks per stage, the bubble is 1/n as long, but the stages
    exchange about n times as many messages.
    """

    chunks: Annotated[int, Field(ge=2)] = 2
    """The number of model chunks per stage. With P stages, stage s holds the chunks s, s + P, s + 2P, ... of the model."""


class ZeroBubbleH1Config(Table):
    """Runs 1F1B, but computes weight gradients in idle time. It has a third of 1F1B's bubble and needs as much memory."""


class ZeroBubbleVConfig(Table):
    """Runs two model chunks per stage, placed in a V, and computes weight gradients in idle time. It has almost no bubble."""


class CsvConfig(Table):
    """Runs a schedule from a CSV file in the format of torch.distributed.pipelining."""

    file: PlanPath
    """The CSV file, with one row per stage and one cell per action, such as `0F0`, `0B0`, `0I0` or `0W0`."""


class LinkConfig(Table):
    """Sends tensors between stages as point-to-point messages. Receives are posted before the stage needs them."""


class UniformPartitionConfig(Table):
    """Cuts the model into parts whose numbers of layers differ by at most one."""


class BalancedPartitionConfig(Table):
    """Cuts the model so that the cost of the most expensive part is minimal."""

    layer_costs: Array[Annotated[float, Field(ge=0)]] | None = None
    """The cost of each layer, in any unit; by default, its number of parameters."""


class MeasuredPartitionConfig(Table):
    """Cuts the model so that the slowest part is as fast as possible, according to the measured time of each layer."""

    layer_costs: Array[Annotated[float, Field(ge=0)]] | None = None
    """The time of each layer in seconds. By default, the run measures it at its start and writes it into its plan."""


class ExplicitPartitionConfig(Table):
    """Cuts the model into parts of explicit sizes."""

    layers: Annotated[Array[PositiveInt], Field(min_length=1)]
    """The number of layers in each part, in the model's order."""


class SharedModulesConfig(Table):
    """Sums the gradients of parameters that several stages hold, so that the copies of each parameter stay equal."""


def _schedule_record(name: str, table: type[Table]) -> ScheduleRecord:
    build = "sley_pp.schedules:build_csv" if table is CsvConfig else "sley_pp.schedules:build"
    return ScheduleRecord(name=name, config=table, build=build, ties="pp.shared_modules")


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    """Returns the keys with which a search for a layout tries each schedule; {} stands for the defaults."""
    return {
        "pp.one_f_one_b": {"variants": [{}]},
        "pp.interleaved": {"variants": [{"chunks": 2}, {"chunks": 4}]},
        "pp.zero_bubble_h1": {"variants": [{}]},
        "pp.zero_bubble_v": {"variants": [{}]},
    }


@hookimpl
def sley_records() -> list[Record]:
    return [
        _schedule_record("one_f_one_b", OneFOneBConfig),
        _schedule_record("gpipe", GPipeConfig),
        _schedule_record("interleaved", InterleavedConfig),
        _schedule_record("zero_bubble_h1", ZeroBubbleH1Config),
        _schedule_record("zero_bubble_v", ZeroBubbleVConfig),
        _schedule_record("csv", CsvConfig),
        StageLinkRecord(name="link", config=LinkConfig, build="sley_pp.link:Link"),
        PartitionerRecord(name="uniform", config=UniformPartitionConfig, build="sley_pp.schedules:build_uniform"),
        PartitionerRecord(name="balanced", config=BalancedPartitionConfig, build="sley_pp.schedules:build_balanced"),
        PartitionerRecord(
            name="measured",
            config=MeasuredPartitionConfig,
            build="sley_pp.schedules:build_balanced",
            timer="sley_estimate.calibrate.bench:layer_seconds",
        ),
        PartitionerRecord(name="explicit", config=ExplicitPartitionConfig, build="sley_pp.schedules:build_explicit"),
    ]


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="shared_modules",
            config=SharedModulesConfig,
            build="sley_pp.shared:SharedModules",
            role="tie",
            accepts_shards=True,
            fixed_order=True,  # sums have two terms, whose order does not matter; the model's check refuses more
            after=("reducer",),
        )
    ]
