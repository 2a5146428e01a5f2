"""What is estimated for one process is what the allocator says of its run: to the byte between steps, nearly so at the peak."""

from __future__ import annotations

import pytest

from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.rank import rank_bytes
from sley_testing.live_bytes import real_bytes
from sley_testing.plans import changed, small_plan

PLAN = small_plan(
    model={"use": "models.llama", "num_layers": 2, "hidden": 128, "heads": 4},
    data__sequence=64,
    batch__global_size=4,
    precision={"compute": "fp32"},
)
"""Of a megabyte and more, so that bytes are the tensors' and not those of a batch, a seed or a list of names."""

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
def test_it_is_what_the_allocator_says(texts, changes):
    tables = changed(PLAN, **changes)
    real = real_bytes(tables, 2, folder=texts)
    estimated = rank_bytes(plan_from_dict(tables, texts), 0, 1)
    print(f"real {real}, estimated {estimated}")
    assert estimated.states == real.states
    assert estimated.peak - estimated.batch == pytest.approx(real.peak, rel=0.01)


def test_a_device_has_no_scratch_of_the_cpus_operators(texts):
    """Its kernels read several types; between steps both hold the same."""
    on_cpu, on_device = (
        rank_bytes(plan_from_dict(changed(PLAN, precision={"compute": "fp16"}, run__device=device), texts), 0, 1)
        for device in ("cpu", "cuda")
    )
    assert on_device.states == on_cpu.states
    both = list(zip(on_device.curve, on_cpu.curve, strict=True))
    assert all(device.num_bytes <= cpu.num_bytes for device, cpu in both)
    assert any(device.num_bytes < cpu.num_bytes for device, cpu in both)


def test_what_was_alive_at_the_peak_is_the_peak(texts):
    """Nothing is left out of the parts, and the curve has the peak where it is said to be."""
    found = rank_bytes(plan_from_dict(PLAN, texts), 0, 1)
    assert sum(found.alive.values()) == found.peak
    assert max(moment.num_bytes for moment in found.curve) == found.peak
    assert (found.place.entry, found.peak) in [(moment.entry, moment.num_bytes) for moment in found.curve]
    assert found.alive["weights"] == found.states["weights"]
    assert found.alive["activations"] > 0


def test_many_micro_batches_are_told_by_a_few(texts):
    """The list of a step without stages holds one micro-batch at a time, however many there are: only the batch grows."""
    few, many = (rank_bytes(plan_from_dict(changed(PLAN, batch__global_size=size), texts), 0, 1) for size in (6, 400))
    assert (many.num_micros, many.of_micros) == (3, 200)
    assert many.peak - many.batch == few.peak - few.batch
    assert many.batch * 6 == few.batch * 400


def test_a_layer_that_asks_for_values_is_named(texts, own_layers):
    tables = changed(PLAN, model={"factory": "asking_layers:layers"})
    with pytest.raises(
        RunError, match=r"without the values .*_local_scalar_dense.* layer `asks` \(Asks\) of micro-batch 0"
    ) as caught:
        rank_bytes(plan_from_dict(tables, own_layers), 0, 1)
    assert caught.value.diagnostics[0].code == "estimate-layer"


def test_a_layer_may_ask_for_what_the_batch_says(texts, own_layers):
    """Lengths, bounds and places follow from the batch, which has values."""
    tables = changed(PLAN, model={"factory": "asking_layers:layers_that_ask_the_batch"})
    assert rank_bytes(plan_from_dict(tables, own_layers), 0, 1).peak > 0
