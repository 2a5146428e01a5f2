"""Lowers compute-only lists to the lists that ranks execute: checks them, and adds transfers and CHUNK_DONE entries.

    generator ──> lists of F B I W ──> check ──> add a send after each action whose result another stage needs
                                                 run once in simulated time: does it end?
                                                 post each receive ahead of the action that needs it
                                                 mark each chunk whose gradients are complete ──> lowered lists

`lower` refuses lists that are not a valid step, so that readers of lowered lists need not check them.

All transfers in one direction, up or down the stages, have one order, the same for all stages: the order in which they would be
sent if a forward took one unit of time and a full backward two. Each stage issues its sends and posts in that order. So however
a backend matches the ends (by tag, by order per pair of stages, or by order per communicator), the first unfinished transfer of
the order is the next one at both of its ends, and no two ends can wait for each other.

A post precedes the first action that needs a later transfer in either direction. Otherwise a stage with several neighbours in
one direction could deadlock, because its late receive would block a message for which the stage itself waits. Within these
limits a receive is posted `NUM_AHEAD` actions before its use: early enough that no send waits, and late enough that few buffers
are in use.

    stage 1 of 4, 1F1B, without its sends (post F: an output of stage 0, post B: a gradient of stage 2)

    post F0 F1 B0 > F0.0 > post F2 > F0.1 > post F3 > F0.2 > B0.0 > post B1 > F0.3 > B0.1 > ...
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from sley_core.actions.action import (
    Action,
    Delivery,
    Direction,
    Flow,
    Kind,
    LoweredList,
    Placement,
    Step,
    Transfer,
    direction_of,
)
from sley_core.actions.simulate import Costs, ScheduleSimulator
from sley_core.errors import PlanError

NEEDED_KIND = {
    Kind.FORWARD: None,
    Kind.BACKWARD: Kind.FORWARD,
    Kind.INPUT_GRADIENT: Kind.FORWARD,
    Kind.WEIGHT_GRADIENT: Kind.INPUT_GRADIENT,
}
"""The type of action that must precede each type on the same chunk and microbatch; None if there is no such type."""

EXCLUDED_KIND = {Kind.BACKWARD: Kind.INPUT_GRADIENT, Kind.INPUT_GRADIENT: Kind.BACKWARD}
"""The type that each type excludes on the same chunk and microbatch, because a backward is either whole or split."""


def check_lists(lists: Sequence[Sequence[Action]], placement: Placement, micros: int, *, training: bool) -> None:
    """Raises PlanError "schedule-wrong" unless there is one list per stage, and each list contains every action of its stage
    once, in an order in which no action needs a later action of its list. training: whether the lists must have backwards.
    """
    if len(lists) != placement.stages:
        message = f"the schedule must have {placement.stages} action lists, one per stage, but has {len(lists)}"
        raise PlanError("schedule-wrong", message, path=("pipeline", "use"))
    for stage, actions in enumerate(lists):
        fault, earlier_actions = "", set[Action]()
        for index, action in enumerate(actions):
            if fault := _find_fault(action, earlier_actions, placement.chunks, micros, training):
                fault = f"{action} (number {index + 1} of stage {stage}'s list) {fault}"
                break
            earlier_actions.add(action)
        else:
            if missing := next(_missing_actions(earlier_actions, placement.chunks, micros, training), None):
                fault = f"{missing} is missing from stage {stage}'s list"
        if fault:
            raise PlanError("schedule-wrong", f"the schedule's action {fault}", path=("pipeline", "use"))


def _find_fault(action: Action, earlier_actions: set[Action], chunks: int, micros: int, training: bool) -> str:
    """Returns why `action` is wrong after `earlier_actions`, as the end of a sentence; "" if it is right."""
    kind, chunk, micro = action.kind, action.chunk, action.micro
    if kind not in NEEDED_KIND:
        return "is not a compute action"
    if not (0 <= chunk < chunks and 0 <= micro < micros):
        return f"is outside {chunks} chunks and {micros} microbatches"
    if action in earlier_actions:
        return "is repeated"
    if kind.makes_gradients and not training:
        return "is in a forward-only list"
    needed = NEEDED_KIND[kind]
    # plain tuples equal actions and are faster to create; a search for a schedule makes a million of these lookups
    if needed and (needed, chunk, micro) not in earlier_actions:
        return f"comes before its {Action(needed, chunk, micro)}"
    if kind in EXCLUDED_KIND and (EXCLUDED_KIND[kind], chunk, micro) in earlier_actions:
        return f"repeats a backward, since there is also {Action(EXCLUDED_KIND[kind], chunk, micro)}"
    return ""


def _missing_actions(earlier_actions: set[Action], chunks: int, micros: int, training: bool) -> Iterator[Action]:
    """Yields the actions that a list with `earlier_actions` lacks. A backward may be whole (B) or split (I and W)."""
    for chunk, micro in product(range(chunks), range(micros)):
        is_split = (Kind.INPUT_GRADIENT, chunk, micro) in earlier_actions
        last_kind = Kind.WEIGHT_GRADIENT if is_split else Kind.BACKWARD
        for kind in (Kind.FORWARD, last_kind) if training else (Kind.FORWARD,):
            if (kind, chunk, micro) not in earlier_actions:
                yield Action(kind, chunk, micro)


NUM_AHEAD = 4
"""The number of actions by which a receive is posted before its use, if the order of transfers allows it.

With this number no schedule of sley-pp sends a value before its receive is posted, and a stage has at most six buffers. In
simulation, 2 would suffice for transfers that take up to twice as long as an action. A late post delays the processes at both
ends of the transfer, but not the link (docs/adr/0014).
"""


def order_transfers(sent_s: Mapping[Delivery, float]) -> dict[Delivery, int]:
    """Returns the index of each transfer in the order that all stages follow. sent_s: the time, in seconds, at which each value
    is sent. Transfers that are sent at the same time are ordered by flow, then by position along the flow, so a stage posts a
    receive before it sends its own value to the neighbour that is about to send.
    """

    def key(delivery: Delivery) -> tuple[float, Flow, int, int]:
        position = delivery.position if delivery.flow == "forward" else -delivery.position
        return sent_s[delivery], delivery.flow, position, delivery.micro

    return {delivery: index for index, delivery in enumerate(sorted(sent_s, key=key))}


class _TransferEnd(NamedTuple):
    """One end of a transfer in one stage's list. order: the index from `order_transfers`. action_index: the index of the action
    that computes or uses the value. post: the entry to insert; None for a send, whose position is fixed. latest_index: the
    index of the last action before which the post may be inserted, which is the first action that needs this transfer or a
    later one.
    """

    order: int
    action_index: int
    post: Transfer | None
    latest_index: int


def schedule_posts(
    actions: Sequence[Action], outputs: list[Delivery | None], stage: int, placement: Placement, order: Mapping[Delivery, int]
) -> dict[int, list[Transfer]]:
    """Returns the posts of `stage`, keyed by the index of the action before which they are inserted. outputs: for each action,
    the value that it computes for a neighbouring chunk, or None. order: the result of `order_transfers`.
    """
    ends: dict[Direction, list[_TransferEnd]] = {"up": [], "down": []}
    max_orders: list[int] = []  # after each action, the latest transfer that the list has needed so far
    positions, max_order = placement.positions(stage), -1
    for index, (action, output) in enumerate(zip(actions, outputs, strict=True)):
        needed = placement.input_of(action, positions[action.chunk])
        if output is not None and output in order:
            direction = direction_of(stage, placement.holder(output.position).stage)
            ends[direction].append(_TransferEnd(order[output], index, None, index))
        if needed is not None and needed in order:
            source = placement.holder(needed.source_position)
            post = Transfer("post", needed.flow, action.chunk, action.micro, source.stage, source.chunk)
            end = _TransferEnd(order[needed], index, post, bisect_right(max_orders, order[needed]))
            ends[direction_of(source.stage, stage)].append(end)
            max_order = max(max_order, order[needed])
        max_orders.append(max_order)
    posts: dict[int, list[Transfer]] = defaultdict(list)
    for direction_ends in ends.values():
        for index, post in _place_posts(sorted(direction_ends, key=lambda end: end.order)):
            posts[index].append(post)
    return posts


def _place_posts(ends: Sequence[_TransferEnd]) -> Iterator[tuple[int, Transfer]]:
    """Yields each post with the index of the action before which it is inserted. ends: the ends in one direction, sorted by
    `order`. The backward loop over `ends` puts a post `NUM_AHEAD` actions before its use, but not after its latest index or a
    later end. The forward loop moves a post after all earlier ends.
    """
    indices: list[int] = []
    following = max((end.action_index for end in ends), default=0)
    for end in reversed(ends):
        following = min(following, end.latest_index, end.action_index - NUM_AHEAD if end.post else end.action_index)
        indices.append(max(0, following))
    preceding = 0
    for end, index in zip(ends, reversed(indices), strict=True):
        if end.post is None:
            preceding = end.action_index + 1
        else:
            preceding = max(preceding, index)
            assert preceding <= end.action_index, f"{end.post} is posted after action {end.action_index}, which uses it"
            yield preceding, end.post


def lower(lists: Sequence[Sequence[Action]], placement: Placement, micros: int, *, training: bool = True) -> list[LoweredList]:
    """Returns one lowered list per stage: the stage's actions and transfers in order. All ranks compute the same lists.

    lists: each stage's compute actions over its chunks and `micros` microbatches. training: whether every forward must have a
    full or split backward; if False, there may be no backwards.

    An action is followed by the send of its result, then by posts, and then by CHUNK_DONE if it was the last gradient action
    of its chunk. Raises PlanError "schedule-wrong" with the first bad action and its index, and "schedule-deadlock" with the
    actions for which the blocked stages wait.
    """
    check_lists(lists, placement, micros, training=training)
    simulator = ScheduleSimulator(lists, placement, Costs.uniform(placement.num_positions), is_lowered=False)
    simulator.run()
    order = order_transfers(simulator.sent_s)
    return [_lower_stage(actions, stage, placement, order) for stage, actions in enumerate(lists)]


def _lower_stage(actions: Sequence[Action], stage: int, placement: Placement, order: Mapping[Delivery, int]) -> LoweredList:
    """Returns the lowered list of `stage`, whose compute actions are `actions`. order: the result of `order_transfers`."""
    positions = placement.positions(stage)
    outputs = [placement.output_of(action, positions[action.chunk]) for action in actions]
    posts = schedule_posts(actions, outputs, stage, placement, order)
    last_indices = {action.chunk: index for index, action in enumerate(actions) if action.kind.makes_gradients}
    steps: list[Step] = [*posts.get(0, ())]
    for index, (action, output) in enumerate(zip(actions, outputs, strict=True)):
        steps.append(action)
        if output is not None and output in order:
            peer = placement.holder(output.position)
            steps.append(Transfer("send", output.flow, action.chunk, action.micro, peer.stage, peer.chunk))
        steps += posts.get(index + 1, ())
        if last_indices.get(action.chunk) == index:
            steps.append(Action(Kind.CHUNK_DONE, action.chunk))
    return tuple(steps)
