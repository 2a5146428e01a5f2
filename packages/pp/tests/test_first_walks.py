"""On a device the first walks go by the host, where nothing waits for a kernel; then communicators are connected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sley_pp.link
from sley_core.comm.group import Group
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_pp.channels import Channels
from sley_testing.plans import small_plan
from sley_testing.runs import running

BODY_BYTES = 2 * 24 * 16 * 8
"""Of a micro-batch's boundary: samples, tokens, channels of fp64."""

Sent = tuple[str, str, int]
"""Axis, lane and bytes of a message."""


def walks(tables: dict[str, Any], folder: Path) -> list[list[Sent]]:
    """What this rank sends in an evaluation, two steps and an evaluation, as if its tensors lay on a device."""
    sley_pp.link.has_separate_header = lambda device: True
    sent: list[Sent] = []
    send = Group.send

    def noted(group: Group, tensor: torch.Tensor, lane: str, peer: int, *, what: str) -> Any:
        sent.append((group.axis, lane, tensor.nbytes))
        return send(group, tensor, lane, peer, what=what)

    Group.send = noted  # type: ignore[method-assign]
    found = []
    with running(tables, folder) as run:
        for walk in (run.evaluate, run.step, run.step, run.evaluate):
            walk()
            found.append([*sent])
            sent.clear()
    return found


def test_bodies_go_by_the_host_until_a_walk_of_their_kind_is_complete(ranks: Callable[..., Any], texts: Path) -> None:
    tables = small_plan(parallel={"pp": 2}, pipeline={"use": "pp.one_f_one_b"}, evaluation={"every": 9, "steps": 1})
    for stage, (evaluated, first, second, again) in enumerate(ranks(2)(walks, tables, texts)):
        lane = ("up", "down")[stage]
        bodies = [[one for one in walk if one[2] == BODY_BYTES] for walk in (evaluated, first, second, again)]
        assert {axis for axis, _, _ in (*bodies[0], *bodies[1])} == {"control"}
        assert {one[:2] for one in (*bodies[2], *bodies[3])} <= {("pp", lane)}
        assert len(bodies[1]) == len(bodies[2]) == 4
        firsts = [[one for one in walk if one[2] == 1] for walk in (evaluated, first, second, again)]
        assert firsts == [[("pp", lane, 1)], [], [], []], "one byte connects two stages, once"


def buffers(tables: dict[str, Any], folder: Path) -> list[int]:
    """How many buffers this stage's link has allocated after each of three steps, as if its tensors lay on a device."""
    sley_pp.link.has_separate_header = lambda device: True
    with running(tables, folder) as run:
        found = []
        for _ in range(3):
            run.step()
            found.append(run.stepper.executor.crossing.link.num_allocations)  # type: ignore[union-attr]
        return found


def test_messages_by_the_host_take_no_more_buffers_than_are_under_way(ranks: Callable[..., Any], texts: Path) -> None:
    """However many micro-batches a step has; what gloo has sent is known by waiting for it."""
    many = {"global_size": 32, "micro_size": 1}
    tables = small_plan(parallel={"pp": 2}, pipeline={"use": "pp.one_f_one_b"}, batch=many)
    for found in ranks(2)(buffers, tables, texts):
        assert found[0] <= 12


def lengths(tables: dict[str, Any], folder: Path) -> list[bool]:
    """Whether steps of several lengths went by the host."""
    sley_pp.link.has_separate_header = lambda device: True
    found = []
    with running(tables, folder) as run:
        for length in (24, 23, 24, 22):
            micros = [{name: torch.ones(2, length, dtype=torch.int64) for name in ("tokens", "labels")} for _ in range(4)]
            run.step(micros)
            found.append(run.stepper.executor.crossing.link._channels.via_host)  # type: ignore[union-attr]
    return found


def test_a_new_length_is_no_new_kind(ranks: Callable[..., Any], texts: Path) -> None:
    tables = small_plan(parallel={"pp": 2}, pipeline={"use": "pp.one_f_one_b"}, data__documents="cut")
    assert ranks(2)(lengths, tables, texts) == [[True, False, False, False]] * 2


def connected(pairs: dict[int, list[int]]) -> list[int]:
    """Which stages' bytes came to this one, all of whose peers connect in an order of their own making."""
    with World.join("cpu") as world:
        groups = world.groups(plan_from_dict(small_plan(parallel={"pp": world.size})).topology(world.size), 20)
        channels = Channels(groups, separate_header=True)
        channels.connect(pairs[channels.stage], world.device)
        channels.connect(pairs[channels.stage], world.device)
        return sorted(channels._connected_peers)


@pytest.mark.parametrize("pairs", [{0: [1], 1: [2, 0], 2: [1]}, {0: [2, 1], 1: [0, 2], 2: [1, 0]}])
def test_stages_connect_whatever_the_order_of_their_peers(ranks: Callable[..., Any], pairs: dict[int, list[int]]) -> None:
    """In a line and in a loop; each exchange blocks until the peer comes to it."""
    assert ranks(3, 30)(connected, pairs) == [sorted(pairs[stage]) for stage in range(3)]
