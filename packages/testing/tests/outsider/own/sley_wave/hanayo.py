"""A schedule in waves: microbatches go up all stages and down again, once more for each further wave.

stage     0   1   2                    a wave of three stages, like 1F1B with the furthest microbatch first
chunk 0   0 > 1 > 2
chunk 1   5 < 4 < 3
"""

from sley_core.api.actions import Action, Delivery, Kind, Placement, Schedule
from sley_core.errors import PlanError
from sley_wave.plugin import HanayoConfig


def build(config: HanayoConfig) -> Schedule:
    return Schedule(hanayo, chunks=2 * config.waves, place=wave)


def wave(stages: int, chunks: int) -> Placement:
    """Returns the placement up, down, up, ...: neighbours are on adjacent stages or, where a wave turns, on the same stage."""
    up, down = tuple(range(stages)), tuple(reversed(range(stages)))
    return Placement(tuple(stage for chunk in range(chunks) for stage in (down if chunk % 2 else up)))


def hanayo(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """Returns the action list of each stage. At most as many microbatches as stages are in flight."""
    if chunks % 2:
        message = f"`wave.hanayo` needs an even number of chunks, not {chunks}"
        raise PlanError("schedule-chunks", message, path=("pipeline", "waves"))
    placement = wave(stages, chunks)
    by_priority = [
        Action(kind, chunk, micro)
        for kind in (Kind.BACKWARD, Kind.FORWARD)
        for micro in range(micros)
        for chunk in reversed(range(chunks))
    ]
    pending = [list(by_priority) for _ in range(stages)]
    lists: list[list[Action]] = [[] for _ in range(stages)]
    delivered: set[Delivery] = set()
    num_in_flight = 0

    def is_ready(action: Action, stage: int) -> bool:
        delivery = placement.input_of(action, placement.position(stage, action.chunk))
        if delivery is not None:
            return delivery in delivered
        if action.kind is Kind.BACKWARD:  # of the last position
            return Action(Kind.FORWARD, action.chunk, action.micro) in lists[stage]
        return num_in_flight < stages

    while any(pending):  # each stage executes at most one action at a time
        deliveries: set[Delivery | None] = set()
        for stage, actions in enumerate(pending):
            if (action := next((action for action in actions if is_ready(action, stage)), None)) is not None:
                actions.remove(action)
                lists[stage].append(action)
                position = placement.position(stage, action.chunk)
                if position == 0:
                    num_in_flight += 1 if action.kind is Kind.FORWARD else -1
                deliveries.add(placement.output_of(action, position))
        delivered |= deliveries - {None}
    return lists
