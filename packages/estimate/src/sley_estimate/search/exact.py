"""Finds what a layout takes by its own steps: the seconds and the bytes that `train-cli estimate` tells."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_estimate.bytes.rank import RankBytes, rank_bytes
from sley_estimate.machine.on_machine import on_machine
from sley_estimate.search.best_first import Estimate
from sley_estimate.seconds_of_plan import PlanSeconds, estimate_both, estimate_seconds

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.search.layouts import Candidate
    from sley_estimate.search.quick import Quick


@dataclass(frozen=True)
class ExactEstimate:
    """The estimate of a layout. fullest: what the stage holds that holds most, of those that were asked."""

    plan: Plan
    seconds: PlanSeconds
    fullest: RankBytes

    @property
    def estimate(self) -> Estimate:
        """Returns seconds of the step and bytes of the stage that holds most."""
        return Estimate(self.seconds.step.seconds, self.fullest.peak)


def exact_of_plan(plan: Plan, size: int, machine: MachineFile) -> ExactEstimate:
    """Returns the estimate of a plan as it is, on `size` ranks of `machine`, with the stage that holds most. Raises PlanError
    for all that the plan's checks find, and RunError "estimate-layer" for a layer that cannot be called without values.
    """
    plan = on_machine(plan, machine)
    held, seconds = estimate_both(plan, size, machine)
    return ExactEstimate(plan, seconds, max(held, key=lambda one: one.peak))


def exact(quick: Quick, layout: Candidate, memory: int | None = None) -> ExactEstimate | None:
    """Returns the estimate of a layout, from steps of its stages without values; None if a stage needs more than `memory`
    bytes, which ends it early.

    Raises PlanError for all that the plan's checks find, "estimate-seconds" for what steps do not tell, and RunError
    "estimate-layer" for a layer that cannot be called without values.
    """
    plan = layout.plan(quick.plan, quick.world)
    if problems := check_plan(plan, quick.world):
        raise PlanError.many(problems)
    size = plan.topology(quick.world).ranks_per_stage
    fullest: RankBytes | None = None
    for stage in _asked(quick, layout):
        found = rank_bytes(plan, stage * size, quick.world)
        if memory is not None and found.peak > memory:
            return None
        fullest = found if fullest is None or found.peak > fullest.peak else fullest
    assert fullest is not None, layout
    return ExactEstimate(plan, estimate_seconds(plan, quick.world, quick.machine), fullest)


def _asked(quick: Quick, layout: Candidate) -> Sequence[int]:
    """Returns stages, the fullest first, of which one holds the most. Of those with alike layers that is the one which holds
    most at a glance: what differs between them is how many micro-batches wait for their backwards.
    """
    step, keys = quick.step(layout), quick.tables.keys(layout.shape.activations)
    found: dict[Hashable, int] = {}
    order = sorted(range(len(step.stage_bytes)), key=lambda stage: -step.stage_bytes[stage])
    for stage in order:
        found.setdefault(tuple(tuple(keys[first:last]) for first, last in step.parts.of_stage(stage)), stage)
    return list(found.values())
