"""Every layout has the bits of one process with canonical sums, resumes any other layout's checkpoint, and counts the same
tokens. Activations that are moved or kept change no bit. On CUDA each layout has the numbers of one process. Exchanges and
memory pools are counted.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import LAYOUTS, layout_of, num_ranks
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from sley_checkpoint.reader import read
from sley_core.weight_files.read import WeightFiles
from sley_testing.parity import assert_same_bits, train_tensors
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import (
    RunRecord,
    assert_parity_of_parts,
    assert_resumed_parity,
    assert_same_run,
    record,
    record_reference,
    running,
    save_at,
)

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
"""257 tokens and 27 channels are no multiples of a number of ranks, so shards are padded."""


def step_counts(tables: Tables, folder: Path) -> list[float]:
    """Returns the tokens, the trained tokens, and the TFLOPs of all devices, for a step."""
    with running(tables, folder) as run:
        row = run.step()
        return [row["tokens"], row["trained_tokens"], row["tflops"] * row["seconds"] * run.world.size]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["wp2 sp2", "dp2 bucketed", "wp2 wdp2 sharded", "pp2 dp2 sharded"])
def test_tokens_and_flops_equal_one_process(ranks: Any, texts: Path, layout: str) -> None:
    """Frozen weights need fewer FLOPs; recomputation does not count."""
    plan = changed(PLAN, optimizer__groups=[{"match": "blocks.0.*", "freeze": True}, {"match": "*.up.weight", "freeze": True}])
    tables = layout_of(layout, plan, activations={"use": "core.recompute"})
    expected = step_counts(plan, texts)
    assert expected[2] < step_counts(PLAN, texts)[2]
    assert expected[0] == 8 * 16 > expected[1] > 8 * 8, "labels across documents do not count"
    for counts in ranks(num_ranks(tables))(step_counts, tables, texts):
        assert counts == pytest.approx(expected, rel=1e-12)


# -- canonical sums: equal hashes of weights, master weights, optimizer states, losses and norms -------------------------

CANONICAL = changed(PLAN, precision__compute="fp32", parallel__reduction="canonical")
PRECISIONS: dict[str, Tables] = {
    "fp32": {},
    "bf16": {"precision__compute": "bf16"},
    "bf16 sums": {"precision": {"compute": "bf16", "gradients": "bf16"}},
}
WITHOUT_SLICES = [name for name in LAYOUTS if name != "alone" and "sp2" not in name]


@cache
def one_process_tensors(folder: Path, precision: str) -> dict[str, torch.Tensor]:
    return train_tensors(changed(CANONICAL, **PRECISIONS[precision]), 2, folder=folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", WITHOUT_SLICES)
def test_canonical_sums_have_the_bits_of_one_process(ranks: Any, texts: Path, layout: str, precision: str) -> None:
    tables = layout_of(layout, CANONICAL, **PRECISIONS[precision])
    for tensors in ranks(num_ranks(tables), 180)(train_tensors, tables, 2, folder=texts):
        assert_same_bits(one_process_tensors(texts, precision), tensors)


def test_fast_sums_have_other_bits(ranks: Any, texts: Path) -> None:
    """So the tests above can fail. The numbers are close."""
    tables = layout_of("dp2 bucketed", CANONICAL, parallel__reduction="fast")
    fast, canonical = ranks(2, 180)(train_tensors, tables, 2, folder=texts)[0], one_process_tensors(texts, "fp32")
    assert any(not torch.equal(canonical[name], value) for name, value in fast.items() if name.endswith("weight"))
    for name in ("step 2: loss", "step 2: grad_norm"):
        torch.testing.assert_close(fast[name], canonical[name], rtol=1e-4, atol=0.0)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dp2 sharded", "wp2"])
def test_torch_merges_the_pieces_of_a_checkpoint(texts: Path, tmp_path: Path, ranks: Any, layout: str) -> None:
    """Pieces start in the middle of rows, or are padded in memory. The consolidation of torch 2.13 writes zeros for scalars."""
    ranks(2)(record, layout_of(layout, PLAN), 1, folder=texts, save=tmp_path / "saved")
    expected = read(tmp_path / "saved")
    assert any(len(tensor.pieces) > 1 for tensor in expected.index.tensors.values())
    state = {name: torch.zeros_like(expected[name]) for name in expected}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "saved")), no_dist=True)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    (tmp_path / "merged").mkdir()
    file_numbers = {name: 1 + number % 2 for number, name in enumerate(expected)}
    consolidate_safetensors_files(str(tmp_path / "saved"), str(tmp_path / "merged"), file_numbers)
    merged = WeightFiles(tmp_path / "merged")
    assert set(merged.names) == set(expected)
    assert all(torch.equal(merged.tensor(name), expected[name]) for name in expected if expected.info(name).shape)


def train_and_resume(tables: Tables, texts: Path, path: Path) -> list[RunRecord]:
    """Takes two steps with a checkpoint after the first, and then one step from the checkpoint."""
    uninterrupted = record(tables, 2, folder=texts, prepare=partial(save_at, 1, path))
    return [uninterrupted, record(tables, 1, folder=texts, load=path)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [*LAYOUTS][::-1])
def test_a_resumed_layout_has_the_same_bits(ranks: Any, texts: Path, tmp_path: Path, layout: str) -> None:
    tables = layout_of(layout, PLAN, precision={"compute": "bf16", "gradients": "bf16"})
    for uninterrupted, resumed in ranks(num_ranks(tables), 120)(train_and_resume, tables, texts, tmp_path / "saved"):
        assert_same_run(uninterrupted, resumed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [*LAYOUTS][2:])
@pytest.mark.parametrize("size", [4, 2])
def test_other_layouts_resume_a_checkpoint(ranks: Any, texts: Path, tmp_path: Path, layout: str, size: int) -> None:
    """A layout of two or four ranks resumes the checkpoint within the tolerance of fp64."""
    uninterrupted = record_reference(PLAN, 2, folder=texts)
    tables = layout_of(layout, PLAN)
    ranks(num_ranks(tables), 120)(record, tables, 1, folder=texts, save=tmp_path / "saved")
    targets = [target for name in LAYOUTS if name != layout and num_ranks(target := layout_of(name, PLAN)) == size]
    target = targets[[*LAYOUTS].index(layout) % len(targets)]
    resumed = ranks(size, 120)(record, target, 1, folder=texts, load=tmp_path / "saved")
    assert_resumed_parity(uninterrupted, resumed, "fp64")


# -- activations -------------------------------------------------------------------------------------------------------

POLICIES: list[Tables] = [
    {"use": "core.keep"},
    {"use": "core.recompute"},
    {"use": "memory.host", "min_bytes": 256},
    {"use": "memory.selective"},
]
MODULES = {"use": "isp.communicator", "unit": "module", "head": "vocabulary", "embedding": "hidden"}
FEW = changed(PLAN, batch__global_size=6, evaluation=None)
SHARDED: dict[str, Tables] = {
    "layers": layout_of("wp2", FEW),
    "modules": layout_of("wp2", FEW, weights=MODULES, model__tie_embeddings=False),
}
Counts = dict[str, dict[str, float]]


def record_policies(tables: Tables, folder: Path) -> list[tuple[RunRecord, Counts]]:
    """Returns the recorded run of each policy on this rank, and its counts."""
    results = []
    for policy in POLICIES:
        counts: Counts = {}

        def prepare(run: Any, counts: Counts = counts) -> None:
            run.listeners.append(lambda _: counts.update(run.counts))

        results.append((record(changed(tables, activations=policy), 2, folder=folder, prepare=prepare), counts))
    return results


def gather_counts(counts: Counts) -> dict[str, float]:
    isp_counts = counts["isp.communicator"].items()
    return {name: value for name, value in isp_counts if "gather" in name or "allocations" in name}


@pytest.mark.sample(1)
@pytest.mark.parametrize("unit", SHARDED)
def test_activation_policies_change_no_bit(ranks: Any, texts: Path, unit: str) -> None:
    """Moved activations need no additional gathers, and recomputed layers need those of `core.recompute`."""
    for keep, recompute, host, selective in ranks(2, 160)(record_policies, SHARDED[unit], texts):
        assert_same_run(keep[0], host[0])
        assert_same_run(keep[0], selective[0])
        moved = host[1]["memory.host"]
        assert moved["moved_bytes"] >= moved["fetched_bytes"] > 0
        assert moved["host_allocations"] < moved["moved_storages"] / 4
        assert selective[1]["memory.selective"]["kept_attentions"] > 0
        assert gather_counts(host[1]) == gather_counts(keep[1])
        assert gather_counts(selective[1]) == gather_counts(recompute[1])


# -- CUDA --------------------------------------------------------------------------------------------------------------

ON_CUDA = changed(PLAN, run__device="cuda")
"""Ranks share one device, by gloo, or by NCCL if NCCL_MULTI_RANK_GPU_ENABLE=1."""

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
    recorded = ranks(num_ranks(tables), timeout_s=180, init=False)(record, tables, 3, folder=texts)
    assert_parity_of_parts(record(plan, 3, folder=texts), recorded, compute)


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_connections", ["8", "32"])
def test_streams_that_share_driver_queues_do_not_wait_for_each_other(
    ranks: Any, texts: Path, monkeypatch: pytest.MonkeyPatch, num_connections: str
) -> None:
    """A run has more than eight streams, and an interleaved stage posts receives ahead."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", num_connections)
    offload = [{"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01}]
    tables = layout_of("interleaved", ON_CUDA, offload=offload)
    recorded = ranks(2, timeout_s=180, init=False)(record, tables, 3, folder=texts)
    assert_parity_of_parts(record(ON_CUDA, 3, folder=texts), recorded, "fp64")


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_runs_on_cuda_resume_from_checkpoints(ranks: Any, texts: Path, tmp_path: Path) -> None:
    """One process has the same bits; another layout has numbers within the tolerance."""
    narrow = changed(ON_CUDA, precision__compute="bf16")
    uninterrupted = record(narrow, 6, folder=texts, prepare=partial(save_at, 3, tmp_path / "alone"))
    assert_same_run(uninterrupted, record(narrow, 3, folder=texts, load=tmp_path / "alone"))
    uninterrupted = record(ON_CUDA, 6, folder=texts)
    first, second = (layout_of(name, ON_CUDA) for name in ("dp2 sharded", "wp2"))
    ranks(2, timeout_s=180, init=False)(record, first, 3, folder=texts, save=tmp_path / "saved")
    resumed = ranks(2, timeout_s=180, init=False)(record, second, 3, folder=texts, load=tmp_path / "saved")
    assert_resumed_parity(uninterrupted, resumed, "fp64")


# -- counts of exchanges and memory pools ------------------------------------------------------------------------------


HELD_OUT = {"evaluation": {"every": 9, "steps": 1}}
ISP = {"use": "isp.communicator"}
SENT = "sent_bytes_per_step"
EXCHANGES: dict[str, Tables] = {
    "each": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]},
    "bucketed": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed"}]},
    "bf16": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed", "reduction": "bf16"}]},
    "low rank": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "powersgd.reducer", "rank": 1, "start_step": 2}]},
    "stages": {"parallel": {"pp": 2}, "pipeline": {"use": "pp.gpipe"}, "model__tie_embeddings": True},
    "weights": {"parallel": {"dp": 2, "wp": 2}, "weights": ISP},
}


def sent_bytes(plans: dict[str, Tables], folder: Path) -> dict[str, tuple[dict[str, Any], int, int]]:
    """Returns the counts of two steps of each plan on this rank, the bytes of its gradients, and those of tied gradients."""
    results = {}
    for name, tables in plans.items():
        with running(tables, folder) as run:
            run.step()
            run.step()
            run.evaluate()  # an evaluation after the last step does not count
            gradients = {param: run.store.gradient(param).nbytes for param in run.registry}
            ties = sum(size for param, size in gradients.items() if param.tie_axis)
            results[name] = run.counts, sum(gradients.values()), ties
    return results


def test_handlers_and_links_count_sent_bytes(ranks: Any, texts: Path) -> None:
    """Over two ranks an all-reduce sends as many bytes as it sums."""
    plans = {name: small_plan(**changes, **HELD_OUT) for name, changes in EXCHANGES.items()}
    for results in ranks(2)(sent_bytes, plans, texts):
        counts = {name: rank[0] for name, rank in results.items()}
        each, bucketed = counts["each"]["core.each"][SENT], counts["bucketed"]["dp.bucketed"][SENT]
        assert each == results["each"][1]
        assert each <= bucketed < 1.2 * each  # with what aligns gradients
        assert counts["bf16"]["dp.bucketed"][SENT] == pytest.approx(bucketed / 4, rel=0.01)
        assert 0 < counts["low rank"]["powersgd.reducer"][SENT] < each / 3
        assert counts["stages"]["pp.shared_modules"][SENT] == results["stages"][2] > 0
        messages = 4 * 2 * 24 * 16 * 8  # microbatches of samples of tokens of width 16 in fp64
        assert messages < counts["stages"]["pp.link"][SENT] < messages + 4 * 4096  # with heads
        isp = counts["weights"]["isp.communicator"]
        assert isp[SENT] == isp["gathered_bytes_per_step"] + isp["reduced_bytes_per_step"] > 0


POOLED = small_plan(
    model__vocab_size=257,
    batch__micro_size=1,
    parallel={"pp": 2, "dp": 2, "wp": 2},
    pipeline={"use": "pp.zero_bubble_h1"},
    weights=ISP,
)


def record_pool(folder: Path) -> list[dict[str, float]]:
    """Returns the counts of the pool after each of three steps."""
    counts: list[dict[str, float]] = []

    def prepare(run: Any) -> None:
        run.listeners.append(lambda _: counts.append(run.counts["core.pool"]))

    record(POOLED, 3, folder=folder, prepare=prepare)
    return counts


def test_weights_and_messages_share_a_pool(ranks: Any, texts: Path) -> None:
    """Nothing is allocated after the second step, and no buffer is lent after a step."""
    for counts in ranks(4, 180)(record_pool, texts):
        assert counts[1]["allocations"] == counts[2]["allocations"] > 0
        assert counts[2]["hit_rate"] > 0.8
        assert counts[2]["lent_bytes"] == 0
