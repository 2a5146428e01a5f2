"""Tests that on a device the first record_messages send their messages through the host, and then connect communicators."""

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
"""Axis, channel and bytes of a message."""


def record_messages(tables: dict[str, Any], folder: Path) -> list[list[Sent]]:
    """Returns the messages of an evaluation, two steps and an evaluation, as if tensors were on a device."""
    sley_pp.link.has_separate_header = lambda device: True
    sent: list[Sent] = []
    send = Group.send

    def send_and_record(group: Group, tensor: torch.Tensor, channel: str, peer: int, *, what: str) -> Any:
        sent.append((group.axis, channel, tensor.nbytes))
        return send(group, tensor, channel, peer, what=what)

    Group.send = send_and_record  # type: ignore[method-assign]
    found = []
    with running(tables, folder) as run:
        for walk in (run.evaluate, run.step, run.step, run.evaluate):
            walk()
            found.append([*sent])
            sent.clear()
    return found


def test_tensors_use_the_host_until_the_first_walk_of_a_phase_is_complete(ranks: Callable[..., Any], texts: Path) -> None:
    tables = small_plan(parallel={"pp": 2}, pipeline={"use": "pp.one_f_one_b"}, evaluation={"every": 9, "steps": 1})
    for stage, (evaluated, first, second, again) in enumerate(ranks(2)(record_messages, tables, texts)):
        channel = ("up", "down")[stage]
        bodies = [[one for one in walk if one[2] == BODY_BYTES] for walk in (evaluated, first, second, again)]
        assert {axis for axis, _, _ in (*bodies[0], *bodies[1])} == {"control"}
        assert {one[:2] for one in (*bodies[2], *bodies[3])} <= {("pp", channel)}
        assert len(bodies[1]) == len(bodies[2]) == 4
        firsts = [[one for one in walk if one[2] == 1] for walk in (evaluated, first, second, again)]
        assert firsts == [[("pp", channel, 1)], [], [], []], "one byte connects two stages, once"


def buffers(tables: dict[str, Any], folder: Path) -> list[int]:
    """Returns the number of allocated buffers after each of three steps, as if tensors were on a device."""
    sley_pp.link.has_separate_header = lambda device: True
    with running(tables, folder) as run:
        found = []
        for _ in range(3):
            run.step()
            found.append(run.stepper.executor.crossing.link.num_allocations)  # type: ignore[union-attr]
        return found


def test_messages_through_the_host_need_few_buffers(ranks: Callable[..., Any], texts: Path) -> None:
    """The number of buffers does not grow with the micro-batches, since the link waits for gloo's sends."""
    many = {"global_size": 32, "micro_size": 1}
    tables = small_plan(parallel={"pp": 2}, pipeline={"use": "pp.one_f_one_b"}, batch=many)
    for found in ranks(2)(buffers, tables, texts):
        assert found[0] <= 12


def lengths(tables: dict[str, Any], folder: Path) -> list[bool]:
    """Returns whether steps of several lengths used the host."""
    sley_pp.link.has_separate_header = lambda device: True
    found = []
    with running(tables, folder) as run:
        for length in (24, 23, 24, 22):
            micros = [{name: torch.ones(2, length, dtype=torch.int64) for name in ("tokens", "labels")} for _ in range(4)]
            run.step(micros)
            found.append(run.stepper.executor.crossing.link._channels.via_host)  # type: ignore[union-attr]
    return found


def test_a_new_length_is_no_new_phase(ranks: Callable[..., Any], texts: Path) -> None:
    tables = small_plan(parallel={"pp": 2}, pipeline={"use": "pp.one_f_one_b"}, data__documents="cut")
    assert ranks(2)(lengths, tables, texts) == [[True, False, False, False]] * 2


def connected(pairs: dict[int, list[int]]) -> list[int]:
    """Returns the stages connected to this one, if all stages list their peers in different orders."""
    with World.join("cpu") as world:
        groups = world.groups(plan_from_dict(small_plan(parallel={"pp": world.size})).topology(world.size), 20)
        channels = Channels(groups, separate_header=True)
        channels.connect(pairs[channels.stage], world.device)
        channels.connect(pairs[channels.stage], world.device)
        return sorted(channels._connected_peers)


@pytest.mark.parametrize("pairs", [{0: [1], 1: [2, 0], 2: [1]}, {0: [2, 1], 1: [0, 2], 2: [1, 0]}])
def test_stages_connect_for_any_order_of_peers(ranks: Callable[..., Any], pairs: dict[int, list[int]]) -> None:
    """The stages form a line or a loop, and each exchange blocks until the peer starts it."""
    assert ranks(3, 30)(connected, pairs) == [sorted(pairs[stage]) for stage in range(3)]
