"""The hooks of Sley. They assemble a run; none is called in the step loop.

Every hook is called on every rank, before the first step and without communication, except the three notifications at the end.
Hooks return records; core indexes them by kind and name, and follows the plan's order, never the order of discovery or
registration.

Compatibility: a new hook or a new trailing argument is a minor version (pluggy passes only the arguments that an implementation
names). Before a minor version removes one, an earlier version warns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from sley_core import records
    from sley_core.comm.groups import Groups
    from sley_core.comm.world import World
    from sley_core.engine.registry import ParameterRegistry
    from sley_core.model.layers import Layer
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology

PROJECT = "sley"

NOTIFICATIONS = ("sley_run_started", "sley_step_finished", "sley_run_finished")

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of the hook of its name."""


class Notified(Protocol):
    """The run of a notification: what a listener may read, and `stop`."""

    plan: Plan
    world: World
    topology: Topology
    groups: Groups
    layers: Sequence[Layer]
    registry: ParameterRegistry
    num_steps_done: int

    def stop(self) -> None:
        """Asks all ranks to stop after the step in progress."""


@hookspec
def sley_records() -> Iterable[records.Record]:  # type: ignore[empty-body]
    """Offers records that a plan's tables name by `use`: models, datasets, losses, optimizers, schedules, pools and so on.

    A record's class is its kind: `DatasetRecord` is for `[data]`, `LossRecord` for `[loss]`. Gradient handlers and scheduler
    hooks may be among them, or come from the two hooks below.

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
def sley_process_groups(plan: Plan, topology: Topology) -> Iterable[records.ProcessGroupRecord]:  # type: ignore[empty-body]
    """Lists extra process groups as lists of ranks. Core makes them on all ranks in plan order; plugins never call `new_group`.

    `parts.groups[name]` is this rank's group; a rank that is in no list has a group of itself alone.

    Called: when the topology is known and the model is built on meta
    Ranks: all, with equal results
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_process_groups(plan, topology):
            half = topology.world // 2
            return [ProcessGroupRecord("halves", (tuple(range(half)), tuple(range(half, topology.world))))]
    """


@hookspec
def sley_check_plan(plan: Plan, topology: Topology) -> Iterable[records.Problem]:  # type: ignore[empty-body]
    """Reports what is wrong with the whole resolved plan. The plan is read-only; the hook must not import torch.

    Called: after every table is valid
    Ranks: all
    May communicate: no
    Returns: problems, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_check_plan(plan, topology):
            if plan.batch.micro_size % 2:
                yield Problem(("batch", "micro_size"), "an even number is needed", hint="try 2")
    """


@hookspec
def sley_run_started(run: Notified) -> None:
    """Announces that the run is assembled and about to take its first step.

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
def sley_step_finished(run: Notified, row: Mapping[str, float | int]) -> None:
    """Announces that an optimizer step is done; `row` is what the metrics writers receive.

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
def sley_run_finished(run: Notified, outcome: str) -> None:
    """Announces the end of the run: `outcome` is `"finished"`, `"interrupted"` or `"failed"`.

    Called: once, when a run that has taken steps is closed, before groups are torn down
    Ranks: all that are alive
    May communicate: no, since others may have failed
    Returns: nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_run_finished(run, outcome):
            print(outcome)
    """
