"""What a rank keeps with `dp.sharded`: its part of every bucket, by the registry's names; and what it refuses."""

from __future__ import annotations

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.update import states_of
from sley_core.errors import RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict

SHARDED = {"use": "dp.sharded", "bucket_mb": 0.001}
ADAMW = {"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1}
BF16 = {"compute": "bf16"}


def held(tables, folder):
    """Bytes, states by name, and how the weights of this rank lie."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        states = [(one.name, one.elements, one.state, one.tensor.shape) for one in states_of(run.stepper.update)]
        shapes = {param.name: param.shape for param in run.registry}
        padded = [(buffer.data.numel(), buffer.num_shards) for buffer in run.store.buffers]
        spans = {param.name: run.store.elements(param) for param in run.store.params}
        sizes = {param.name: param.numel for param in run.registry}
        homes = {param.parameter.untyped_storage().data_ptr() for param in run.store.params if param.numel}
        same = run.registry["a.same.weight"] is run.registry["a.down.weight"]
        tied = run.layers[1].module.same.weight is run.layers[1].module.down.weight
        held = dict(run.memory.bytes) | {"masters": run.stepper.update.masters.num_bytes}  # parts of padding alone, too
        return held, states, padded, spans, sizes, len(homes), same and tied, shapes


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "shards"), [(2, 2), (4, 4), (4, 2)])
def test_masters_and_states_are_this_ranks_part_and_no_more(ranks, small, own, size, shards):
    """Masters take ceil(n / shards) of every padded bucket, states as many elements as the rank's spans have."""
    tables = small(SHARDED | {"shards": shards}, model__factory="dp_parts:odd", optimizer=ADAMW, precision=BF16)
    by_rank = ranks(size)(held, tables, own)
    for memory, states, padded, spans, _, num_homes, is_tied, shapes in by_rank:
        assert memory["masters"] == sum(-(-numel // count) for numel, count in padded) * 4
        assert all(numel % (count * 128) == 0 and count == shards for numel, count in padded)
        elements = sum(span.numel for name, span in spans.items() if shapes[name])  # a scalar's moments are scalars, as counts
        stepped = [name for name, span in spans.items() if span.numel]
        assert memory["optimizer_states"] == elements * 2 * 4, "two moments; counts are a few bytes"
        assert num_homes == len(padded), "the weights of a bucket lie in one piece"
        assert is_tied
        names = {(name, state) for name, _, state, _ in states}
        assert names == {(name, state) for name in stepped for state in ("master", "exp_avg", "exp_avg_sq", "step")}
        for name, span, state, shape in states:
            assert span == spans[name]
            assert shape == (() if state == "step" else span.shape_in(shapes[name]))
    for name in by_rank[0][3]:
        parts = sorted({rank[3][name] for rank in by_rank if rank[3][name].numel})
        assert [part.first for part in parts] == [0, *(part.last for part in parts[:-1])][: len(parts)]
        assert sum(part.numel for part in parts) == by_rank[0][4][name], "each element is on one rank of a copy"


def refusals(tables, folder):
    """The codes of what is refused in a run, in the order in which it is tried here."""
    found = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        param = run.registry["layer1.weight"]
        run.step()
        before = run.feed.state()
        try:
            if world.rank == 1:
                run.store.gradient(param)
        except RunError as error:
            found.append(error.diagnostics[0].code)
        for trained in (False, True):
            if world.rank == 0:
                param.parameter.requires_grad_(trained)
            try:
                run.step()
            except RunError as error:
                found.append((error.diagnostics[0].code, "layer1.weight" in error.diagnostics[0].message))
            run.feed.restore(before)
        run.store.begin_step()
        whole = run.store.gradient(param).shape
    return found, whole


def test_what_would_be_a_part_is_refused_by_name(ranks, small, own):
    """A reduced gradient is never read whole; what is frozen, on one rank alone, is refused on all, and the run goes on."""
    first, second = ranks(2)(refusals, small(SHARDED, optimizer=ADAMW), own)
    assert first == ([("shards-fixed", True)], torch.Size([6, 6]))
    assert second == (["gradient-sharded", ("shards-fixed", True)], torch.Size([6, 6]))


@pytest.mark.parametrize(
    ("changes", "world", "codes"),
    [
        ({"optimizer": {"factory": "torch.optim:Muon", "lr": 0.1}}, 2, ["optimizer-layout"]),
        ({"optimizer": {"factory": "their.own:AdamW", "lr": 0.1}}, 2, ["optimizer-layout"]),
        ({"optimizer": {"factory": "their.own:AdamW", "lr": 0.1, "scope": "elementwise"}}, 2, []),
        ({"optimizer": {"factory": "torch.optim:Muon", "lr": 0.1}}, 1, []),
        ({"handler": {"shards": 3}}, 4, ["shards-do-not-divide"]),
        ({"handler": {"shards": 2}}, 4, []),
        ({"handler": {"shards": 2}}, 1, []),
    ],
)
def test_plans_that_cannot_keep_their_numbers_are_refused(small, own, changes, world, codes):
    tables = small(SHARDED | changes.pop("handler", {}), **{"optimizer": ADAMW, "batch__global_size": 8, **changes})
    assert [problem.code for problem in check_plan(plan_from_dict(tables, own), world)] == codes


def test_no_memory_is_needed_to_see_what_a_run_would_be(small, own):
    tables = small(SHARDED | {"shards": 4}, model__factory="dp_parts:odd", optimizer=ADAMW, precision=BF16)
    with (
        World.fake(5, 8) as world,
        assemble(plan_from_dict(tables | {"batch": {"global_size": 8, "micro_size": 1}}, own), world) as run,
    ):
        assert all(buffer.data.is_meta for buffer in (*run.store.buffers, *run.parts.weights.buffers))
        assert run.groups["dp.shards.stage"].ranks == (4, 5, 6, 7)
        assert run.groups["dp.copies.stage"].ranks == (1, 5)


def masters_of(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        return run.memory.bytes["masters"], [one.name for one in states_of(run.stepper.update) if one.state == "master"]


def test_parts_of_weights_that_are_stepped_themselves_are_no_masters(ranks, small, own):
    tables = small(SHARDED, model__factory="dp_parts:odd", optimizer=ADAMW, precision={"compute": "fp32"})
    assert ranks(2)(masters_of, tables, own) == [(0, [])] * 2
