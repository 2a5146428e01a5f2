"""Ranks that share the host's copies of what they hold alike: the same bits, fewer bytes, and no rank that goes its own way."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack

import pytest
import torch
from parking import cycle, running, sha

from sley_core.errors import RunError, StateError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing import ranks as testing_ranks
from sley_testing.plans import changed, small_plan
from sley_testing.ranks import RankError

pytestmark = pytest.mark.timeout(240)

SHARED = [{"use": "memory.everything", "bucket_mb": 0.002, "shared": True}]
WHOLE = [{"use": "memory.everything", "bucket_mb": 0.002}]
REPLICAS = small_plan(precision__compute="bf16", parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}])
PARTS = changed(REPLICAS, gradient_handlers=[{"use": "dp.sharded", "bucket_mb": 0.002}])
SHARDS = changed(REPLICAS, parallel={"dp": 4, "wp": 2}, weights={"use": "isp.communicator"}, batch__micro_size=1)


def both_ways(tables, folder):
    """The digest, rows and report of three steps with nothing away, all parked whole, and all shared; on the same ranks."""
    found = []
    for offload in ([], WHOLE, SHARED):
        with running({**tables, "offload": offload}, folder) as run:
            rows = []
            for _ in range(3):
                row = run.step()
                rows.append((row["loss"], row["grad_norm"]))
                if offload:
                    cycle(run)
            found.append((sha(run), rows, {part: vars(moved) for part, moved in run.memory.report.items()}))
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
def test_each_rank_keeps_its_part_and_has_the_bits_of_one_that_keeps_all(ranks, texts, tables, size, alike):
    """What each steps a part of is kept whole, as nobody else has it."""
    for plain, whole, shared in ranks(size, 180)(both_ways, tables, texts):
        assert whole[:2] == plain[:2]
        assert shared[:2] == plain[:2]
        for part in ("weights", "masters", "optimizer_states"):
            one, other = whole[2][part], shared[2][part]
            if part in alike:
                assert other["copied_out"] < 0.55 * one["copied_out"], part
                assert other["host_bytes"] < 0.55 * one["host_bytes"] + 4096, part
                assert other["gathered"] == other["copied_in"] > 0, part
            else:
                assert (other["copied_out"], other["host_bytes"]) == (one["copied_out"], one["host_bytes"]), part
                assert other["gathered"] == 0
            assert other["given_back"] == one["given_back"], part


def what_differs(folder):
    """A buffer and a weight of which each rank has another value; what a second offload copies that found nothing new."""
    with running({**REPLICAS, "offload": SHARED}, folder) as run:
        rank = run.world.rank
        module = run.layers[1].module
        run.step()
        module.register_buffer("counted", torch.full((500,), float(rank)))
        weight = run.registry["blocks.1.attention_norm.weight"].parameter
        with torch.no_grad():
            weight.fill_(rank + 1)
        cycle(run)
        assert (module.counted == rank).all()
        assert (weight == rank + 1).all()
        return True


def test_what_differs_between_ranks_is_kept_whole(ranks, texts):
    assert ranks(2)(what_differs, texts) == [True, True]


def goes_its_own_way(folder):
    """What is refused, and that everything is as it was after it."""
    found = []
    with running({**REPLICAS, "offload": SHARED}, folder) as run:
        run.step()
        rank = run.world.rank
        before = sha(run)
        calls = [
            lambda: run.memory.offload("weights" if rank else "masters"),
            lambda: run.memory.onload("weights") if rank else run.memory.offload("weights"),
        ]
        for call in calls:
            with pytest.raises(RunError) as error:
                call()
            found.append(str(error.value))
            assert run.memory.bytes["weights"] > 0
        assert sha(run) == before
        run.memory.offload()
        with pytest.raises(StateError, match="reading on the host needs the run's weights, but they are offloaded"):
            list(run.memory.host("weights"))
        with pytest.raises(StateError, match="a step needs the run's weights, but they are offloaded"):
            run.step()
        run.memory.offload()
        assert run.memory.report["weights"].num_no_ops == 1
        run.memory.onload()
        assert sha(run) == before
        run.step()
        run.memory.offload()
        parameter = run.registry["blocks.1.attention_norm.weight"].parameter
    return found, parameter.float().tolist()


def test_a_rank_that_goes_its_own_way_is_named_before_anything_is_freed(ranks, texts):
    """And a run that closes while its weights are away leaves them to the program, on all ranks."""
    (found, weight), (others, same) = ranks(2)(goes_its_own_way, texts)
    assert found == others
    assert "ranks-differ" in found[0]
    assert "rank 1 calls `run.memory.offload` for weights that are on the device" in found[0]
    assert "rank 0 calls `run.memory.offload` for masters that are on the device" in found[0]
    assert "rank 1 calls `run.memory.onload` for weights that are on the device" in found[1]
    assert weight == same
    assert all(0.5 < value < 1.5 for value in weight)


def closes_alone(folder, to):
    """Rank 1 is killed while everything is away; what rank 0 is told as it closes, what its weights are, and after how long."""
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


def test_a_run_that_closes_without_its_peers_says_what_is_lost_and_has_no_numbers_there(ranks, texts, tmp_path, monkeypatch):
    """Half of what it had was on the host of the rank that was killed: no weight is a number, and nobody waits."""
    monkeypatch.setattr(testing_ranks, "GRACE_S", 30.0)
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(2)(closes_alone, texts, tmp_path / "found")
    told, is_nan, seconds = json.loads((tmp_path / "found").read_text("utf-8"))
    lost = "the run was closed while its {} were offloaded, but not all ranks answered, so they are lost"
    assert told == [lost.format(part) for part in ("buffers", "weights")], "what a program has after a run"
    assert is_nan
    assert seconds < 20


def test_states_that_come_and_go_in_every_step_are_not_shared(texts):
    between = [{"use": "memory.optimizer_states", "when": "between_steps", "shared": True}]
    codes = {problem.code for problem in check_plan(plan_from_dict({**REPLICAS, "offload": between}, texts), 2)}
    assert "shared-between-steps" in codes
