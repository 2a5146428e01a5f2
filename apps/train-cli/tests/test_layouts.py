"""Layouts: canonical sums have one hash in all of them, any goes on from a checkpoint of any other, activations that are moved
or kept change no bit, and on CUDA each has the numbers of one process.
"""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import LAYOUTS, SHARDED, layout_of, num_ranks, staged
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from sley_checkpoint.reader import read
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_core.weight_files.read import WeightFiles
from sley_testing.checkpointer_contract import Stretch, assert_resumed_parity, assert_same_stretch, save_at, stretch
from sley_testing.parity import Bits, differing_names, digest, train_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Recorded, assert_parity_of_parts, assert_same_run, record, running

PLAN = small_plan(
    run__steps=6,
    model__ffn_hidden=27,
    model__vocab_size=257,
    model__tie_embeddings=True,
    data__sequence=16,
    batch__micro_size=1,
    optimizer__weight_decay=0.1,
    learning_rate={"use": "core.cosine"},
    evaluation={"every": 2, "steps": 1},
)
"""257 tokens and 27 channels divide by no number of ranks: shards are padded."""


# -- what is counted --------------------------------------------------------------------------------------------------------


def counted(tables: Tables, folder: Path) -> list[list[float]]:
    """Tokens, train_bits ones and 10^12 FLOPs of all devices, of two steps."""
    with running(tables, folder) as run:
        rows = [run.step() for _ in range(2)]
        return [[row["tokens"], row["trained_tokens"], row["tflops"] * row["seconds"] * run.world.size] for row in rows]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["wp2 sp2", "dp2 bucketed", "wp2 wdp2 sharded", "pp2 dp2 sharded"])
def test_a_step_has_the_tokens_and_flops_of_one_process(ranks: Any, texts: Path, layout: str):
    """With frozen parts, and however much is computed again."""
    plan = changed(PLAN, optimizer__groups=[{"match": "blocks.0.*", "freeze": True}, {"match": "*.up.weight", "freeze": True}])
    tables = layout_of(layout, plan, activations={"use": "core.recompute"})
    alone, *more = [counted(plan, texts), *ranks(num_ranks(tables))(counted, tables, texts)]
    assert alone[0][2] < counted(PLAN, texts)[0][2]
    assert alone[0][0] == 8 * 16 > alone[0][1] > 8 * 8, "no label is across documents"
    for every in more:
        assert every == [pytest.approx(row, rel=1e-12) for row in alone]


# -- canonical sums: one hash of weights, masters, optimizer states, losses and norms -----------------------------------

CANONICAL = changed(PLAN, precision__compute="fp32", parallel__reduction="canonical")
PRECISIONS: dict[str, Tables] = {
    "fp32": {},
    "bf16": {"precision__compute": "bf16"},
    "bf16 sums": {"precision": {"compute": "bf16", "gradients": "bf16"}},
}
WITHOUT_SLICES = [name for name in LAYOUTS if name != "alone" and "sp2" not in name]


@cache
def alone(folder: Path, precision: str) -> Bits:
    return train_bits(changed(CANONICAL, **PRECISIONS[precision]), 2, folder=folder)


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", WITHOUT_SLICES)
def test_every_layout_has_the_hash_of_one_process(ranks: Any, texts: Path, layout: str, precision: str):
    tables = layout_of(layout, CANONICAL, **PRECISIONS[precision])
    found = ranks(num_ranks(tables), 180)(train_bits, tables, 2, folder=texts)
    assert differing_names([alone(texts, precision)], found) == []
    assert digest([alone(texts, precision)]) == digest(found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dp3 sharded", "pp2", "wp2", "dp2 each"])
def test_numbers_that_are_no_powers_of_two_have_one_hash_too(ranks: Any, texts: Path, layout: str):
    """Six microbatches: a rank of two has three, which are two sums of the tree, and hands over both."""
    six = changed(CANONICAL, batch__global_size=6)
    tables = changed(six, parallel__dp=3, **SHARDED) if layout == "dp3 sharded" else layout_of(layout, six)
    found = ranks(num_ranks(tables), 180)(train_bits, tables, 2, folder=texts)
    assert differing_names([train_bits(six, 2, folder=texts)], found) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["core.sgd", "core.adamw"])
@pytest.mark.parametrize("layout", ["dp2 bucketed", "wp2", "wp2 wdp2 sharded", "zero bubble", "wp2 pp2", "recomputed"])
def test_weights_that_a_layer_uses_more_than_once(ranks: Any, layout: str, optimizer: str):
    """Biases, an embedding with padding, dropout, and weights that autograd alone knows, in bf16 with masters."""
    plan = changed(
        CANONICAL,
        model={"factory": "canonical_parts:layers"},
        data={"factory": "drawn_model:Rows"},
        optimizer={"use": optimizer, "lr": 1e-2, "clip_norm": 0.1} | ({"momentum": 0.9} if optimizer == "core.sgd" else {}),
        precision__compute="bf16",
        evaluation=None,
    )
    is_layout = layout in LAYOUTS
    tables = layout_of(layout, plan) if is_layout else changed(plan, activations={"use": "core.recompute"})
    found = ranks(num_ranks(tables), 180)(train_bits, tables, 2)
    assert differing_names([train_bits(plan, 2)], found) == []


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"gradient_handlers": [{"use": "dp.bucketed", "reduction": "bf16"}]}, "gradient_handlers.0.use"),
        ({"gradient_handlers": [{"use": "powersgd.reducer"}]}, "gradient_handlers.0.use"),
        ({"gradient_handlers": [{"use": "dp.sharded", "shards": 2}]}, "gradient_handlers.0.shards"),
        ({"weights": {"use": "isp.communicator", "head": "vocabulary"}}, "weights.head"),
        ({"weights": {"use": "isp.communicator", "embedding": "hidden"}}, "weights.embedding"),
        ({"weights": {"use": "isp.communicator", "reduce": "step"}}, "weights.reduce"),
        ({}, None),
    ],
)
def test_options_that_add_in_another_order_are_refused(texts: Path, changes: Tables, path: str | None):
    wp = 2 if "weights" in changes else 1
    plan = plan_from_dict(changed(CANONICAL, parallel__dp=4, parallel__wp=wp, **changes), texts)
    found = [(problem.code, ".".join(map(str, problem.path))) for problem in check_plan(plan, 4)]
    assert found == ([("canonical-unsupported", path)] if path else [])


IN_CI = ["dp2 bucketed", "wp2", "zero bubble v dp2"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "layout", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.campaign) for name in WITHOUT_SLICES]
)
def test_fast_sums_have_another_hash(ranks: Any, texts: Path, layout: str):
    """Their numbers are as good: so the tests above see the tree, and nothing else."""
    tables = layout_of(layout, CANONICAL, parallel__reduction="fast")
    found = ranks(num_ranks(tables), 180)(train_bits, tables, 2, folder=texts)
    canonical = alone(texts, "fp32")
    assert [name for name in differing_names([canonical], found) if name.endswith("weight")]
    for name in ("step 2: loss", "step 2: grad_norm"):
        wanted, other = (float.fromhex(bits[name].decode()) for bits in (canonical, found[0]))
        assert math.isclose(wanted, other, rel_tol=1e-4), (name, wanted, other)


# -- checkpoints: what one layout wrote, any other goes on from ---------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dp2 sharded", "wp2"])
def test_torch_puts_the_pieces_of_a_layout_together(texts: Path, tmp_path: Path, ranks: Any, layout: str) -> None:
    """Its reader and its consolidation, of tensors that are cut in the middle of rows, or padded in memory.

    Of numbers without dims, as an optimizer's count of steps, the consolidation of torch 2.13 writes zeros.
    """
    ranks(2)(stretch, layout_of(layout, PLAN), 1, folder=texts, save=tmp_path / "saved")
    wanted = read(tmp_path / "saved")
    assert any(len(facts.pieces) > 1 for facts in wanted.index.tensors.values()), "or else nothing would be shown"
    state = {name: torch.zeros_like(wanted[name]) for name in wanted}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "saved")), no_dist=True)
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    (tmp_path / "whole").mkdir()
    files = {name: 1 + number % 2 for number, name in enumerate(wanted)}
    consolidate_safetensors_files(str(tmp_path / "saved"), str(tmp_path / "whole"), files)
    whole = WeightFiles(tmp_path / "whole")
    assert set(whole.names) == set(wanted)
    assert all(torch.equal(whole.tensor(name), wanted[name]) for name in wanted if wanted.kind(name).shape)


def stopped_and_not(tables: Tables, texts: Path, path: Path) -> list[Stretch]:
    """Takes four steps, with a checkpoint after two; then two from there."""
    whole = stretch(tables, 4, folder=texts, prepare=partial(save_at, 2, path))
    return [whole, stretch(tables, 2, folder=texts, load=path)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [*LAYOUTS][::-1])
def test_the_same_layout_goes_on_bit_for_bit(ranks: Any, texts: Path, tmp_path: Path, layout: str) -> None:
    tables = layout_of(layout, PLAN, precision={"compute": "bf16", "gradients": "bf16"})
    every = ranks(num_ranks(tables), 120)(stopped_and_not, tables, texts, tmp_path / "saved")
    assert_same_stretch([rank[0] for rank in every], [rank[1] for rank in every])


def others(layouts: list[Tables], texts: Path, path: Path) -> list[Stretch]:
    """Two steps from a checkpoint, in each of these layouts, one after the other in the same ranks."""
    return [stretch(tables, 2, folder=texts, load=path) for tables in layouts]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("written", "num_others"),
    [*(("dp2 sharded", 1), ("wp2 wdp2 sharded", 1)), *(pytest.param(name, 2, marks=pytest.mark.campaign) for name in LAYOUTS)],
)
def test_another_layout_goes_on_within_parity(ranks: Any, texts: Path, tmp_path: Path, written: str, num_others: int) -> None:
    """As many layouts of each number of ranks go on from it."""
    (whole,) = ranks(1).once(stretch, PLAN, 4, folder=texts)
    tables = layout_of(written, PLAN)
    ranks(num_ranks(tables), 120)(stretch, tables, 2, folder=texts, save=tmp_path / "saved")
    for size in (1, 2, 4):
        same = [other for name in LAYOUTS if name != written and num_ranks(other := layout_of(name, PLAN)) == size]
        chosen = same[[*LAYOUTS].index(written) % len(same) :][:num_others] if same else []
        every = ranks(size, 120)(others, chosen, texts, tmp_path / "saved")
        for at in range(len(chosen)):
            assert_resumed_parity(whole, [rank[at] for rank in every], "fp64")


# -- activations that `memory` moves or keeps --------------------------------------------------------------------------

POLICIES: list[Tables] = [
    {"use": "core.keep"},
    {"use": "core.recompute"},
    {"use": "memory.host", "min_bytes": 256},
    {"use": "memory.selective"},
]
MODULES = {"use": "isp.communicator", "unit": "module", "head": "vocabulary", "embedding": "hidden"}
ACTIVATIONS: dict[str, Tables] = {
    # two layers or more in each part: the last one's activations stay
    "stages": changed(PLAN, **staged("zero_bubble_v"), model__num_layers=6, partition={"use": "pp.uniform"}),
    "shards": layout_of("wp2", PLAN),
    "shards of modules": layout_of("wp2", PLAN, weights=MODULES, model__tie_embeddings=False),
}


def watched(tables: Tables, folder: Path) -> tuple[Recorded, dict[str, dict[str, float]], bool]:
    """Returns this rank's recorded run; its counts by counter, with those of the first step under "first"; and whether memory
    of a pool was moved.
    """
    counts: dict[str, dict[str, float]] = {}
    is_leased = False
    name = tables["activations"]["use"]

    def prepare(run: Any) -> None:
        if name == "memory.host":
            policy, is_movable = run.caller.policy, run.caller.policy._is_movable

            def noted(tensor: Any, fixed: Any) -> bool:
                nonlocal is_leased
                spans = [(held.data_ptr(), held.data_ptr() + held.nbytes) for _, held in run.parts.pool.named_tensors()]
                leaves: bool = is_movable(tensor, fixed)
                is_leased |= leaves and any(first <= tensor.data_ptr() < last for first, last in spans)
                return leaves

            policy._is_movable = noted

        def count(row: Any) -> None:
            counts.update(run.counts)
            counts.setdefault("first", run.counts.get(name, {}))

        run.listeners.append(count)

    return record(tables, 3, folder=folder, prepare=prepare), counts, is_leased


def watched_all(plans: list[Tables], folder: Path) -> list[Any]:
    return [watched(tables, folder) for tables in plans]


def gathers(counts: dict[str, dict[str, float]]) -> dict[str, float]:
    own = counts.get("isp.communicator", {})
    return {name: value for name, value in own.items() if "gather" in name or "allocations" in name}


@pytest.mark.sample(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("layout", ACTIVATIONS)
def test_activations_that_leave_change_no_bit(ranks: Any, texts: Path, layout: str) -> None:
    """A layer that runs again gathers as often as with `core.recompute`, and none that waits on the host gathers more."""
    plans = [changed(ACTIVATIONS[layout], activations=policy) for policy in POLICIES]
    for keep, recompute, host, selective in ranks(2, 160)(watched_all, plans, texts):
        assert_same_run(keep[0], host[0])
        assert_same_run(keep[0], selective[0])
        first, moved = host[1]["first"], host[1]["memory.host"]
        # In the first step memory leaves behind the next layer: a backward that follows at once finds it still here.
        assert first["moved_bytes"] >= first["fetched_bytes"] > 0
        assert moved["moved_bytes"] - first["moved_bytes"] == moved["fetched_bytes"] - first["fetched_bytes"] > 0
        assert moved["host_allocations"] < moved["moved_storages"] / 4
        assert not host[2], "memory of a pool left"
        assert selective[1]["memory.selective"]["kept_attentions"] > 0
        assert gathers(host[1]) == gathers(keep[1])
        assert gathers(selective[1]) == gathers(recompute[1])


# -- on CUDA -----------------------------------------------------------------------------------------------------------

ON_CUDA = changed(PLAN, run__device="cuda")
"""Ranks share one device: by gloo, or by NCCL where it lets them (NCCL_MULTI_RANK_GPU_ENABLE=1)."""

SHORT = ["dp2 bucketed", "dp2 sharded", "wp2", "interleaved"]
CASES = [("fp64", name) for name in LAYOUTS if name not in ("alone", "dp2 each", "dp4 sharded", "wp2 sp2", "pp2")]
CASES += [("canonical", "dp2 bucketed"), *((compute, name) for compute in ("fp32", "bf16") for name in SHORT)]


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("compute", "name"), CASES)
def test_a_layout_on_cuda_has_the_numbers_of_one_process(ranks: Any, texts: Path, compute: str, name: str) -> None:
    is_canonical = compute == "canonical"
    compute = "fp64" if is_canonical else compute
    plan = changed(ON_CUDA, precision__compute=compute)
    tables = layout_of(name, plan, **({"parallel__reduction": "canonical"} if is_canonical else {}))
    found = ranks(num_ranks(tables), timeout_s=180, init=False)(record, tables, 3, folder=texts)
    assert_parity_of_parts(record(plan, 3, folder=texts), found, compute)


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_runs_on_cuda_go_on_from_checkpoints(ranks: Any, texts: Path, tmp_path: Path) -> None:
    """Of one process bit for bit, and of another layout within parity."""
    narrow = changed(ON_CUDA, precision__compute="bf16")
    whole = stretch(narrow, 6, folder=texts, prepare=partial(save_at, 3, tmp_path / "alone"))
    assert_same_stretch([whole], [stretch(narrow, 3, folder=texts, load=tmp_path / "alone")])
    whole = stretch(ON_CUDA, 6, folder=texts)
    first, second = (layout_of(name, ON_CUDA) for name in ("dp2 sharded", "wp2"))
    ranks(2, timeout_s=180, init=False)(stretch, first, 3, folder=texts, save=tmp_path / "saved")
    after = ranks(2, timeout_s=180, init=False)(stretch, second, 3, folder=texts, load=tmp_path / "saved")
    assert_resumed_parity(whole, after, "fp64")
