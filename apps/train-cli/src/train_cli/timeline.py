"""Draws the pipeline's step as text before anything runs, simulated with equal costs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from sley_core.actions.costs import Costs
from sley_core.actions.draw import draw_text
from sley_core.actions.lower import lower
from sley_core.actions.simulate import simulate
from sley_core.errors import PlanError
from sley_core.plan.plan import Plan
from sley_core.topology import Topology

WIDTH = 110
"""Columns where there is no terminal that has a number of its own."""


def timeline(plan: Plan, topology: Topology) -> Iterator[str]:
    """Yields the drawing, and each stage's idle share and peak; a full backward costs two forwards.

    Raises PlanError "no-pipeline" for a plan without one, and the errors of its schedule.
    """
    if plan.pipeline is None:
        hint = 'add [pipeline] with `use = "pp.one_f_one_b"`, of sley-pp, and `pp = 2` to [parallel]'
        raise PlanError("no-pipeline", "the plan has no [pipeline], so there is no timeline to draw", hint=hint)
    schedule = plan.pipeline.build()
    micros = plan.num_micros(topology)
    try:
        placement = schedule.placement(topology.pp)
        lists = lower(schedule.lists(topology.pp, micros), placement, micros)
    except PlanError as error:
        raise plan.located(error) from None
    simulation = simulate(lists, placement, Costs.even(placement.num_positions))
    sizes = f"{_counted(topology.pp, 'stage')}, {_counted(micros, 'micro-batch', 'es')}"
    yield f"# {plan.pipeline.name}: {sizes}; F, D and W take one unit of time each, B two"
    yield draw_text(simulation.timeline, shutil.get_terminal_size((WIDTH, 24)).columns)
    for stage, held in enumerate(simulation.peaks):
        idle = simulation.timeline.idle(stage)
        yield f"  stage {stage}: idle {idle:.1%}, holds at most {_counted(held.pairs, 'micro-batch', 'es')} of a chunk"


def _counted(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"
