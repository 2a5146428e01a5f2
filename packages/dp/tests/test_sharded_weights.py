"""With `dp.sharded` a program finds whole weights wherever it looks, and what it writes reaches the rank that steps it."""

from __future__ import annotations

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import WEIGHTS, weights

SHARDED = {"use": "dp.sharded", "bucket_mb": 0.001}
ADAMW = {"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1}


def between_steps(tables, folder):
    """Weights after each thing that a program does between two steps, and the held-out losses."""
    seen, losses = [], []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        seen.append(weights(run))
        losses.append(run.evaluate())
        run.load_weights({name: value.double() * 0.75 for name, value in seen[0].items() if name in run.registry.names})
        seen.append(weights(run))
        run.step()
        with torch.no_grad():
            for param in run.registry:
                param.parameter.mul_(1.25)
        run.step()
        seen.append(weights(run))
        some = run.registry["b.up.weight"].parameter
        some.data = some.data.clone() + 0.125
        run.registry["first.bias"].parameter.data = torch.ones_like(run.registry["first.bias"].parameter)
        losses.append(run.evaluate())
        run.step()
        run.step()
        seen.append(weights(run))
    seen.append({param.name: param.parameter.detach().clone() for param in run.registry})
    return seen, losses


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "handler"), [(2, {}), (4, {"shards": 2})])
@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_what_a_program_reads_and_writes_between_steps(ranks, small, own, size, handler, compute):
    """Evaluations, loaded weights, writes in place and `.data` of other memory; in bf16 the shards' masters take them over."""
    tables = small(
        SHARDED | handler,
        model__factory="dp_parts:odd",
        optimizer=ADAMW,
        precision__compute=compute,
        evaluation={"every": 50, "steps": 1},
        data__factory="dp_parts:split",
    )
    alone = {key: value for key, value in tables.items() if key != "gradient_handlers"}
    wanted, losses = between_steps(alone, own)
    for found, measured in ranks(size, 120)(between_steps, tables, own):
        assert measured == pytest.approx(losses, rel=WEIGHTS[compute])
        for one, other in zip(wanted, found, strict=True):
            assert_close_gradients(one, other, WEIGHTS[compute])


class Late:
    """A transport whose gathers begin when they are awaited: nothing is right by luck."""

    def __init__(self, transport):
        self.transport = transport

    def all_gather(self, wholes, shards, *, what):
        return LateWork(lambda: self.transport.all_gather(wholes, shards, what=what))


class LateWork:
    def __init__(self, begin):
        self.begin = begin

    def wait(self):
        self.work = self.begin()
        self.work.wait()

    def wait_sent(self):
        self.work.wait_sent()


def steps_of(tables, folder, mode):
    """Weights after six steps: taken one by one, by `train`, by `train` with a listener, or with a failure in between."""
    seen, due = [], []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        gathers = run.stepper.handlers[0].gathers

        def note(*_):
            due.append(gathers.is_due(range(len(gathers.buffers))))

        transports = run.groups["dp.shards.stage"].transports
        transports["weights"] = Late(transports["weights"])
        for layer in run.layers:
            layer.module.register_forward_pre_hook(note)
        if mode == "listener" and world.rank == 0:
            run.listeners.append(lambda row: seen.append(weights(run)))
        if mode == "failure":
            fail_in_the_second_step(run, seen)
        if mode in ("one by one", "failure"):
            for _ in range(run.num_steps_done, 6):
                run.step()
        else:
            run.train()
        seen.append(weights(run))
    return seen, any(due)


def fail_in_the_second_step(run, seen):
    """`train` raises in the second step, when weights of the first are still under way; these are whole afterwards."""
    calls = []

    def fail(*_):
        calls.append(run.num_steps_done)
        if run.num_steps_done == 1:
            raise ValueError("as asked")

    hook = run.layers[1].module.register_forward_pre_hook(fail)
    states = []
    run.readers.append(lambda row: states.append(run.feed.state()))
    with pytest.raises(ValueError, match="as asked"):
        run.train()
    hook.remove()
    run.feed.restore(states[0])
    seen.append(weights(run))


def test_weights_come_while_the_next_step_runs_and_nobody_sees_half_of_them(ranks, small, own):
    """In `train` layers wait for theirs; a listener, on one rank alone, and a program that catches an error, find all."""
    tables = small(SHARDED, model__factory="dp_parts:odd", optimizer=ADAMW, precision__compute="fp64", run__steps=6)
    singly = ranks(2, 120)(steps_of, tables, own, "one by one")
    trained = ranks(2, 120)(steps_of, tables, own, "train")
    heard = ranks(2, 120)(steps_of, tables, own, "listener")
    failed = ranks(2, 120)(steps_of, tables, own, "failure")
    assert [late for _, late in singly] == [False, False]
    assert [late for _, late in trained] == [True, True]
    for found in (trained, heard, failed):
        for (one, _), (other, _) in zip(singly, found, strict=True):
            assert_same_bits(one[-1], other[-1])
    assert len(heard[0][0]) == 7
    assert_same_bits(failed[0][0][0], failed[1][0][0])
    assert all(torch.isfinite(value).all() for value in failed[0][0][0].values())
    assert_same_bits(heard[0][0][0], failed[0][0][0])


def not_taken(tables, folder):
    """Weights, row and states around a step that nobody takes, and after the next."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        before = weights(run)
        if world.rank == 0:  # one rank's gradient, of which the other has a part
            hook = run.registry["b.down.weight"].parameter.register_hook(lambda gradient: gradient * float("inf"))
        try:
            skipped = run.step()["skipped"]
        except RunError as error:
            skipped = error.diagnostics[0].message
        if world.rank == 0:
            hook.remove()
        same = all(torch.equal(before[name], value) for name, value in weights(run).items())
        run.step()
        return same, skipped, weights(run)


@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_a_step_that_is_not_taken_changes_nothing(ranks, small, own, compute):
    """An overflow in one rank's shard is a skip on all; without a scale all refuse, and name the parameter."""
    precision = {"compute": compute} | ({"loss_scale": {"init_scale": 64.0}} if compute == "fp16" else {})
    first, second = ranks(2)(
        not_taken, small(SHARDED, model__factory="dp_parts:odd", optimizer=ADAMW, precision=precision), own
    )
    assert first[0]
    assert second[0]
    assert first[1] == second[1]
    if compute == "fp16":
        assert first[1] == 1
    else:
        assert "first in the gradient of 'b.down.weight'" in first[1]
    assert_same_bits(first[2], second[2])
