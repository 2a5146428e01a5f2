"""Tests that master weights and states on the host give the bits of a run that has them on the device."""

import pytest
import torch

from sley_core.memory import Where
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import record, record_reference, running, weights

STEPS = 5

SMALL_BUCKETS = [{"use": "memory.host_optimizer", "bucket_mb": 0.004}]
ONE_BUCKET = [{"use": "memory.host_optimizer"}]

ALONE = {
    "fp64": {},
    "bf16": {"precision__compute": "bf16"},
    "fp32 without clipping": {"precision__compute": "fp32", "optimizer": {"use": "core.adamw", "lr": 3e-3}},
    "fp16 that overflows": {"precision": {"compute": "fp16", "loss_scale": {"init_scale": 2.0**24, "backoff_factor": 0.0625}}},
    "momentum, two groups": {
        "precision__compute": "bf16",
        "optimizer": {
            "use": "core.sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "groups": [{"match": "blocks.0.*", "lr": 0.01}, {"match": "embed.*", "freeze": True}],
        },
    },
    "four microbatches": {"batch__micro_size": 1, "batch__global_size": 4, "precision__compute": "bf16"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("offload", [SMALL_BUCKETS, ONE_BUCKET], ids=["small buckets", "one bucket"])
@pytest.mark.parametrize("changes", ALONE.values(), ids=ALONE.keys())
def test_one_process_has_the_same_bits(changes, offload, texts):
    tables = small_plan(**changes)
    wanted = record_reference(tables, STEPS, folder=texts)
    found = record(changed(tables, offload=offload), STEPS, folder=texts)
    assert_same_bits(wanted.weights, found.weights)
    assert any(not torch.equal(first, wanted.weights[name]) for name, first in wanted.initial_weights.items()), (
        "no step was taken"
    )
    assert str([row["loss"] for row in wanted.rows]) == str([row["loss"] for row in found.rows])
    assert str([row["grad_norm"] for row in wanted.rows]) == str([row["grad_norm"] for row in found.rows])


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_weights_that_a_program_writes_reach_the_masters(compute, texts):
    """The program writes by `load_weights`, and to a parameter between two steps."""
    found = []
    for offload in ([], SMALL_BUCKETS):
        with running(small_plan(precision__compute=compute, offload=offload or None), texts) as run:
            run.step()
            run.load_weights({name: value * 0.5 for name, value in weights(run).items() if "norm" not in name}, strict=False)
            run.step()
            with torch.no_grad():
                run.registry["blocks.1.attention_norm.weight"].parameter.fill_(0.25)
            run.step()
            found.append(weights(run))
    assert_same_bits(*found)


def test_the_host_holds_only_two_buckets_of_gradients(texts):
    with running(small_plan(precision__compute="bf16", offload=SMALL_BUCKETS), texts) as run:
        run.step()
        moved = run.memory.report
        trained = sum(param.numel for param in run.registry.trainable)
        assert moved["optimizer_states"].copied_out == 4 * trained
        assert moved["masters"].copied_in == 2 * trained
        largest = max(param.numel for param in run.registry.trainable)
        page = 4096
        assert moved["optimizer_states"].host_bytes <= 2 * (6 * max(largest, 1000) + 2 * page)
        assert run.memory.where["masters"] is Where.AWAY
        run.memory.offload().wait()
        run.memory.onload().wait()
        run.step()
