"""The engine on CUDA: the numbers of the CPU, nothing in a step that waits for the device, two ranks on one device."""

import pytest
import torch

from sley_testing.parity import relative_errors
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_equal_replicas, assert_parity, record, running

pytestmark = pytest.mark.gpu

TEXT = {"use": "data.text", "source": "python-stdlib", "sequence": 64, "documents": "pack"}
PLAN = small_plan(run__device="cuda", model__hidden=64, model__ffn_hidden=None, data=TEXT)


def plan(**changes):
    return changed(PLAN, **changes)


@pytest.mark.parametrize("documents", ["pack", "pad", "cut"])
def test_cuda_equals_the_cpu(documents):
    reference = record(plan(run__device="cpu", data__documents=documents), 3)
    assert_parity(reference, [record(plan(data__documents=documents), 3)], "fp64")


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_two_ranks_on_one_device_equal_one(ranks, fraction):
    tables = plan(activations__use="core.recompute", activations__fraction=fraction)
    reference = record(tables, 3)
    layouts = ranks(2, timeout_s=180, init=False)(record, tables, 3)
    assert_parity(reference, layouts, "fp64")
    assert_equal_replicas(layouts)


def test_bf16_is_near_fp32_and_keeps_masters():
    wide = record(plan(precision__compute="fp32"), 1)
    narrow = record(plan(precision__compute="bf16"), 1)
    errors = relative_errors(wide.gradients[0], narrow.gradients[0])
    assert max(errors.values()) < 0.05, errors
    assert {value.dtype for value in narrow.gradients[0].values()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__compile": True},
        {"batch__micro_size": 1},
        {"activations__use": "core.recompute"},
        {"offload": [{"use": "memory.optimizer_states", "when": "between_steps"}]},
        {"activations": {"use": "memory.host", "layers": 1}},
    ],
    ids=["eager", "compiled", "microbatches", "recompute", "states offloaded", "activations offloaded"],
)
def test_a_step_never_waits_for_the_device(changes):
    """CUDA raises an error at any synchronisation between the launch of a step and the reading of its row."""
    if "offload" in changes or "activations" in changes:
        pytest.importorskip("sley_memory")
    with running(plan(precision__compute="bf16", **changes)) as run:
        for _ in range(2):
            run.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = run.launch(None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert launched.totals.read().is_finite


def test_rows_read_late_are_the_rows_read_at_once():
    with running(plan()) as run:
        late = []
        run.listeners.append(late.append)
        assert run.train() == "finished"
    with running(plan()) as run:
        at_once = [run.step() for _ in range(3)]
    for one, other in zip(late, at_once, strict=True):
        assert all(one[key] == other[key] for key in ("step", "loss", "grad_norm", "lr", "tokens"))


def test_rows_tell_memory_and_utilisation():
    with running(plan(precision__compute="bf16")) as run:
        row = run.step()
        assert 0 < row["memory_mb"] < 1000
        assert 0 < row["mfu"] < 1
        assert run.memory.bytes["masters"] == 2 * run.memory.bytes["weights"]


def test_a_caller_on_another_stream_gets_the_same_numbers():
    """The run waits for the caller's earlier work, and the caller's later work waits for the run."""
    expected = record(plan(), 3)
    with running(plan()) as run, torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        rows = [run.step() for _ in range(3)]
        sums = {param.name: param.parameter.detach().sum() for param in run.registry}  # on the caller's stream
    torch.cuda.synchronize()
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected.rows]
    for name, total in sums.items():
        assert total.item() == pytest.approx(expected.weights[name].sum().item(), rel=1e-10), name


def test_a_save_in_the_background_has_the_weights_of_its_step(tmp_path):
    """The copies to the host follow the update, and the next step's update waits for them."""
    pytest.importorskip("sley_checkpoint")
    checkpoint = {"folder": str(tmp_path), "every_steps": 1, "keep": 9}
    with running(plan(checkpoint=checkpoint, precision__compute="bf16")) as run:
        run.step()
        expected = {param.name: param.parameter.detach().clone() for param in run.registry}
        for _ in range(3):
            run.step()
    with running(plan(precision__compute="bf16")) as run:
        run.load_checkpoint(tmp_path / "step-00000001")
        for param in run.registry:
            assert torch.equal(param.parameter, expected[param.name]), param.name
