"""Builds the schedule of a plan's `[pipeline]` table."""

from __future__ import annotations

from sley_core.api.actions import Action, Placement, Schedule, v
from sley_core.errors import PlanError
from sley_pp.config import (
    CsvConfig,
    GPipeConfig,
    InterleavedConfig,
    OneFOneBConfig,
    ZeroBubbleH1Config,
    ZeroBubbleVConfig,
)
from sley_pp.schedules.csv import read_file
from sley_pp.schedules.gpipe import gpipe
from sley_pp.schedules.interleaved import interleaved
from sley_pp.schedules.one_f_one_b import one_f_one_b
from sley_pp.schedules.zero_bubble_h1 import zero_bubble_h1
from sley_pp.schedules.zero_bubble_v import zero_bubble_v


def build_gpipe(config: GPipeConfig) -> Schedule:
    """Returns the GPipe schedule."""
    return Schedule(gpipe)


def build_one_f_one_b(config: OneFOneBConfig) -> Schedule:
    """Returns the 1F1B schedule."""
    return Schedule(one_f_one_b)


def build_interleaved(config: InterleavedConfig) -> Schedule:
    """Returns the interleaved schedule with the table's number of chunks per stage."""
    return Schedule(interleaved, config.chunks)


def build_zero_bubble_h1(config: ZeroBubbleH1Config) -> Schedule:
    """Returns the ZB-H1 schedule."""
    return Schedule(zero_bubble_h1)


def build_zero_bubble_v(config: ZeroBubbleVConfig) -> Schedule:
    """Returns the ZB-V schedule, with two chunks per stage in a V."""
    return Schedule(zero_bubble_v, chunks=2, place=v)


def build_csv(config: CsvConfig) -> Schedule:
    """Returns the schedule of a file, which fits one number of stages and of micro-batches.

    It raises PlanError "schedule-file" for other numbers, and for a file that cannot be read.
    """
    placement, lists = read_file(config.file)
    micros = 1 + max(action.micro for actions in lists for action in actions)

    def place(stages: int, chunks: int) -> Placement:
        if stages != placement.stages:
            raise wrong(f"{placement.stages} stages", f"{stages}")
        return placement

    def only(stages: int, chunks: int, wanted: int) -> list[list[Action]]:
        if (stages, wanted) != (placement.stages, micros):
            raise wrong(f"{placement.stages} stages and {micros} micro-batches", f"{stages} and {wanted}")
        return lists

    def wrong(has: str, plan_has: str) -> PlanError:
        message = f"the schedule {config.file} is for {has}, but the plan has {plan_has}"
        return PlanError("schedule-file", message, path=("pipeline", "file"))

    return Schedule(only, placement.chunks, place)
