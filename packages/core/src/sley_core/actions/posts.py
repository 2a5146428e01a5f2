"""Decides where receives are posted: early enough that no send waits for one, late enough that few buffers are in use.

All transfers in one direction, up or down the stages, stand in one order, the same for all stages: that in which they would be
sent if every action took its usual time. Each stage issues its sends and posts in that order. So however a backend joins the
ends (by tag, by order per pair of stages, or as one communicator on which everything waits for what was issued before), the
first transfer of the order that is not done is the next one at both of its ends, and no two ends can wait for each other.

For that a post must be reached without anything that comes later in the order: it stands before the first action that takes a
later transfer in either direction. Otherwise a stage with several neighbours in one direction can deadlock: its late receive
blocks a message for which it waits itself.

Within that order a receive is posted `ahead` actions before the one that takes it, so that it is there before the message
is sent. It is posted earlier only where it would else stand behind a later send in its direction, or too late to be reached.

    stage 1 of 4, 1F1B, without its sends (post F: an output of stage 0, post B: a gradient of stage 2)

    post F0 F1 B0 > F0.0 > post F2 > F0.1 > post F3 > F0.2 > B0.0 > post B1 > F0.3 > B0.1 > ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sley_core.actions.action import DIRECTIONS, Action, Direction, Flow, Placement, Transfer, direction_of
from sley_core.actions.simulate import Delivery, taken

AHEAD = 4
"""How many actions before the one that takes it a receive is posted.

The smallest with which no schedule of sley-pp sends anything before its receive is posted, with six buffers per stage at
most. In simulated steps 2 would do, for transfers of up to two actions' time: what a late post costs is not in the
link but in the processes at its ends (docs/adr/0014).
"""


def send_of(action: Action, made: Delivery | None, stage: int, placement: Placement) -> Transfer | None:
    """Returns the send that must follow `action`, which makes `made`; None if the neighbour is on the same stage, or there is
    none.
    """
    if made is None:
        return None
    peer = placement.holder(made.position)
    if peer.stage == stage:
        return None
    return Transfer("send", made.flow, action.chunk, action.micro, peer.stage, peer.chunk)


def order_of(sent_s: Mapping[Delivery, float]) -> dict[Delivery, int]:
    """Returns the global order of all transfers: by the time at which they are sent. All stages use the same one.

    Of several sent at the same time, the one earlier along its flow is first: a stage then posts the receive of what
    its neighbour is about to send before it sends its own value.
    """

    def place(delivery: Delivery) -> tuple[float, Flow, int, int]:
        position = delivery.position if delivery.flow == "forward" else -delivery.position
        return sent_s[delivery], delivery.flow, position, delivery.micro

    return {delivery: at for at, delivery in enumerate(sorted(sent_s, key=place))}


class _Issue(NamedTuple):
    """One end of a transfer in one stage's list: `action` is the number of the action that makes it or takes it.

    post: the entry to place; None for a send, whose place is fixed. latest: the number of the first action that takes a
    later transfer, or `action` if that is smaller.
    """

    order: int
    action: int
    post: Transfer | None
    latest: int


def posts_of(
    actions: Sequence[Action],
    made_by: Sequence[Delivery | None],
    stage: int,
    placement: Placement,
    order: Mapping[Delivery, int],
    ahead: int,
) -> dict[int, list[Transfer]]:
    """Returns the posts of `stage`, by the number of the action in its list before which they stand.

    made_by: what each action makes for a neighbouring chunk. order: of all transfers. ahead: how many actions before its taker
    a receive is posted, where the order allows that.
    """
    issues: dict[Direction, list[_Issue]] = {direction: [] for direction in DIRECTIONS}
    latest_taken: list[int] = []
    positions, latest_order = placement.positions(stage), -1
    for number, (action, made) in enumerate(zip(actions, made_by, strict=True)):
        needed = taken(action, positions[action.chunk], placement)
        if made is not None and made in order:
            direction = direction_of(stage, placement.holder(made.position).stage)
            issues[direction].append(_Issue(order[made], number, None, number))
        if needed is not None and needed in order:
            at = order[needed]
            source = placement.holder(needed.origin)
            post = Transfer("post", needed.flow, action.chunk, action.micro, source.stage, source.chunk)
            latest = bisect_right(latest_taken, at)
            issues[direction_of(source.stage, stage)].append(_Issue(at, number, post, latest))
            latest_order = max(latest_order, at)
        latest_taken.append(latest_order)
    posts: dict[int, list[Transfer]] = {}
    for direction in DIRECTIONS:
        for number, post in _placed(sorted(issues[direction], key=lambda issue: issue.order), ahead):
            posts.setdefault(number, []).append(post)
    return posts


def _placed(issues: Sequence[_Issue], ahead: int) -> list[tuple[int, Transfer]]:
    """Returns each post among `issues` (one direction of one stage, in order) with the number of the action that it
    precedes.

    From the end: a post is `ahead` actions before its taker, but not behind its latest place nor behind anything that
    follows it in its direction. From the start: nor before anything that precedes it.
    """
    wanted: list[int] = []
    following = max((issue.action for issue in issues), default=0)
    for issue in reversed(issues):
        following = min(following, issue.latest, issue.action - ahead if issue.post else issue.action)
        wanted.append(max(0, following))
    placed: list[tuple[int, Transfer]] = []
    preceding = 0
    for issue, number in zip(issues, reversed(wanted), strict=True):
        if issue.post is None:
            preceding = issue.action + 1
        else:
            preceding = max(preceding, number)
            assert preceding <= issue.action, f"{issue.post} is posted after action {issue.action}, which takes it"
            placed.append((preceding, issue.post))
    return placed
