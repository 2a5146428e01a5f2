"""Tests ranks that share host copies of equal memory: equal bits, fewer bytes, and the refusal of different calls."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack

import pytest
import torch
from parking import offload_and_onload, running, state_digest

from sley_core.errors import RunError, StateError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing import ranks as testing_ranks
from sley_testing.plans import changed, small_plan
from sley_testing.ranks import RankError

pytestmark = pytest.mark.timeout(240)

SHARED = [{"use": "memory.everything", "bucket_mb": 0.008, "shared": True}]
WHOLE = [{"use": "memory.everything", "bucket_mb": 0.008}]
REPLICAS = small_plan(precision__compute="bf16", parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}])
PARTS = changed(REPLICAS, gradient_handlers=[{"use": "dp.sharded", "bucket_mb": 0.002}])
SHARDS = changed(REPLICAS, parallel={"dp": 4, "wp": 2}, weights={"use": "isp.communicator"}, batch__micro_size=1)


def run_plain_full_and_shared(tables, folder):
    """Returns the digest, rows and report of two steps without offload, with full host copies, and with shared ones."""
    found = []
    for offload in ([], WHOLE, SHARED):
        with running({**tables, "offload": offload}, folder) as run:
            rows = []
            for _ in range(2):
                row = run.step()
                rows.append((row["loss"], row["grad_norm"]))
                if offload:
                    offload_and_onload(run)
            found.append((state_digest(run), rows, {part: vars(moved) for part, moved in run.memory.report.items()}))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("tables", "size", "alike"),
    [
        (REPLICAS, 2, ("weights", "masters", "optimizer_states")),
        (PARTS, 2, ("weights",)),
        pytest.param(SHARDS, 4, ("weights", "masters", "optimizer_states"), marks=pytest.mark.campaign),
    ],
    ids=["replicas", "sharded optimizer", "sharded weights"],
)
def test_shared_copies_have_equal_bits_and_half_the_bytes(ranks, texts, tables, size, alike):
    """Memory of which each rank updates a part is kept in full, since no other rank has it."""
    results = ranks(size, 180)(run_plain_full_and_shared, tables, texts)
    for part in alike:  # the padding of a rank's half counts as no bytes, so the halves may differ
        full_bytes, shared_bytes = (sum(result[kind][2][part]["copied_out"] for result in results) for kind in (1, 2))
        assert shared_bytes <= 0.5 * full_bytes, part
    for plain, whole, shared in results:
        assert whole[:2] == plain[:2]
        assert shared[:2] == plain[:2]
        for part in ("weights", "masters", "optimizer_states"):
            one, other = whole[2][part], shared[2][part]
            if part in alike:
                assert other["host_bytes"] < 0.55 * one["host_bytes"] + 4096, part
                assert other["gathered"] >= other["copied_in"] > 0, part
            else:
                assert (other["copied_out"], other["host_bytes"]) == (one["copied_out"], one["host_bytes"]), part
                assert other["gathered"] == 0
            assert other["given_back"] == one["given_back"], part


def check_distinct_memory(folder):
    """Asserts that a buffer and a weight with different values on all ranks keep them."""
    with running({**REPLICAS, "offload": SHARED}, folder) as run:
        rank = run.world.rank
        module = run.layers[1].module
        run.step()
        module.register_buffer("counted", torch.full((500,), float(rank)))
        weight = run.registry["blocks.1.attention_norm.weight"].parameter
        with torch.no_grad():
            weight.fill_(rank + 1)
        offload_and_onload(run)
        assert (module.counted == rank).all()
        assert (weight == rank + 1).all()
        return True


def test_memory_that_differs_is_kept_in_full(ranks, texts):
    assert ranks(2)(check_distinct_memory, texts) == [True, True]


def make_different_calls(folder):
    """Returns the errors of calls that differ between ranks, and a weight after the run. Asserts that the errors change no
    state.
    """
    found = []
    with running({**REPLICAS, "offload": SHARED}, folder) as run:
        run.step()
        rank = run.world.rank
        before = state_digest(run)
        calls = [
            lambda: run.memory.offload("weights" if rank else "masters"),
            lambda: run.memory.onload("weights") if rank else run.memory.offload("weights"),
        ]
        for call in calls:
            with pytest.raises(RunError) as error:
                call()
            found.append(str(error.value))
            assert run.memory.bytes["weights"] > 0
        assert state_digest(run) == before
        run.memory.offload()
        with pytest.raises(StateError, match="reading on the host needs the run's weights, but they are offloaded"):
            list(run.memory.host("weights"))
        with pytest.raises(StateError, match="a step needs the run's weights, but they are offloaded"):
            run.step()
        num_bytes = run.memory.report["weights"].copied_out
        run.memory.offload()
        assert run.memory.report["weights"].copied_out == num_bytes
        run.memory.onload()
        assert state_digest(run) == before
        run.step()
        run.memory.offload()
        parameter = run.registry["blocks.1.attention_norm.weight"].parameter
    return found, parameter.float().tolist()


def test_different_calls_are_refused_before_memory_is_freed(ranks, texts):
    """A run that closes while its weights are away leaves them to the program, on all ranks."""
    (found, weight), (others, same) = ranks(2)(make_different_calls, texts)
    assert found == others
    assert "ranks-differ" in found[0]
    assert "rank 1 calls `run.memory.offload` for weights that are on the device" in found[0]
    assert "rank 0 calls `run.memory.offload` for masters that are on the device" in found[0]
    assert "rank 1 calls `run.memory.onload` for weights that are on the device" in found[1]
    assert weight == same
    assert all(0.5 < value < 1.5 for value in weight)


def close_without_peer(folder, to):
    """Kills rank 1 while all memory is away, and writes the warnings, the weights and the seconds of the close of rank 0."""
    tables = {**REPLICAS, "offload": SHARED, "limits": {"collective_timeout_s": 10}}
    with ExitStack() as stack:
        run = stack.enter_context(running(tables, folder))
        run.step()
        parameter = run.registry["blocks.1.attention_norm.weight"].parameter
        run.memory.offload()
        if run.world.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.warns(RuntimeWarning) as told:
            stack.close()
    seconds = time.monotonic() - began
    found = [sorted(str(one.message) for one in told), parameter.isnan().all().item(), seconds]
    to.write_text(json.dumps(found), "utf-8")


def test_closing_without_peers_names_lost_parts(ranks, texts, tmp_path, monkeypatch):
    """Half of the memory was on the host of the killed rank, so no weight has a value. No rank waits for it."""
    monkeypatch.setattr(testing_ranks, "GRACE_S", 30.0)
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(2)(close_without_peer, texts, tmp_path / "found")
    told, is_nan, seconds = json.loads((tmp_path / "found").read_text("utf-8"))
    lost = "the run was closed while its {} were offloaded, but not all ranks answered, so they are lost"
    assert told == [lost.format(part) for part in ("buffers", "weights")], "what a program has after a run"
    assert is_nan
    assert seconds < 20


def test_states_that_move_in_every_step_cannot_be_shared(texts):
    between = [{"use": "memory.optimizer_states", "when": "between_steps", "shared": True}]
    codes = {problem.code for problem in check_plan(plan_from_dict({**REPLICAS, "offload": between}, texts), 2)}
    assert "shared-between-steps" in codes
