"""Tests `dp.sharded`: each rank updates one shard of every bucket, but a program reads and writes full weights."""

import math
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from dp_parts import record_plans

from sley_core.comm.transport import MessageTransport, Work
from sley_core.errors import RunError
from sley_testing.collectives import late_exchanges
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import (
    WEIGHTS,
    assert_equal_replicas,
    assert_parity,
    assert_resumed_parity,
    assert_same_run,
    record,
    running,
    weights,
)
from sley_trainer.update import states_of

SHARDED = {"use": "dp.sharded", "bucket_mb": 0.001}
ADAMW = {"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1}
MOMENTUM = {"use": "core.sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}
UNUSUAL = {"factory": "dp_parts:Unusual", "lr": 0.1, "scope": "elementwise"}
ODD = {"model__factory": "dp_parts:odd"}
GROUPS = [{"match": "layer1.*", "lr": 0.1, "weight_decay": 0.5}, {"match": "layer2.bias", "freeze": True}]
CASES: dict[str, dict[str, Any]] = {
    "odd sizes in bf16": {"optimizer": ADAMW, "precision": {"compute": "bf16"}, **ODD},
    "fp16": {"optimizer": ADAMW | {"clip_norm": 0.05}, "precision": {"compute": "fp16", "loss_scale": {"init_scale": 64.0}}},
    "own decay and rate": {"optimizer": ADAMW | {"groups": GROUPS}},
    "an unusual optimizer": {"optimizer": UNUSUAL, **ODD},
    "the largest element": {"optimizer": MOMENTUM | {"clip_norm": 0.01, "clip_kind": "inf"}},
    "unused": {"optimizer": ADAMW, "model__factory": "dp_parts:sometimes"},
}


@pytest.mark.parametrize(
    ("size", "shards", "names"),
    [
        (4, 2, list(CASES)[1:3]),
        (2, None, list(CASES)[:4:3]),
        *(pytest.param(*case, list(CASES), marks=pytest.mark.campaign) for case in ((4, 2), (2, None), (4, None))),
    ],
)
def test_sharded_updates_equal_full_updates(ranks, small, own, size, shards, names):
    handler = SHARDED | ({"shards": shards} if shards else {})
    defaults = {"precision": {"compute": "fp64"}, "batch__global_size": 2 * size}
    plans = [small(handler, **defaults | CASES[name]) for name in names]
    for name, tables, results in zip(names, plans, zip(*ranks(size, 240)(record_plans, plans, own), strict=True), strict=True):
        print(name)
        assert_parity(record(tables | {"gradient_handlers": []}, 2, folder=own), results, tables["precision"]["compute"])
        assert_equal_replicas(results)


def change_weights_between_steps(tables, folder, in_place=False):
    """Returns the weights after each change between two steps, and the held-out losses. in_place: never replaces `.data`."""
    results, losses = [], []
    with running(tables, folder) as run:
        run.step()
        results.append(weights(run))
        losses.append(run.evaluate())
        run.load_weights({name: value.double() * 0.75 for name, value in results[0].items() if name in run.registry.names})
        results.append(weights(run))
        run.step()
        with torch.no_grad():
            for param in run.registry:
                param.parameter.mul_(1.25)
        run.step()
        results.append(weights(run))
        above, bias, first, last = (
            run.registry[name].parameter.data for name in ("b.up.weight", "first.bias", "first.weight", "last.weight")
        )
        values = {"b.up.weight": above + 0.125, "first.bias": torch.ones_like(bias)}
        values |= {"first.weight": last.t(), "last.weight": first}  # views of the old weights' memory
        values["a.down.weight"] = run.registry["a.down.weight"].parameter.data.t().contiguous().t()
        values = {name: value.clone() for name, value in values.items()} if in_place else values
        for name, value in values.items():
            if in_place:
                with torch.no_grad():
                    run.registry[name].parameter.copy_(value)
            else:
                run.registry[name].parameter.data = value
        losses.append(run.evaluate())
        run.step()
        run.step()
        results.append(weights(run))
    results.append({param.name: param.parameter.detach().clone() for param in run.registry})
    return results, losses


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "handler", "compute"), [(2, {}, "bf16"), (4, {"shards": 2}, "fp64")])
def test_a_program_reads_and_writes_between_steps(ranks, small, own, size, handler, compute):
    """Evaluates, loads weights, writes in place, and replaces `.data`, also by views and other strides. In bf16 the master
    weights follow.
    """
    evaluation = {"evaluation": {"every": 50, "steps": 1}, "data__factory": "dp_parts:split"}
    tables = small(SHARDED | handler, optimizer=ADAMW, precision__compute=compute, **evaluation, **ODD)
    expected, losses = change_weights_between_steps(tables | {"gradient_handlers": []}, own, in_place=True)
    for results, measured_losses in ranks(size, 120)(change_weights_between_steps, tables, own):
        assert measured_losses == pytest.approx(losses, rel=WEIGHTS[compute])
        for reference, other in zip(expected, results, strict=True):
            assert_close_gradients(reference, other, WEIGHTS[compute])


def run_in_all_modes(tables, folder):
    return [run_steps(tables, folder, mode) for mode in ("single", "listener", "failure")]


def run_steps(tables, folder, mode):
    """Returns weights after three steps: single steps, `train` with a listener on one rank, or `train` with a failure.

    Exchanges start only in `wait`, so that a missing wait gives wrong weights.
    """
    results, due = [], []
    with late_exchanges(), running(tables, folder) as run:
        gathers = run.stepper.handlers[0].gathers

        def before_layer(*_):
            due.append(gathers.is_due(range(len(gathers.buffers))))
            if mode == "failure" and run.num_steps_done == 1 and not results:
                raise ValueError("as asked")

        run.layers[1].module.register_forward_pre_hook(before_layer)
        if mode == "listener" and run.world.rank == 0:
            run.listeners.append(lambda row: results.append(weights(run)))
        if mode == "failure":  # in the second step of `train`, when weights of the first are still under way
            states = []
            run.readers.append(lambda row: states.append(run.feed.state()))
            with pytest.raises(ValueError, match="as asked"):
                run.train()
            run.feed.restore(states[0])
            results.append(weights(run))
        if mode == "listener":
            run.train()
        while run.num_steps_done < 3:
            run.step()
        results.append(weights(run))
    return results, any(due)


def test_weights_are_gathered_during_the_next_step_and_complete_when_read(ranks, small, own):
    """In `train` layers wait for their weights. A listener and a program that catches an error read full weights."""
    tables = small(SHARDED, optimizer=ADAMW, precision__compute="fp64", run__steps=3, **ODD)
    single, listened, failed = zip(*ranks(2, 120)(run_in_all_modes, tables, own), strict=True)
    assert [late for _, late in (*single, *failed)] == [False, False, True, True]
    for results in (listened, failed):
        for (expected, _), (other, _) in zip(single, results, strict=True):
            assert_same_bits(expected[-1], other[-1])
    assert len(listened[0][0]) == 4
    for whole in (failed[1][0][0], listened[0][0][0]):
        assert_same_bits(failed[0][0][0], whole)


def skip_a_step(tables, folder):
    """Returns whether a skipped step left the weights unchanged, its row or error, and the weights after the next step."""
    with running(tables, folder) as run:
        run.step()
        before = weights(run)
        if run.world.rank == 0:  # one rank's gradient, of which the other has a part
            hook = run.registry["b.down.weight"].parameter.register_hook(lambda gradient: gradient * float("inf"))
        try:
            outcome = run.step()["skipped"]
        except RunError as error:
            outcome = error.diagnostics[0].message
        if run.world.rank == 0:
            hook.remove()
        same = all(torch.equal(before[name], value) for name, value in weights(run).items())
        run.step()
        return same, outcome, weights(run)


@pytest.mark.sample(1)
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_a_skipped_step_changes_nothing(ranks, small, own, compute):
    """An overflow in one rank's shard skips the step on all ranks. Without a loss scale all raise an error with the name."""
    precision = {"compute": compute} | ({"loss_scale": {"init_scale": 64.0}} if compute == "fp16" else {})
    first, second = ranks(2)(skip_a_step, small(SHARDED, optimizer=ADAMW, precision=precision, **ODD), own)
    assert first[0]
    assert first[:2] == second[:2]
    assert first[1] == 1 if compute == "fp16" else "the gradient of 'b.down.weight' is not finite" in first[1]
    assert_same_bits(first[2], second[2])


def measure_states(tables, folder):
    """Returns the bytes, states, bucket sizes, this rank's spans, and the shapes of parameters after a step."""
    with running(tables, folder) as run:
        run.step()
        results = [(one.name, one.elements, one.state, one.tensor.shape) for one in states_of(run.stepper.update)]
        padded = [(buffer.data.numel(), buffer.num_shards) for buffer in run.store.buffers]
        spans = {param.name: run.store.elements(param) for param in run.store.params}
        shapes = {param.name: param.shape for param in run.registry}
        homes = {param.parameter.untyped_storage().data_ptr() for param in run.store.params if param.numel}
        assert run.layers[1].module.same.weight is run.layers[1].module.down.weight, "tied"
        assert len(homes) == len(padded), "the weights of a bucket lie in one piece"
        num_bytes = dict(run.memory.bytes) | {"masters": run.stepper.update.masters.num_bytes}  # parts of padding alone, too
        return num_bytes, results, padded, spans, shapes


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "shards"), [(4, 2), (4, 4), (2, 2)])
def test_master_weights_and_states_cover_only_the_rank_s_shard(ranks, small, own, size, shards):
    """Master weights have ceil(n / shards) elements of every padded bucket, and states the elements of the rank's spans."""
    tables = small(SHARDED | {"shards": shards}, optimizer=ADAMW, precision={"compute": "bf16"}, **ODD)
    by_rank = ranks(size)(measure_states, tables, own)
    for num_bytes, results, padded, spans, shapes in by_rank:
        assert num_bytes["masters"] == sum(-(-numel // count) for numel, count in padded) * 4
        assert all(numel % (count * 128) == 0 and count == shards for numel, count in padded)
        elements = sum(span.numel for name, span in spans.items() if shapes[name])  # a scalar's moments are scalars, as counts
        assert num_bytes["optimizer_states"] == elements * 2 * 4, "two moments; counts are a few bytes"
        kinds = ("master", "exp_avg", "exp_avg_sq", "step")
        stepped = {(name, kind) for name, span in spans.items() if span.numel for kind in kinds}
        assert {(name, state) for name, _, state, _ in results} == stepped
        for name, span, state, shape in results:
            assert span == spans[name]
            assert shape == (() if state == "step" else span.optimizer_shape(shapes[name]))
    for name in by_rank[0][3]:
        parts = sorted({rank[3][name] for rank in by_rank if rank[3][name].numel})
        assert [part.first for part in parts] == [0, *(part.last for part in parts[:-1])][: len(parts)]
        assert sum(part.numel for part in parts) == math.prod(by_rank[0][4][name]), "each element is on one rank of a copy"


def collect_error_codes(tables, folder):
    """Returns the error codes of a read of a reduced gradient, a freeze and an unfreeze."""
    results = []
    with running(tables, folder) as run:
        param = run.registry["layer1.weight"]
        run.step()
        before = run.feed.state()
        try:
            if run.world.rank == 1:
                run.store.gradient(param)
        except RunError as error:
            results.append(error.diagnostics[0].code)
        for trained in (False, True):
            if run.world.rank == 0:
                param.parameter.requires_grad_(trained)
            try:
                run.step()
            except RunError as error:
                results.append(error.diagnostics[0].code)
            run.feed.restore(before)
    return results


def test_reads_of_full_gradients_and_freezes_are_refused(ranks, small, own):
    """A reduced gradient cannot be read in full. A freeze on one rank is refused on all ranks, and the run continues."""
    assert ranks(2)(collect_error_codes, small(SHARDED, optimizer=ADAMW), own) == [
        ["shards-fixed"],
        ["gradient-sharded", "shards-fixed"],
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("handler", ["dp.sharded", "dp.bucketed"])
def test_a_model_of_odd_parameters_resumes_in_another_layout(ranks, own, tmp_path, small, handler):
    """The model has a scalar, a parameter without elements, and one of seven. Parameters that no rank updates are saved too."""
    tables = small({"use": handler, "bucket_mb": 0.001}, parallel={"dp": 2}, **ODD)
    saved = ranks(2)(record, tables, 2, folder=own, save=tmp_path / "saved")
    alone = tables | {"parallel": {}, "gradient_handlers": []}
    expected = record(alone, 3, folder=own)
    assert_resumed_parity(expected, ranks(2)(record, tables, 1, folder=own, load=tmp_path / "saved"), "fp32")
    assert_resumed_parity(expected, [record(alone, 1, folder=own, load=tmp_path / "saved")], "fp32")
    assert saved[0].weights["a.nothing"].shape == (0, 3)


def run_and_resume(tables, folder, path):
    whole = record(tables, 3, folder=folder)
    record(tables, 2, folder=folder, save=path)
    return whole, record(tables, 1, folder=folder, load=path)


def test_three_ranks_resume_bit_for_bit(ranks, own, tmp_path, small):
    """Over sockets, with at least three ranks, a sum's order depends on the offset in a bucket."""
    tables = small(parallel={"dp": 3, "cross_memory_attach": False}, model__factory="dp_parts:branches", batch__global_size=3)
    for whole, resumed in ranks(3, 120)(run_and_resume, tables, own, tmp_path / "saved"):
        assert_same_run(whole, resumed)


class _FailedWork(Work):
    def wait(self):
        raise RunError("collective-failed", "the gather failed")


def wait_for_failed_gathers(tables, folder):
    """Returns how many of three waits for a buffer fail after its gather has failed."""
    num_failed = 0
    with running(tables, folder) as run:
        gathers = run.stepper.handlers[0].gathers
        with mock.patch.object(MessageTransport, "all_gather", return_value=_FailedWork()):
            gathers.start()
        for _ in range(3):
            with suppress(RunError):
                gathers.wait_for([0])
                continue
            num_failed += 1
        gathers.start = gathers.finish = lambda: None  # the run ends without these weights
    return num_failed


def test_each_wait_for_a_failed_gather_fails(ranks, small, own):
    """A program that catches the first error must not read weights that lack the rows of other ranks."""
    tables = small(SHARDED, optimizer=ADAMW, parallel__cross_memory_attach=False)
    assert ranks(2)(wait_for_failed_gathers, tables, own) == [3, 3]
