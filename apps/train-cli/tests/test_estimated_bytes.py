"""Estimated bytes equal those of the allocators of ranks; an estimate without one thing does not.

Stages of one kind are looked at once, and several in processes of their own: both change no number.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sley_core.assemble import build_draft
from sley_core.comm.world import World
from sley_core.engine.shards import Shard
from sley_core.errors import RunError, SleyError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes import rank as steps
from sley_estimate.bytes import stages
from sley_estimate.bytes.fake_tensors import OpResultCache
from sley_estimate.bytes.ledger import Ledger
from sley_estimate.bytes.rank import RankBytes, fake_run, rank_bytes
from sley_estimate.bytes.stages import build_first_draft, can_fork, run_forked, stage_bytes, stage_memory_keys
from sley_estimate.step.estimate import record_stages
from sley_estimate.step.record import RankRecord
from sley_models import llama
from sley_testing.live_bytes import RealBytes, real_bytes
from sley_testing.plans import Tables, changed, small_plan

EXAMPLES = Path(__file__).parents[3] / "examples" / "plans"
PLAN = small_plan(
    model={"use": "models.llama", "num_layers": 6, "hidden": 128, "heads": 4}, data__sequence=64, precision={"compute": "fp32"}
)
"""Of megabytes, so that bytes are the tensors', and of a layer for each of two chunks of four stages."""
SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]
USUAL, MOST = 0.01, 0.03
"""How far an estimated peak may be from the real one, relative: in 19 of 20 cases, and in all."""


def drawn(draw: random.Random, world: int, folder: Path) -> Tables:
    """A plan over `world` ranks that `check` allows."""
    while True:
        pp = draw.choice([size for size in (1, 2, 4) if world % size == 0])
        sp, wp = (draw.choice([size for size in (1, 2) if world // pp % size == 0]) for _ in range(2))
        tables = changed(PLAN, parallel={"pp": pp, "sp": sp, "dp": world // pp // sp, "wp": wp})
        tables["parallel"]["cross_memory_attach"] = draw.random() < 0.7
        tables["batch"] = {"global_size": max(4, 2 * world), "micro_size": draw.choice([1, 2])}
        tables["precision"] = {"compute": draw.choice(["fp32", "bf16", "fp16"])}
        if tables["precision"]["compute"] == "bf16" and draw.random() < 0.5:
            tables["precision"]["gradients"] = "bf16"
        if draw.random() < 0.25 and sp == 1:
            tables["model"] = {"factory": "estimated_layers:layers", "options": {"depth": 6}}
        else:
            tables["model"] |= {"tie_embeddings": draw.random() < 0.4, "kv_heads": draw.choice([2, 4])}
        if pp > 1:
            tables["pipeline"] = {"use": draw.choice(SCHEDULES)}
        if sp > 1:
            tables["sequence"] = {"use": "isp.all_to_all"}
        if wp > 1:
            unit, ahead = draw.choice(["layer", "module"]), draw.choice([0, 1, 2])
            head = draw.choice(["gather", "vocabulary"]) if "use" in tables["model"] else "gather"
            tables["weights"] = {"use": "isp.communicator", "unit": unit, "ahead": ahead, "head": head}
        reducer = draw.choice(["dp.bucketed", "dp.sharded"])
        tie = [{"use": "pp.shared_modules"}] if pp > 1 and tables["model"].get("tie_embeddings") else []
        if draw.random() < 0.7:
            tables["gradient_handlers"] = [{"use": reducer, "bucket_mb": draw.choice([0.1, 25.0])}, *tie]
        elif tie:
            tables["gradient_handlers"] = [{"use": "core.each"}, *tie]
        if sp == wp == 1 and draw.random() < 0.15:
            tables["parallel"]["reduction"] = "canonical"
        policies = ["core.keep", "core.recompute", "memory.selective", "memory.host"]
        tables["activations"] = {"use": draw.choice(policies)}
        if draw.random() < 0.3:
            states = {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.5}
            tables["offload"] = [draw.choice([states, {"use": "memory.host_optimizer", "bucket_mb": 0.5}])]
        try:
            if not check_plan(plan_from_dict(tables, folder), world):
                return tables
        except SleyError:  # what `check` cannot be asked of
            continue


@pytest.mark.parametrize(
    ("world", "num_plans"),
    [
        (2, 1),
        pytest.param(1, 40, marks=pytest.mark.campaign),
        pytest.param(2, 70, marks=pytest.mark.campaign),
        pytest.param(4, 60, marks=pytest.mark.campaign),
        pytest.param(8, 30, marks=pytest.mark.campaign),
    ],
)
def test_a_drawn_plan_takes_what_was_estimated(ranks: Any, texts: Path, world: int, num_plans: int) -> None:
    """States to the byte, on every rank; the peak nearly so, on the rank where it is worst."""
    seed = 13 if num_plans < 10 else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed * 100 + world)
    plans = [drawn(draw, world, texts) for _ in range(num_plans)]
    errors = [worst_error(tables, texts, ranks(world, 200)(real_bytes, tables, folder=texts)) for tables in plans]
    far = sorted(map(abs, errors))
    print("the peak is off by (median, 95 %, most):", far[len(far) // 2], far[int(0.95 * (len(far) - 1))], far[-1])
    assert far[-1] <= MOST
    assert far[int(0.95 * (len(far) - 1))] <= USUAL


def worst_error(tables: Tables, folder: Path, real: Sequence[RealBytes]) -> float:
    """How far the estimated peak is from the real one, relative, on the rank where it is farthest. inf if states differ."""
    errors = []
    for (table, key), value in real[0].plan_values.items():
        tables = changed(tables, **{f"{table}__{key}": value})
    recipes = OpResultCache()
    for rank, one in enumerate(real):
        estimated = rank_bytes(plan_from_dict(tables, folder), rank, len(real), recipes)
        errors.append((estimated.peak - estimated.batch - one.peak) / one.peak)
        print(f"{errors[-1]:+.4f} of {one.peak} on rank {rank} of {len(real)}, at {estimated.position}: {tables}", flush=True)
        if estimated.states != one.states:
            print(f"estimated {estimated.states}, but there are {one.states}")
            return math.inf
    return max(errors, key=abs)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout",
    [{"parallel": {"dp": 2, "wp": 2}}, {"parallel": {"pp": 4, "dp": 2, "wp": 2}, "pipeline": {"use": "pp.zero_bubble_h1"}}],
)
def test_states_that_come_into_full_pools_count_with_them(ranks: Any, texts: Path, layout: Tables) -> None:
    """Optimizer states are there twice when they first leave, side by side, behind a step of several microbatches."""
    tables = changed(
        PLAN,
        model={"factory": "estimated_layers:layers", "options": {"depth": 6}},
        batch={"global_size": 16 if "pipeline" in layout else 4, "micro_size": 1},
        weights={"use": "isp.communicator", "unit": "layer", "ahead": 1},
        activations={"use": "core.recompute"},
        offload=[{"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.5}],
        **layout,
    )
    world = layout["parallel"].get("pp", 1) * layout["parallel"]["dp"]
    real = ranks(world, 200)(real_bytes, tables, folder=texts)
    assert abs(worst_error(tables, texts, real)) <= USUAL


@pytest.mark.campaign
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_takes_what_was_estimated(ranks: Any, path: Path) -> None:
    tables = tomllib.loads(path.read_text("utf-8"))
    size = plan_from_dict(tables, path.parent).world()
    real = ranks(size, 200)(real_bytes, tables, folder=path.parent)
    assert abs(worst_error(tables, path.parent, real)) <= MOST


TINY = small_plan(
    model={"use": "models.llama", "num_layers": 1, "hidden": 128, "heads": 4, "vocab_size": 259},
    data__sequence=64,
    data__documents="cut",
    precision={"compute": "bf16"},
)
SHARDED = changed(
    TINY, parallel={"wp": 2, "dp": 2}, model__tie_embeddings=True, weights={"use": "isp.communicator", "unit": "layer"}
)
"""Over a group whose size does not divide the vocabulary, and with a weight that two layers share."""
STAGED = changed(
    TINY,
    parallel={"pp": 2, "dp": 1},
    pipeline={"use": "pp.one_f_one_b"},
    batch={"global_size": 8, "micro_size": 1},
    model__vocab_size=1031,
)
"""With a last stage that is much larger than the next batch, which may or may not be there at the peak (6 KB)."""


def without_ties(patch: pytest.MonkeyPatch) -> None:
    """A weight of two layers counts twice."""
    tied = llama.build_llama
    patch.setattr(llama, "build_llama", lambda config, info: tied(config.model_copy(update={"tie_embeddings": False}), info))


def without_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shard, "size", property(lambda shard: shard.shape[shard.dim] // shard.count))


Patch = Callable[[pytest.MonkeyPatch], None]


def without(owner: str) -> Patch:
    """Returns a patch after which the estimate leaves out the tensors of `owner`."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        own = steps._set_owners

        def left_out(run: Any, ledger: Ledger, on_host: Collection[str]) -> None:
            own(run, ledger, on_host)
            for piece in ledger.allocations:
                piece.num_bytes = 0 if piece.owner == owner else piece.num_bytes

        patch.setattr(steps, "_set_owners", left_out)

    return patched


def without_transients(patch: pytest.MonkeyPatch) -> None:
    """Patches the estimate to leave out tensors that are freed within one action."""
    peak = Ledger.peak

    def of_what_stays(ledger: Ledger) -> tuple[int, int]:
        ledger.allocations = [
            piece for piece in ledger.allocations if steps.classify_allocation(piece) != "temporary buffers" or piece.owner
        ]
        return peak(ledger)

    patch.setattr(Ledger, "peak", of_what_stays)


def without_scratch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "scratch", lambda *_: None)


def without_one_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """One fewer is in flight than the schedule says."""
    patch.setattr(steps, "min_equivalent_micro_batches", lambda *_: 1)


OF_SHARDS: dict[str, Patch] = {"tie": without_ties, "padding": without_padding}
OF_STAGES: dict[str, Patch] = {
    "message": without("pools"),
    "transient": without_transients,
    "held microbatch": without_one_micro_batch,
    "scratch of an operator": without_scratch,
}


def is_right(real: list[RealBytes], tables: Tables, folder: Path) -> bool:
    """Whether states are equal on both ranks, and peaks as far apart as is usual at most."""
    for rank, one in enumerate(real):
        estimated = rank_bytes(plan_from_dict(tables, folder), rank, 2)
        print(estimated.states, one.states, estimated.peak - estimated.batch, one.peak)
        if estimated.states != one.states or abs(estimated.peak - estimated.batch - one.peak) > USUAL * one.peak:
            return False
    return True


@pytest.mark.sample(1)
@pytest.mark.parametrize(("tables", "mutants"), [(SHARDED, OF_SHARDS), (STAGED, OF_STAGES)], ids=["sharded", "staged"])
def test_the_whole_estimate_is_right_and_without_one_thing_it_is_wrong(
    ranks: Any, texts: Path, tables: Tables, mutants: dict[str, Patch]
) -> None:
    real = ranks(2, 60)(real_bytes, tables, folder=texts)
    assert is_right(real, tables, texts)
    for name, mutate in mutants.items():
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            assert not is_right(real, tables, texts), name


# -- stages ------------------------------------------------------------------------------------------------------------

PIPELINE = small_plan(
    model__num_layers=3,
    precision={"compute": "fp32"},
    parallel={"pp": 4, "dp": 2},
    batch={"global_size": 8, "micro_size": 1},
    pipeline={"use": "pp.gpipe"},
    partition={"use": "pp.explicit", "layers": [2, 1, 1, 1]},
    gradient_handlers=[{"use": "dp.sharded"}],
)
WORLD = 8
MANY = changed(
    PIPELINE,
    model__num_layers=2,
    parallel__pp=3,
    pipeline={"use": "pp.one_f_one_b"},
    partition={"use": "pp.explicit", "layers": [1, 2, 1]},
)
"""Of three kinds: each stage holds another number of microbatches. Of two, none would be looked at in another process."""


def kinds(tables: Tables, folder: Path) -> list[int]:
    """The number of the first stage that is like it, of each stage."""
    plan = plan_from_dict(tables, folder)
    with World.fake(0, WORLD) as world:
        found = stage_memory_keys(plan, plan.topology(WORLD), build_draft(plan, world))
    return [found.index(kind) for kind in found]


def one_by_one(tables: Tables, folder: Path) -> list[RankBytes]:
    plan = plan_from_dict(tables, folder)
    return [rank_bytes(plan, rank, plan.world()) for rank in range(0, plan.world(), 2)]


def test_stages_of_a_kind_hold_alike(texts: Path) -> None:
    assert kinds(PIPELINE, texts) == [0, 1, 1, 3]
    assert list(stage_bytes(plan_from_dict(PIPELINE, texts), WORLD)) == one_by_one(PIPELINE, texts)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__groups": [{"match": "blocks.2.*", "weight_decay": 0.0}]},
        {"activations": {"use": "memory.selective", "layers": ["blocks.2"]}},
        {"partition": {"use": "pp.explicit", "layers": [1, 1, 2, 1]}},
        {"pipeline": {"use": "pp.one_f_one_b"}},
    ],
    ids=["another group", "another policy", "more layers", "more in flight"],
)
def test_stages_that_differ_are_of_two_kinds(texts: Path, changes: Any) -> None:
    found = kinds(changed(PIPELINE, **changes), texts)
    assert found[1] != found[2]


def recorded(tables: Tables, folder: Path, cores: int) -> list[RankRecord]:
    plan = plan_from_dict(tables, folder)
    size = plan.world()
    return list(record_stages(plan, size, build_first_draft(plan, size), cores).ranks)


def in_forks(tables: Tables, folder: Path) -> tuple[list[RankBytes], list[RankRecord]]:
    assert can_fork()
    with patch.object(stages, "run_forked", wraps=run_forked) as used:
        plan = plan_from_dict(tables, folder)
        found = list(stage_bytes(plan, plan.world(), cores=2)), recorded(tables, folder, 2)
    assert used.call_count >= 4, "else nothing was done in a process of its own"
    return found


@pytest.mark.campaign
def test_processes_of_their_own_say_the_same(ranks: Any, texts: Path) -> None:
    ((num_bytes, steps),) = ranks(1, 100, init=False)(in_forks, MANY, texts)
    assert num_bytes == one_by_one(MANY, texts)
    assert steps == recorded(MANY, texts, 1)


def failing() -> None:
    raise RunError("estimate-layer", "it cannot be called")


def test_what_a_process_raises_is_raised_here() -> None:
    with pytest.raises(RunError, match="it cannot be called"):
        list(run_forked([failing], 2))


def test_the_start_has_no_weight_twice(texts: Path) -> None:
    """Values as they were made and gradients, both fp32; beside them the bucket to which values move, and masters."""
    model = {"use": "models.llama", "num_layers": 8, "hidden": 64, "heads": 4}
    reducer = {"use": "dp.sharded", "bucket_mb": 0.1}
    tables = small_plan(model=model, precision={"compute": "bf16"}, batch__global_size=16, gradient_handlers=[reducer])
    with fake_run(plan_from_dict(tables, texts), 0, 8) as (run, ledger, _):
        numel = sum(param.numel for param in run.registry)
        largest = max(buffer.num_bytes for buffer in run.parts.weights.buffers)
        peak, *_ = ledger.peak()
    assert largest < 0.1 * 4 * numel
    assert 8 * numel <= peak < 9 * numel + largest  # and half a byte of masters, and padding
