"""Tests boundaries with all types, shapes and numbers of tensors, and the errors of mismatches."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sley_pp.messages
from sley_core.comm.world import Group, World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_pp.messages import Channels
from sley_testing.contract import SQUARES
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import small_plan
from sley_testing.runs import record, running, weights


def plan(factory, stages=1, schedule="one_f_one_b", dp=1, global_size=4, **options):
    tables = small_plan(
        batch__global_size=global_size,
        model={"factory": f"crossings:{factory}", "options": options},
        data={"factory": "crossings:Rows"},
        loss=SQUARES,
        optimizer={"use": "core.sgd", "lr": 0.075},
    )
    if stages > 1:
        tables |= {"parallel": {"dp": dp, "pp": stages}, "pipeline": {"use": f"pp.{schedule}"}}
    return tables


def record_with_both_headers(plans, own, batches=None):
    """Records two steps of each plan, and then of the first two with separate headers."""
    results = [record(tables, 2, folder=own, batches=batches) for tables in plans]
    sley_pp.messages.has_separate_header = lambda device: True
    return results + [record(tables, 2, folder=own, batches=batches) for tables in plans[:2]]


def assert_equal(reference, layouts):
    for layout in layouts:
        for expected, found in zip(reference.gradients, layout.gradients, strict=True):
            assert_close_gradients({name: expected[name] for name in found}, found, 1e-10)
        assert [row["loss"] for row in layout.rows] == pytest.approx([row["loss"] for row in reference.rows], rel=1e-10)


def batch_of(length, micros=4):
    x, y = torch.randn(2, 2 * micros, length, 4, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return {"x": x, "y": y}


CROSSINGS = {
    "types": ("typed", "one_f_one_b", {}),
    "300 tensors": ("many", "zero_bubble_h1", {"number": 300}),
    "writes to a received tensor": ("in_place", "gpipe", {}),
    "one tensor or two, as the data have it": ("skips", "zero_bubble_h1", {}),
    "no gradient": ("chain", "one_f_one_b", {"frozen": True}),
}


def test_outputs_of_layers_cross_unchanged(ranks, own):
    """Outputs are named tuples, dataclasses, types of torch and registered types. A sent output frees its storage."""
    references = [record(plan(factory, **options), 2, folder=own) for factory, _, options in CROSSINGS.values()]
    plans = [plan(factory, 3, schedule, **options) for factory, schedule, options in CROSSINGS.values()]
    for reference, layouts in zip(
        references + references[:2], zip(*ranks(3, 120)(record_with_both_headers, plans, own), strict=True), strict=True
    ):
        assert_equal(reference, layouts)


def test_micro_batches_of_a_step_may_differ_in_length(ranks, own):
    """Shapes are announced once per length, and later receives are posted ahead. Replicas have different lengths."""
    batches = [[batch_of(length, 1) for length in lengths] for lengths in ((5, 2, 7, 3), (3, 5, 5, 2))]
    reference = record(plan("chain", global_size=8), 2, folder=own, batches=batches)
    plans = [plan("chain", 2, "zero_bubble_h1", dp=2, global_size=8)]
    for layouts in zip(*ranks(4)(record_with_both_headers, plans, own, batches), strict=True):
        assert_equal(reference, layouts)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def record_or_error(plans, own, apart=False):
    """Returns the records, or the code, message and time of the error."""
    if apart:
        sley_pp.messages.has_separate_header = lambda device: True
    found = []
    for tables in plans:
        start_s = time.monotonic()
        try:
            found.append(record(tables, 1, folder=own))
        except RunError as error:
            found.append((error.diagnostics[0].code, error.diagnostics[0].message, time.monotonic() - start_s))
    return found


def test_writes_to_overlapping_tensors_are_refused(ranks, own):
    """Overlapping tensors arrive as copies, so a write to one would not change the other, unlike in one process."""
    record(plan("halves"), 1, folder=own)
    expected = record(plan("halves", writes=False), 1, folder=own)
    refused = plan("halves", 2) | {"limits": {"collective_timeout_s": 1}}  # the first stage waits for a gradient
    first, last = ranks(2, 60)(record_or_error, [plan("halves", 2, writes=False), refused], own)
    assert_equal(expected, [first[0], last[0]])
    assert last[1][0] == "boundary-overlap"


@pytest.mark.parametrize(
    ("device", "apart"), [("cpu", False), ("cpu", True), pytest.param("cuda", False, marks=pytest.mark.gpu)]
)
def test_a_mismatch_is_named_on_both_sides(ranks, own, device, apart):
    """The error comes before any computation, with headers before their tensors or on the host."""
    tables = plan("changing_dtype", 2)
    tables["run"]["device"] = device
    (sender,), (receiver,) = ranks(2, 30)(record_or_error, [tables], own, apart)
    for code, message, seconds in (sender, receiver):
        assert code == "boundary-mismatch"
        assert seconds < 20
        assert "microbatch 1" in message
        assert "expected float64[2, 4, 4] with gradient, but got float32[2, 4, 4] with gradient" in message
    assert "stage 0 sends to stage 1, the output" in sender[1]
    assert "stage 1 receives from stage 0, the output" in receiver[1]


# -- frozen and unfrozen between steps ---------------------------------------------------------------------------------

FROZEN = [("first", "0"), (), ("first", "0", "1", "2"), ("last",), ("first",), ("first", "0", "1", "2", "3"), ()]
"""The layers that are frozen in each step: whole stages, and then no longer."""


def record_freezes(plans, own):
    """Returns for each plan the losses, and the weights after the last step."""
    found = []
    for tables in plans:
        with running(tables, own) as run:
            losses = []
            for frozen in FROZEN:
                for layer in run.layers:
                    layer.module.requires_grad_(layer.name not in frozen)
                losses.append(run.step()["loss"])
            found.append((losses, weights(run)))
    return found


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_stages_frozen_and_unfrozen_between_steps(ranks, own, stages):
    """The tensors that have a gradient may change, and no stage waits for a missing gradient."""
    cases = [("chain", "zero_bubble_v"), ("in_place", "one_f_one_b")]
    expected = dict(zip(("chain", "in_place"), record_freezes([plan("chain"), plan("in_place")], own), strict=True))
    by_rank = ranks(stages, 120)(record_freezes, [plan(factory, stages, name) for factory, name in cases], own)
    for (factory, name), layouts in zip(cases, zip(*by_rank, strict=True), strict=True):
        losses, parameters = expected[factory]
        for own_losses, own_weights in layouts:
            assert own_losses == pytest.approx(losses, rel=1e-9), name
            for key, value in own_weights.items():
                torch.testing.assert_close(value, parameters[key], rtol=1e-9, atol=1e-12)


# -- memory ------------------------------------------------------------------------------------------------------------


def message_bytes(tables, own, longest, num_microbatches):
    """Returns the bytes of the link's messages after steps of the greatest length, and after ten other lengths and
    `num_microbatches` in one step, and the number of later allocations.
    """
    with running(tables, own) as run:
        link = run.stepper.executor.boundaries.link
        for _ in range(2):
            run.step(batch_of(longest, num_microbatches))
        alone = link._pool.num_bytes
        for length in range(longest - 10, longest):
            run.step(batch_of(length, 2))
        run.step([batch_of(length, 1) for length in range(longest - num_microbatches, longest)])
        many = link._pool.num_bytes
        run.step(batch_of(longest, num_microbatches))
        allocated = link._pool.num_allocations
        run.step(batch_of(longest, num_microbatches))
        return alone, many, link._pool.num_allocations - allocated


def test_memory_of_messages_does_not_grow_with_micro_batches_nor_with_lengths(ranks, own):
    """Messages need memory only while they are posted, in flight, or in use by a microbatch."""
    longest, num_microbatches = 100, 16
    message = 2 * longest * 4 * 8
    for alone, many, allocated in ranks(2, 120)(message_bytes, plan("chain", 2), own, longest, num_microbatches):
        assert many <= 2 * alone, f"{many // message} messages after other lengths, {alone // message} before"
        assert message <= alone <= 20 * 1.3 * message, alone / message
        assert allocated == 0, "messages of a known length are allocated again"


# -- first walks on a device -------------------------------------------------------------------------------------------


BODY_BYTES = 2 * 24 * 16 * 8
"""Of a microbatch's boundary: samples, tokens, channels of fp64."""

Sent = tuple[str, str, int]
"""Axis, channel and bytes of a message."""


def record_messages(tables: dict[str, Any], folder: Path) -> list[list[Sent]]:
    """Returns the messages of an evaluation, two steps and an evaluation, as if tensors were on a device."""
    sley_pp.messages.has_separate_header = lambda device: True
    sent: list[Sent] = []
    send = Group.send

    def send_and_record(group: Group, tensor: torch.Tensor, channel: str, peer: int, *, label: str) -> Any:
        sent.append((group.axis, channel, tensor.nbytes))
        return send(group, tensor, channel, peer, label=label)

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


def connect_stages(pairs: dict[int, list[int]]) -> list[int]:
    """Returns the stages connected to this one, if all stages list their peers in different orders."""
    with World.join("cpu") as world:
        groups = world.make_groups(plan_from_dict(small_plan(parallel={"pp": world.size})).topology(world.size), 20)
        channels = Channels(groups, separate_header=True)
        channels.connect(pairs[channels.stage], world.device)
        channels.connect(pairs[channels.stage], world.device)
        return sorted(channels._connected_peers)


@pytest.mark.parametrize("pairs", [{0: [1], 1: [2, 0], 2: [1]}, {0: [2, 1], 1: [0, 2], 2: [1, 0]}])
def test_stages_connect_for_any_order_of_peers(ranks: Callable[..., Any], pairs: dict[int, list[int]]) -> None:
    """The stages form a line or a loop, and each exchange blocks until the peer starts it."""
    assert ranks(3, 30)(connect_stages, pairs) == [sorted(pairs[stage]) for stage in range(3)]
