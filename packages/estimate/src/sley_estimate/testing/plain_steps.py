"""Makes programs of a schedule's lists and of seconds of layers, without a plan: for tests and benchmarks of the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sley_core.actions.action import Action, Kind, Transfer
from sley_core.actions.simulate import taken
from sley_estimate.recorded.programs import message_exchange
from sley_estimate.seconds.program import Await, Begin, Compute, Word
from sley_estimate.seconds.result import StepSeconds, simulate_programs

if TYPE_CHECKING:
    from sley_core.actions.action import Lowered, Placement
    from sley_estimate.seconds.layer_seconds import LayerSeconds
    from sley_estimate.seconds.links import Cost


def plain_step(
    lists: Sequence[Lowered],
    placement: Placement,
    parts: Sequence[Sequence[LayerSeconds]],
    messages: Sequence[Cost],
    behind: Mapping[int, Sequence[Word]] | None = None,
) -> StepSeconds:
    """Returns the simulated step of lowered lists.

    parts: the layers of each position of the model. messages: the cost of what passes between position i and i + 1. behind: the
    words that end the programs of stages. Raises PlanError "schedule-deadlock" for lists that come to a stop.
    """
    programs = []
    for stage, steps in enumerate(lists):
        words: list[Word] = []
        for step in steps:
            if isinstance(step, Transfer):
                words.append(Begin(message_exchange(step, stage, placement, messages.__getitem__)))
            elif isinstance(step, Action) and step.kind is not Kind.CHUNK_DONE:
                position = placement.position(stage, step.chunk)
                needed = taken(step, position, placement)
                if needed is not None and placement.holder(needed.origin).stage != stage:
                    words.append(Await(needed))
                seconds = sum(layer.of(step.kind) for layer in parts[position])
                words.append(Compute(seconds, step, sum(layer.host_of(step.kind) for layer in parts[position])))
        programs.append([*words, *(behind or {}).get(stage, ())])
    return simulate_programs(programs)
