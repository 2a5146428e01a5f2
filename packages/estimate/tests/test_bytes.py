"""Tests that every storage counts once, and that estimated bytes equal those of the allocator."""

import os
from functools import partial
from itertools import count
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes import fake_tensors
from sley_estimate.bytes.fake_tensors import FakeTensors, Ledger, StageTooLargeError
from sley_estimate.bytes.rank import _run_forked, run_rank
from sley_testing.live_bytes import measure_bytes
from sley_testing.plans import changed, small_plan


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_aliases_count_once(ledger):
    with FakeTensors(ledger):
        tensor = torch.empty(100)
        view = tensor[10:20].view(2, 5)
        assert ledger.current_bytes == 400
        del tensor
        assert ledger.current_bytes == 400
        del view
    assert ledger.current_bytes == 0
    assert ledger.peak()[0] == 400


def test_resized_storage_is_counted_again(ledger):
    tensors = FakeTensors(ledger)
    with tensors.patch_torch(), tensors:
        tensor = torch.empty(100)
        tensor.untyped_storage().resize_(0)
        assert ledger.current_bytes == 0
        tensor.untyped_storage().resize_(400)
        assert ledger.current_bytes == 400
    assert [allocation.num_bytes for allocation in ledger.allocations] == [400, 400]


def test_weak_reference_does_not_hide_a_free(ledger):
    """torch's weak reference keeps the Python object of the storage alive."""
    tensors = FakeTensors(ledger)
    with tensors.patch_torch(), tensors:
        tensor = torch.empty(100)
        reference = StorageWeakRef(tensor.untyped_storage())
        alias = torch.empty(0).set_(tensor.untyped_storage())
        del tensor, alias
        assert reference.expired()
        small = torch.empty(1)
        assert ledger.current_bytes == small.nbytes


def test_addresses_do_not_overlap(ledger):
    tensors = FakeTensors(ledger)
    with tensors.patch_torch(), tensors:
        tensors_ = torch.empty(100), torch.empty(7)
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors_)
        assert 0 < spans[0][0] < spans[0][1] <= spans[1][0]
        assert tensors_[0][3:].data_ptr() == tensors_[0].data_ptr() + 12
    assert torch.empty(3).data_ptr() != 0


def allocations() -> list[tuple[int, int, int | None]]:
    ledger = Ledger()
    with FakeTensors(ledger):
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            heads = model(torch.randn(4, 6, 8)).unflatten(-1, (2, 4)).transpose(1, 2)
            nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [(item.num_bytes, item.allocated_at, item.freed_at) for item in ledger.allocations]


def test_cached_results_equal_those_of_torch():
    replay, calls = FakeTensors._replay_result, count()

    def replay_and_count(tensors, *args):
        next(calls)
        return replay(tensors, *args)

    with patch.object(FakeTensors, "_replay_result", replay_and_count):
        cached = allocations()
    assert next(calls) > 50
    with patch.object(fake_tensors, "_call_key", lambda *_: None):
        assert allocations() == cached


PLAN = small_plan(
    model={"use": "models.llama", "num_layers": 2, "hidden": 128, "heads": 4},
    data__sequence=64,
    batch__global_size=4,
    precision={"compute": "fp32"},
)
"""A plan of at least a megabyte, so that the bytes of a batch, a seed or a list of names do not matter."""
CASES = {
    "plain": {},
    "recomputed": {"activations": {"use": "core.recompute"}},
    "narrow, with masters": {"precision": {"compute": "bf16"}},
    "scaled": {"precision": {"compute": "fp16"}},
    "fused SGD, tied": {"optimizer": {"use": "core.sgd", "lr": 0.1, "momentum": 0.9}, "model__tie_embeddings": True},
    "by factory": {"optimizer": {"factory": "torch.optim:RMSprop", "lr": 0.01}},
    "canonical": {"parallel": {"reduction": "canonical"}, "batch__micro_size": 1},
    "frozen": {"optimizer__groups": [{"match": "embed.*", "freeze": True}]},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_estimate_equals_allocator(texts, changes):
    tables = changed(PLAN, **changes)
    real = measure_bytes(tables, 2, folder=texts)
    estimated = run_rank(plan_from_dict(tables, texts), 0, 1)[0]
    print(f"real {real}, estimated {estimated}")
    assert estimated.states == real.states
    assert estimated.peak - estimated.batch == pytest.approx(real.peak, rel=0.01)


def test_cuda_has_no_scratch_of_cpu_operators(texts):
    """CUDA kernels read several dtypes. Between steps both devices hold the same bytes."""
    tables = changed(PLAN, precision={"compute": "fp16"}, model__num_layers=1, batch__global_size=2)
    on_cpu, on_device = (
        run_rank(plan_from_dict(changed(tables, run__device=device), texts), 0, 1)[0] for device in ("cpu", "cuda")
    )
    assert on_device.states == on_cpu.states
    pairs = list(zip(on_device.curve, on_cpu.curve, strict=True))
    assert all(device[1] <= cpu[1] for device, cpu in pairs)
    assert any(device[1] < cpu[1] for device, cpu in pairs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("offload", [[], [{"use": "memory.host_optimizer"}]], ids=["on device", "on host"])
def test_rank_that_needs_more_bytes_than_allowed_is_reported(texts, device, offload):
    plan = plan_from_dict(changed(PLAN, run__device=device, offload=offload), texts)
    peak = run_rank(plan, 0, 1)[0].peak
    assert run_rank(plan, 0, 1, max_bytes=peak)[0].peak == peak
    with pytest.raises(StageTooLargeError):
        run_rank(plan, 0, 1, max_bytes=peak - 1)


def test_owners_and_curve_contain_peak(texts):
    estimate = run_rank(plan_from_dict(PLAN, texts), 0, 1)[0]
    assert sum(estimate.alive.values()) == estimate.peak
    assert max(num_bytes for _, num_bytes in estimate.curve) == estimate.peak
    assert (estimate.position.entry, estimate.peak) in estimate.curve
    assert estimate.alive["weights"] == estimate.states["weights"]
    assert estimate.alive["activations"] > 0


class ReadsValues(nn.Embedding):
    """Returns scaled logits, after clamping those with large values."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = self.weight.detach().mean()  # no buffer

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens) * self.scale
        return logits.clamp(max=1.0) if logits.abs().max() > 1 else logits


def layers() -> list[tuple[str, nn.Module]]:
    return [("reads", ReadsValues(256, 256)), ("head", nn.Linear(256, 256))]


STAGES = {"parallel": {"dp": 1, "pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"reads values of tensors.*_local_scalar_dense.* layer `reads` \(ReadsValues\) in microbatch 0"),
        (STAGES, r"the layer 'reads' \(ReadsValues\) cannot run without values: "),
    ],
)
def test_layer_that_reads_values_is_reported(texts, changes, message):
    plan = plan_from_dict(changed(PLAN, model={"factory": f"{__name__}:layers"}, **changes), texts)
    with pytest.raises(RunError, match=message) as caught:
        run_rank(plan, plan.parallel.pp - 1, plan.parallel.pp)
    assert caught.value.diagnostics[0].code == "estimate-layer"


def test_process_that_ends_is_reported():
    with pytest.raises(RunError, match="a process that simulated the steps of a stage ended unexpectedly"):
        list(_run_forked([partial(os._exit, 1)], 1))
