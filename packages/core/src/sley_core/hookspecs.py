"""The hooks of Sley, with which plugins take part in the assembly of a run.

Every rank calls every hook. The three notifications at the end of this module are called when the run starts, after each step
and when the run ends; all other hooks are called before the run starts. A hook must not communicate unless its documentation
allows it. Core identifies each record that a hook returns by the record's class and name. The parts of a run have the order of
the plan, not the order in which plugins are discovered or registered.

Compatibility: a minor version may add a hook or a trailing argument, because pluggy passes only the arguments that an
implementation declares. A hook or an argument is removed only after a version that warns about its use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from sley_core import records
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology
    from sley_trainer.run import Run

PROJECT_NAME = "sley"  # pluggy uses it to recognise the hooks of Sley

NOTIFICATION_HOOKS = ("sley_run_started", "sley_step_finished", "sley_run_finished")
"""The hooks that notify plugins of the progress of a run."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""Marks a function of a plugin as the implementation of the hook with the same name."""


@hookspec
def sley_records() -> Iterable[records.Record]:  # type: ignore[empty-body]
    """Returns the records that a plan's tables can name by `use`, such as models, datasets, losses, optimizers and schedules.

    The class of a record selects the table: `DatasetRecord` is for `[data]`, `LossRecord` for `[loss]`. Return gradient
    handlers and scheduler hooks here or from the two hooks below.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_records():
            return [
                DatasetRecord(name="lines", config=LinesConfig, build="my_plugin.lines:Lines"),
                OptimizerRecord(name="lion", config=LionConfig, build="my_plugin.lion:build"),
            ]
    """


@hookspec
def sley_gradient_handlers() -> Iterable[records.GradientHandlerRecord]:  # type: ignore[empty-body]
    """Returns the records of gradient handlers, which a `[[gradient_handlers]]` table can name.

    The builder of each record is `build(config) -> GradientHandler`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_gradient_handlers():
            return [GradientHandlerRecord(name="topk", config=Config, build="mine.topk:TopK", role="reducer", tolerance=0.1)]
    """


@hookspec
def sley_scheduler_hooks() -> Iterable[records.SchedulerHookRecord]:  # type: ignore[empty-body]
    """Returns the records of scheduler hooks, which observe every action before and after it runs.

    The builder of each record is `build(config, parts: Parts) -> SchedulerHook`.

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
def sley_process_groups(plan: Plan, topology: Topology) -> Iterable[records.ProcessGroupRecord]:  # type: ignore[empty-body]
    """Returns extra axes of process groups. All ranks create the groups, in the plan's order of plugins; plugins must not call
    `torch.distributed.new_group`.

    `parts.groups[axis]` is this rank's group on `axis`. A rank that no group contains gets a group without other ranks.

    Called: after the topology is known and the model is built on meta
    Ranks: all, with equal results
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_process_groups(plan, topology):
            half = topology.world_size // 2
            return [ProcessGroupRecord("halves", (tuple(range(half)), tuple(range(half, topology.world_size))))]
    """


@hookspec
def sley_check_plan(plan: Plan, topology: Topology) -> Iterable[records.Problem]:  # type: ignore[empty-body]
    """Returns the problems of the resolved plan, such as tables that contradict each other. Must not change the plan or import
    torch.

    Called: after all tables are validated
    Ranks: all
    May communicate: no
    Returns: problems, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_check_plan(plan, topology):
            if plan.batch.micro_size % 2:
                yield Problem(("batch", "micro_size"), "the microbatch size must be even", hint="use 2")
    """


@hookspec
def sley_run_started(run: Run) -> None:
    """Tells the plugin that the run is assembled and is about to take its first step.

    Called: once, before the first step of `Run.train` or `Run.step`
    Ranks: all
    May communicate: yes, on the groups of `run`
    Returns: nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_run_started(run):
            print("parameters:", run.registry.num_parameters)
    """


@hookspec
def sley_step_finished(run: Run, row: Mapping[str, float | int]) -> None:
    """Tells the plugin that an optimizer step is complete. row: the metrics row that the writers receive.

    Called: once per optimizer step
    Ranks: all
    May communicate: yes, on the groups of `run`
    Returns: nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_step_finished(run, row):
            if row["loss"] > 100:
                run.stop()
    """


@hookspec
def sley_run_finished(run: Run, outcome: str) -> None:
    """Tells the plugin that the run has ended. outcome: `"finished"`, `"interrupted"` or `"failed"`.

    Called: once, when a run that has taken steps is closed, before its process groups are destroyed
    Ranks: all living ranks
    May communicate: no, since other ranks may have failed
    Returns: nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_run_finished(run, outcome):
            print(outcome)
    """
