"""What waits on the host comes back bit for bit, leaves the device meanwhile, and is used again from step to step."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.habits import HABITS
from sley_testing.plans import small_plan

pytestmark = pytest.mark.timeout(120)
SHARING = ("GRU", "LSTM", "RNN", "unsafe_split", "views of both", "data", "detach", "next layer")
HOST = {"use": "memory.host", "min_bytes": 1}
MODEL = {"factory": "attending:layers"}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision__compute": "bf16"},
        {"precision__compute": "fp32", "precision__accumulation": "direct"},
        {"model": MODEL | {"options": {"dropout": 0.3}}},
        {"model": MODEL | {"options": {"attention_dropout": 0.3}}, "precision__compute": "fp32"},
    ],
    ids=["fp64", "bf16", "direct", "dropout", "attention dropout"],
)
def test_the_same_bits_and_something_moved(as_kept: Any, changes: dict[str, Any]) -> None:
    counts = as_kept(HOST, 10, **changes)
    assert counts["moved_bytes"] == counts["fetched_bytes"] > 0
    assert counts["copy_out_host_s"] > 0
    assert counts["copy_back_host_s"] > 0


@pytest.mark.sample(6)
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # forward-mode derivatives
def test_habits_of_models(as_kept: Any, habit: str) -> None:
    """Double backward, backward within a forward, checkpoints within a layer, weights made anew, torch.func."""
    model = {"factory": "sley_testing.habits:model", "options": {"habit": habit}}
    counts = as_kept(HOST | {"layers": ["*"]}, model=model, data__sequence=16, evaluation=None)
    assert counts["moved_bytes"] > 0


def test_what_leaves_is_gone_from_the_device_and_comes_back(own: Path, texts: Path) -> None:
    """Between the forward and the backward, counted from live storages: all that four blocks save but their inputs' ends."""
    from live import Storages

    found = {}
    for policy in ({"use": "core.keep"}, HOST):
        tables = small_plan(model=MODEL | {"options": {"num_blocks": 4}}, activations=policy, batch__global_size=2)
        with assemble(plan_from_dict(tables, texts), World.alone("cpu")) as run:
            run.step()
            on_host = [tensor for _, tensor in getattr(run.caller.policy, "held", list)()]
            with Storages() as storages:
                whole = run.stepper.executor.loss.loss
                seen: list[int] = []

                def loss(output: Any, batch: Any, whole: Any = whole, seen: Any = seen, live: Any = storages) -> Any:
                    seen.append(live.num_bytes())
                    return whole(output, batch)

                storages.but(on_host)
                run.stepper.executor.loss.loss = loss
                run.step()
            found[policy["use"]] = seen[0]
            counts = run.counts.get("memory.host", {})
    saved = found["core.keep"] - found["memory.host"]
    away = counts["moved_bytes"] / 2  # of two steps
    assert 0.95 * away <= saved <= away, (found, counts)
    assert found["memory.host"] < 0.3 * found["core.keep"]


def test_a_storage_moves_once(own: Path, texts: Path) -> None:
    """Two blocks save one hidden state, autograd saves views of one storage: no byte is copied twice, nor that of a weight."""
    tables = small_plan(model=MODEL | {"options": {"num_blocks": 1}}, activations=HOST, batch__global_size=2)
    with assemble(plan_from_dict(tables, texts), World.alone("cpu")) as run:
        keys: list[tuple[int, int]] = []
        policy = run.caller.policy
        prepared = policy._fits

        def sent(tensor: torch.Tensor) -> Any:
            keys.append((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()))
            return prepared(tensor)

        policy._fits = sent
        run.step()
        own_ones = {param.parameter.untyped_storage().data_ptr() for param in run.registry}
        own_ones |= {buffer.untyped_storage().data_ptr() for layer in run.layers for buffer in layer.module.buffers()}
    micro = 2 * 24
    # LayerNorm: input, mean, rstd; qkv's input; q, k, v as one; attention's two; dropouts are off; two linears, relu, sigmoid.
    assert not {address for address, _ in keys} & own_ones
    assert len(keys) == len(set(keys))
    assert sum(size == 8 * micro * 3 * 16 for _, size in keys) == 1, "q, k and v are one storage"


def test_host_memory_is_used_again(as_kept: Any) -> None:
    counts = as_kept(HOST, model=MODEL, batch__global_size=16)
    assert counts["host_allocations"] < counts["moved_storages"] / 12, "24 micro-batches share one's buffers"
    assert counts["host_bytes"] <= 1.02 * counts["max_away_bytes"] + 4096 * counts["host_allocations"]


def test_a_budget_is_kept(as_kept: Any) -> None:
    free = as_kept(HOST, model=MODEL)
    counts = as_kept(HOST | {"budget_bytes": 40_000}, model=MODEL)
    assert 20_000 < counts["max_away_bytes"] <= 40_000
    assert counts["over_budget_bytes"] == free["moved_bytes"] - counts["moved_bytes"] > 0
    counts = as_kept(HOST | {"budget_bytes": 0}, model=MODEL)
    assert (counts["moved_bytes"], counts["over_budget_bytes"]) == (0, free["moved_bytes"])


def test_chosen_layers(as_kept: Any) -> None:
    every = as_kept(HOST, model=MODEL)["moved_bytes"]
    assert as_kept(HOST | {"layers": 1}, model=MODEL)["moved_bytes"] == every / 3
    assert as_kept(HOST | {"layers": ["2", "3"]}, model=MODEL)["moved_bytes"] == every * 2 / 3
    assert as_kept(HOST | {"layers": 9}, model=MODEL)["moved_bytes"] == every


def test_layers_that_are_not_there(texts: Path) -> None:
    with pytest.raises(PlanError, match=r"no layer has the name `block\.1`") as caught:
        assemble(plan_from_dict(small_plan(activations=HOST | {"layers": ["block.1"]}), texts), World.alone("cpu"))
    assert caught.value.diagnostics[0].code == "unknown-layer"


def test_all_but_the_last_block_comes_back_ahead(own: Path, texts: Path) -> None:
    """The head's backward calls the last block's back, and each block's that of the one before; none is waited for."""
    tables = small_plan(model=MODEL | {"options": {"num_blocks": 4}}, activations=HOST)
    with assemble(plan_from_dict(tables, texts), World.alone("cpu")) as run:
        run.step()
        assert run.counts["memory.host"]["fetched_on_demand"] == 0


def test_a_step_that_fails_leaves_nothing(own: Path, texts: Path) -> None:
    import attending

    tables = small_plan(model=MODEL, activations=HOST)
    with assemble(plan_from_dict(tables, texts), World.alone("cpu")) as run:
        run.step()
        buffers = run.caller.policy.arena
        made = buffers.num_allocations
        for _ in range(3):
            attending.FAILS[0] = True
            with pytest.raises(ValueError, match="asked to fail"):
                run.step()
            attending.FAILS[0] = False
            gc.collect()
            run.step()
            assert buffers.num_lent_bytes == 0
        assert buffers.num_allocations == made
        policy = run.caller.policy
    assert (buffers.num_bytes, list(policy.held())) == (0, []), "the run is closed"


def test_what_is_written_on_after_it_was_saved_is_refused(own: Path, texts: Path) -> None:
    """Autograd does not look where tensors are packed; without a word the backward would use other numbers."""
    for size in (1, 2**30):
        tables = small_plan(model=MODEL | {"options": {"in_place": True}}, activations=HOST | {"min_bytes": size})
        with assemble(plan_from_dict(tables, texts), World.alone("cpu")) as run:
            with pytest.raises(RunError, match="written on in place") as caught:
                run.step()
            assert caught.value.diagnostics[0].code == "saved-in-place"


@pytest.mark.parametrize("kind", SHARING)
def test_what_shares_a_storage_alone_comes_back_as_autograd_saw_it(as_kept: Any, kind: str) -> None:
    model = {"factory": "sharing:sharing", "options": {"kind": kind}}
    counts = as_kept(HOST | {"layers": ["*"]}, model=model, evaluation=None)
    assert counts["moved_bytes"] > 0


@pytest.mark.parametrize("kind", ["data", "unsafe_chunk"])
def test_a_layer_that_writes_to_what_another_saved_is_refused_in_the_first_step(texts: Path, kind: str) -> None:
    """`core.keep` would use what was written; on the host is what was saved. The next attempt begins clean."""
    model = {"factory": "sharing:spoiled", "options": {"kind": kind}}
    tables = small_plan(model=model, activations=HOST | {"layers": ["*"]})
    with assemble(plan_from_dict(tables, texts), World.alone("cpu")) as run:
        with pytest.raises(RunError, match="that shares its memory") as caught:
            run.step()
        assert caught.value.diagnostics[0].code == "saved-in-place"
        policy = run.caller.policy
        run.layers[2].module.forward = lambda h: h
        run.step()
        del caught
        gc.collect()
        assert policy.arena.num_lent_bytes == 0
