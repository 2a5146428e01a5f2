"""What crosses a boundary besides plain tensors of one shape: types, many tensors, frozen parts, steps that differ."""

from __future__ import annotations

import time
from importlib import import_module

import pytest
import torch

import sley_pp.link
from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.agreement import _WEIGHT as WEIGHT
from sley_core.engine.agreement import Agreement
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import small_plan
from sley_testing.runs import record, weights

SCHEDULES = ["one_f_one_b", "gpipe", "zero_bubble_h1"]


def plan(factory, stages=1, schedule="one_f_one_b", **options):
    tables = small_plan(
        model={"factory": f"crossings:{factory}", "options": options},
        data={"factory": "crossings:Rows"},
        loss={"factory": "crossings:Squares"},
        optimizer={"use": "core.sgd", "lr": 0.3},
    )
    if stages > 1:
        tables |= {"parallel": {"dp": 1, "pp": stages}, "pipeline": {"use": f"pp.{schedule}"}}
    return tables


def recorded(plans, own):
    return [record(tables, 2, folder=own) for tables in plans]


def recorded_both_ways(plans, apart, own):
    """With heads in front of tensors, and then, where `apart` has the plan's schedule, with heads apart."""
    together = recorded(plans, own)
    sley_pp.link.heads_are_apart = lambda device: True
    return together + recorded([tables for name, tables in zip(SCHEDULES, plans, strict=True) if name in apart], own)


def assert_equal(reference, layouts):
    for layout in layouts:
        for one, other in zip(reference.gradients, layout.gradients, strict=True):
            assert_close_gradients({name: one[name] for name in other}, other, 1e-10)
        assert [row["loss"] for row in layout.rows] == pytest.approx([row["loss"] for row in reference.rows], rel=1e-10)


def assert_crosses(ranks, own, factory, stages, apart=SCHEDULES[-1:], **options):
    wanted = record(plan(factory, **options), 2, folder=own)
    plans = [plan(factory, stages, name, **options) for name in SCHEDULES]
    for layouts in zip(*ranks(stages, 120)(recorded_both_ways, plans, apart, own), strict=True):
        assert_equal(wanted, layouts)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", [2, 3])
def test_tensors_arrive_in_the_types_that_they_were_in(ranks, own, stages):
    """Named tuples, dataclasses, torch's and registered types."""
    assert_crosses(ranks, own, "typed", stages)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [40, 300])
def test_as_many_tensors_cross_as_a_layer_returns(ranks, own, number):
    """What announces them has no greatest length."""
    assert_crosses(ranks, own, "many", 2, number=number)


def test_a_layer_may_write_to_what_its_stage_received(ranks, own):
    assert_crosses(ranks, own, "in_place", 3)


@pytest.mark.campaign
@pytest.mark.parametrize(("factory", "stages", "options"), [("typed", 3, {}), ("many", 2, {"number": 40}), ("in_place", 3, {})])
def test_heads_apart_in_every_schedule(ranks, own, factory, stages, options):
    assert_crosses(ranks, own, factory, stages, apart=SCHEDULES, **options)


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.campaign)])
def test_data_may_decide_which_tensors_are_one(ranks, own, size):
    """A tensor that is handed on in two places is one on the other side, in the micro-batches in which it is."""
    wanted = record(plan("skips"), 2, folder=own)
    plans = [plan("skips", size, name) for name in SCHEDULES]
    for layouts in zip(*ranks(size, 120)(recorded, plans, own), strict=True):
        assert_equal(wanted, layouts)


def refusals(plans, own):
    found = []
    for tables in plans:
        try:
            found.append(record(tables, 1, folder=own))
        except RunError as error:
            found.append(error.diagnostics[0].code)
    return found


def test_writing_to_one_of_two_tensors_that_overlapped_is_refused(ranks, own):
    """They arrive as copies: what is written to one would not be seen in the other, as it is in one process."""
    record(plan("halves"), 1, folder=own)
    wanted = record(plan("halves", writes=False), 1, folder=own)
    refused = plan("halves", 2) | {"limits": {"collective_timeout_s": 3}}  # the first stage waits for a gradient
    first, last = ranks(2, 60)(refusals, [plan("halves", 2, writes=False), refused], own)
    assert_equal(wanted, [first[0], last[0]])
    assert last[1] == "boundary-overlap"


# -- frozen and unfrozen between steps ---------------------------------------------------------------------------------

FROZEN = [("first", "0"), (), ("first", "0", "1", "2"), ("last",), ("first",), ("first", "0", "1", "2", "3"), ()]
"""The layers that are frozen in each step: whole stages are, and are not any more."""


def gradual(tables, own):
    """Losses, and weights after the last step."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, own), world) as run:
        first, losses = weights(run), []
        for frozen in FROZEN:
            for layer in run.layers:
                layer.module.requires_grad_(layer.name not in frozen)
            losses.append(run.step()["loss"])
        return first, losses, weights(run)


def by_hand(factory, run_first, own):
    """The same of a plain loop; `zero_grad(set_to_none=False)`, as a step of the engine takes what is frozen as zero."""
    module = import_module("crossings")
    named = getattr(module, factory)(module.Rows.info)
    for layer in dict(named).values():
        layer.double()
    parameters = {f"{name}.{key}": value for name, layer in named for key, value in layer.named_parameters()}
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(run_first[name])
    with assemble(plan_from_dict(plan(factory), own), World.alone("cpu")) as run:
        batches = [run.feed.next() for _ in FROZEN]
    losses = []
    for frozen, batch in zip(FROZEN, batches, strict=True):
        value = batch["x"]
        for name, layer in named:
            layer.requires_grad_(name not in frozen)
            layer.zero_grad()
        for _, layer in named:
            value = layer(value)
        loss = (value - batch["y"]).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter -= 0.3 * parameter.grad
    return losses, parameters


def several(plans, own):
    return [gradual(tables, own) for tables in plans]


EVERY_SCHEDULE = (*SCHEDULES, "interleaved", "zero_bubble_v")


@pytest.mark.parametrize(
    ("stages", "in_place"),
    [(2, ["one_f_one_b"]), *(pytest.param(stages, EVERY_SCHEDULE, marks=pytest.mark.campaign) for stages in (2, 3))],
)
def test_whole_stages_frozen_and_unfrozen_between_steps(ranks, own, stages, in_place):
    """Which tensors have a gradient may change, and nobody waits for one that does not come."""
    every = [("chain", plan("chain", stages, name)) for name in EVERY_SCHEDULE]
    every += [("in_place", plan("in_place", stages, name)) for name in in_place]
    by_rank = ranks(stages, 120)(several, [tables for _, tables in every], own)
    for (factory, tables), layouts in zip(every, zip(*by_rank, strict=True), strict=True):
        first = {name: value for layout in layouts for name, value in layout[0].items()}
        losses, parameters = by_hand(factory, first, own)
        for _, own_losses, own_weights in layouts:
            assert own_losses == pytest.approx(losses, rel=1e-9), tables["pipeline"]
            for name, value in own_weights.items():
                torch.testing.assert_close(value, parameters[name].detach(), rtol=1e-9, atol=1e-12)


# -- memory ------------------------------------------------------------------------------------------------------------


def batch_of(length, micros=4):
    x, y = torch.randn(2, 2 * micros, length, 4, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return {"x": x, "y": y}


def lengths(tables, own, longest, num_micros):
    """What the link's messages take after steps of the greatest length, and after others: sixty, and forty in one."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, own), world) as run:
        link = run.stepper.executor.crossing.link
        for _ in range(2):
            run.step(batch_of(longest, num_micros))
        alone = link.num_bytes
        for length in range(longest - 60, longest):
            run.step(batch_of(length, 2))
        run.step([batch_of(length, 1) for length in range(longest - num_micros, longest)])
        many = link.num_bytes
        run.step(batch_of(longest, num_micros))
        made = link.num_allocated
        run.step(batch_of(longest, num_micros))
        return alone, many, link.num_allocated - made


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_v"])
def test_memory_of_messages_does_not_grow_with_micro_batches_nor_with_lengths(ranks, own, schedule):
    """In use are messages that are posted, or held by a micro-batch, or on their way."""
    longest, num_micros = 200, 40
    message = 2 * longest * 4 * 8
    for alone, many, made in ranks(2, 120)(lengths, plan("chain", 2, schedule), own, longest, num_micros):
        assert many <= 2 * alone, f"{many // message} messages after other lengths, {alone // message} before"
        assert message <= alone <= 20 * 1.3 * message, alone / message
        assert made == 0, "messages of a length that was met are made again"


# -- steps that differ -------------------------------------------------------------------------------------------------


def trusting(self):
    """Nobody compares before the step: what the stages themselves say remains."""
    if self._pending is not None:
        self._pending.wait()
        self._pending, self.weight = None, float(self._sum[WEIGHT])


def apart_in_size(tables, own, micros_of, length_of, walk):
    """This stage's step, on micro-batches of its own number and length; what it says, and after how long."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, own), world) as run:
        stage = run.groups["pp"].coord
        for _ in range(2):
            run.step(batch_of(5))
        Agreement.check = trusting
        start_s = time.monotonic()
        try:
            if walk[stage] == "evaluate":
                run.evaluate()
            else:
                run.step(batch_of(length_of[stage], micros_of[stage]))
        except RunError as error:
            return error.diagnostics[0].code, error.diagnostics[0].message, time.monotonic() - start_s
    return None


@pytest.mark.parametrize(
    ("micros", "length", "walk", "words"),
    [
        ((4, 2), (5, 5), ("step", "step"), ("4 micro-batches", "2 micro-batches")),
        ((2, 4), (5, 5), ("step", "step"), ("4 micro-batches", "2 micro-batches")),
        ((4, 4), (5, 400), ("step", "step"), ("(2, 5, 4)", "(2, 400, 4)")),
        ((4, 4), (3, 3), ("step", "evaluate"), ("train", "evaluate")),
    ],
)
def test_stages_that_were_given_other_steps_say_so_at_once(ranks, own, micros, length, walk, words):
    tables = plan("chain", 2, "gpipe") | {"evaluation": {"every": 100, "steps": 1}}
    tables["limits"] = {"collective_timeout_s": 20}
    for code, message, seconds in ranks(2, 60)(apart_in_size, tables, own, micros, length, walk):
        assert code == "stages-differ"
        assert all(word in message for word in words), message
        assert seconds < 10
