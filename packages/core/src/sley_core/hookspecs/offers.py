"""Hooks through which a plugin offers what a plan can name: they return records, and a table's `use` names one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from sley_core import records


@hookspec
def sley_models() -> Iterable[records.ModelRecord]:  # type: ignore[empty-body]
    """Offers models that `[model] use` can name.

    `build(config, data: DataInfo) -> layers`. Parameters take no memory while it runs: writes to them are recorded and
    replayed on the ranks that own them. Buffers keep their values.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_models():
            return [ModelRecord(name="tiny", config=TinyConfig, build="my_plugin.tiny:layers")]
    """


@hookspec
def sley_datasets() -> Iterable[records.DatasetRecord]:  # type: ignore[empty-body]
    """Offers datasets that `[data] use` can name.

    `build(config, context: DataContext) -> Dataset`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_datasets():
            return [DatasetRecord(name="lines", config=LinesConfig, build="my_plugin.lines:Lines")]
    """


@hookspec
def sley_losses() -> Iterable[records.LossRecord]:  # type: ignore[empty-body]
    """Offers losses that `[loss] use` can name.

    `build(config) -> Loss`: a weight from the batch alone, and a sum.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_losses():
            return [LossRecord(name="focal", config=FocalConfig, build="my_plugin.focal:FocalLoss")]
    """


@hookspec
def sley_optimizers() -> Iterable[records.OptimizerRecord]:  # type: ignore[empty-body]
    """Offers optimizers that `[optimizer] use` can name.

    `build(config, groups, device) -> torch.optim.Optimizer`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_optimizers():
            return [OptimizerRecord(name="lion", config=LionConfig, build="my_plugin.lion:build")]
    """


@hookspec
def sley_lr_schedules() -> Iterable[records.LRScheduleRecord]:  # type: ignore[empty-body]
    """Offers learning-rate schedules that `[learning_rate] use` can name.

    `build(config, num_steps) -> factor(step)`: the factor on every learning rate.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_lr_schedules():
            return [LRScheduleRecord(name="sqrt", config=SqrtConfig, build="my_plugin.sqrt:build")]
    """


@hookspec
def sley_partitioners() -> Iterable[records.PartitionerRecord]:  # type: ignore[empty-body]
    """Offers partitioners, which cut a list of layers into pipeline stages.

    `build(config) -> partition(costs, num_chunks)`; the record declares whether costs are parameters or seconds.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_partitioners():
            return [PartitionerRecord(name="by_hand", config=HandConfig, build="my_plugin.cut:build")]
    """


@hookspec
def sley_schedules() -> Iterable[records.ScheduleRecord]:  # type: ignore[empty-body]
    """Offers pipeline schedules: pure functions that make one list of actions per stage.

    `build(config) -> Schedule`: a generator of lists, and the placement of chunks.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_schedules():
            return [ScheduleRecord(name="mine", config=MineConfig, build="my_plugin:mine", partition="my_plugin.even")]
    """


@hookspec
def sley_stage_links() -> Iterable[records.StageLinkRecord]:  # type: ignore[empty-body]
    """Offers stage links, which carry outputs and their gradients between pipeline stages, for `[link] use`.

    `build(config) -> StageLink`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_stage_links():
            return [StageLinkRecord(name="link", config=LinkConfig, build="my_plugin.link:Link")]
    """


@hookspec
def sley_gradient_handlers() -> Iterable[records.GradientHandlerRecord]:  # type: ignore[empty-body]
    """Offers gradient handlers that a `[[gradient_handlers]]` table can name.

    `build(config) -> GradientHandler`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_gradient_handlers():
            return [
                GradientHandlerRecord(
                    name="topk", config=TopKConfig, build="my_plugin.topk:TopK", role="reducer", exact=False, tolerance=0.1
                )
            ]
    """


@hookspec
def sley_scheduler_hooks() -> Iterable[records.SchedulerHookRecord]:  # type: ignore[empty-body]
    """Offers scheduler hooks: objects that are called before and after every action.

    `build(config, parts: Parts) -> SchedulerHook`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_scheduler_hooks():
            return [SchedulerHookRecord(name="spy", config=SpyConfig, build="my_plugin.spy:Spy")]
    """


@hookspec
def sley_weight_communicators() -> Iterable[records.WeightCommunicatorRecord]:  # type: ignore[empty-body]
    """Offers weight communicators, which shard weights and gather them just before use.

    `build(config) -> WeightCommunicator`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_weight_communicators():
            return [WeightCommunicatorRecord(name="ring", config=RingConfig, build="my_plugin.ring:Ring")]
    """


@hookspec
def sley_sequence_attentions() -> Iterable[records.SequenceAttentionRecord]:  # type: ignore[empty-body]
    """Offers attentions over sequences that are split across ranks.

    `build(config, group) -> SequenceCommunicator`: changes a model's attention to work on slices.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_sequence_attentions():
            return [SequenceAttentionRecord(name="ring", config=RingConfig, build="my_plugin.ring:Ring")]
    """


@hookspec
def sley_metrics_writers() -> Iterable[records.MetricsWriterRecord]:  # type: ignore[empty-body]
    """Offers metrics writers, which receive one row per step.

    `build(config, folder: Path) -> MetricsWriter`, on rank 0 only.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_metrics_writers():
            return [MetricsWriterRecord(name="csv", config=CsvConfig, build="my_plugin.csv:Csv")]
    """
