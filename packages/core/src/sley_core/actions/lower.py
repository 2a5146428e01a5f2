"""Turns compute-only lists into what each rank executes: checks them together, adds transfers and marks.

    generator ──> lists of F B D W ──> check ──> send after each action that makes something for another stage
                                                 run once in simulated time: does it end?
                                                 post each receive ahead of the action that takes it
                                                 mark each chunk whose gradients are complete ──> lowered lists

`lower` refuses lists that are not a valid step, so that readers of lowered lists need not check them.
"""

from __future__ import annotations

from collections.abc import Sequence

from sley_core.actions.action import GRADIENT_KINDS, Action, Kind, Lowered, Placement, Step, Transfer
from sley_core.actions.check import check_lists
from sley_core.actions.costs import Costs
from sley_core.actions.posts import AHEAD, order_of, posts_of, send_of
from sley_core.actions.simulate import Delivery, Machine, given


def lower(
    lists: Sequence[Sequence[Action]],
    placement: Placement,
    micros: int,
    *,
    training: bool = True,
) -> list[Lowered]:
    """Returns one lowered list per stage. Pure: every rank computes all of them and gets the same result.

    lists: each stage's compute actions over its chunks and `micros` micro-batches. training: whether every forward must
    have its backward, full or split; if False there must be none.

    An action is followed by the send of its result, then by posts, then by CHUNK_DONE if it was its chunk's last
    gradient action. Raises PlanError: "schedule-wrong" with the first bad action and its place, "schedule-deadlock"
    with what each blocked stage waits for.
    """
    check_lists(lists, placement, micros, training=training)
    made = [_made(actions, stage, placement) for stage, actions in enumerate(lists)]
    sends = [
        [send_of(action, one, stage, placement) for action, one in zip(actions, ones, strict=True)]
        for stage, (actions, ones) in enumerate(zip(lists, made, strict=True))
    ]
    machine = Machine(
        list(map(_with_sends, lists, sends)), placement, Costs.even(placement.num_positions), posted=False
    )
    machine.run()
    order = order_of(machine.sent_s)
    every = enumerate(zip(lists, made, sends, strict=True))
    return [_lowered(actions, ones, sent, stage, placement, order) for stage, (actions, ones, sent) in every]


def _made(actions: Sequence[Action], stage: int, placement: Placement) -> list[Delivery | None]:
    """Returns what each of the stage's actions makes for a neighbouring chunk; None if it makes nothing."""
    positions = placement.positions(stage)
    return [given(action, positions[action.chunk], placement) for action in actions]


def _with_sends(actions: Sequence[Action], sends: Sequence[Transfer | None]) -> list[Step]:
    """Returns the actions, each followed by its entry of `sends`: the send of its result if another stage needs it."""
    steps: list[Step] = []
    for action, send in zip(actions, sends, strict=True):
        steps += (action,) if send is None else (action, send)
    return steps


def _lowered(
    actions: Sequence[Action],
    made: Sequence[Delivery | None],
    sends: Sequence[Transfer | None],
    stage: int,
    placement: Placement,
    order: dict[Delivery, int],
) -> Lowered:
    """Returns one stage's actions with sends, posts and CHUNK_DONE marks. made: what each action makes. sends: of that, if
    another stage needs it. order: of all transfers, the same on all stages.
    """
    posts = posts_of(actions, made, stage, placement, order, AHEAD)
    last = {action.chunk: number for number, action in enumerate(actions) if action.kind in GRADIENT_KINDS}
    steps: list[Step] = [*posts.get(0, ())]
    for number, (action, send) in enumerate(zip(actions, sends, strict=True)):
        steps.append(action)
        if send is not None:
            steps.append(send)
        steps += posts.get(number + 1, ())
        if last.get(action.chunk) == number:
            steps.append(Action(Kind.CHUNK_DONE, action.chunk))
    return tuple(steps)
