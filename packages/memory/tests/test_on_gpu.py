"""Tests on CUDA that memory returns to the driver, no second copy is made on the device, and no bit changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parking import run_three_variants

from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import WEIGHTS, record, record_reference, running

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]

MIB = 1 << 20
TEXT = {"use": "data.text", "source": "python-stdlib", "sequence": 64, "documents": "pack"}
LARGE = small_plan(
    run__device="cuda",
    model={"use": "models.llama", "num_layers": 4, "hidden": 2048, "heads": 16},
    data=TEXT,
    precision__compute="bf16",
    offload=[{"use": "memory.everything", "bucket_mb": 32}],
)


@pytest.fixture
def run():
    with running(LARGE) as made:
        made.step()
        yield made


def test_the_driver_gets_the_memory_back(run):
    """All but 2 MiB of the parts' memory is freed, and the driver gets 98 % of it."""
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    size = sum(run.memory.bytes.values())
    run.memory.offload().wait()
    assert before - torch.cuda.memory_allocated() >= size - 2 * MIB
    assert torch.cuda.mem_get_info()[0] - free >= 0.98 * size
    run.memory.onload()
    run.step()


def test_no_second_copy_is_made_on_the_device(run):
    """An onload needs at most the memory before the offload and a bucket."""
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        run.memory.offload().wait()
        assert torch.cuda.max_memory_allocated() <= before + 32 * MIB
        run.memory.onload().wait()
        assert torch.cuda.max_memory_allocated() <= before + 32 * MIB


PLAN = small_plan(
    run__device="cuda",
    model={"factory": "attending:layers", "options": {"num_blocks": 8, "hidden": 512, "dropout": 0.1}},
    data={"use": "data.text", "source": "python-stdlib", "sequence": 512, "documents": "pack"},
    precision__compute="bf16",
)
PEAKS: dict[str, dict[str, Any]] = {
    "memory.host": {"use": "memory.host", "layers": 7},
    "memory.selective": {"use": "memory.selective"},
}


@pytest.mark.parametrize("use", PEAKS)
def test_policies_lower_the_peak(own: Path, use: str) -> None:
    peaks = []
    for policy in ({"use": "core.keep"}, PEAKS[use]):
        with running(changed(PLAN, activations=policy)) as run:
            for _ in range(3):
                run.step()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            made = run.counts.get("memory.host", {}).get("host_allocations")
            run.step()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            assert run.counts.get("memory.host", {}).get("host_allocations") == made
    assert peaks[1] < 0.7 * peaks[0], peaks


def assert_same(plain, *others):
    for name, other in zip(("away between steps", "stepped in buckets"), others, strict=True):
        assert other[:2] == plain[:2], name
        assert other[2] > 0, f"{name}: nothing was moved"


POLICIES = [{"use": "memory.host", "layers": 1}, {"use": "memory.selective"}]
ON_HOST = [{"use": "memory.host_optimizer", "bucket_mb": 0.004}]


def on_gpu(**changes: Any) -> dict[str, Any]:
    return small_plan(run__device="cuda", **changes)


def test_moves_from_another_stream_change_no_bit(texts: Path) -> None:
    """Memory is freed and allocated on the run's stream, although the caller's current stream is another one."""

    def move(run: Any, _: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            run.memory.offload()
            run.memory.onload()

    tables = on_gpu(precision__compute="bf16", offload=[{"use": "memory.everything", "bucket_mb": 0.004}])
    expected, moved = record(tables, 4, folder=texts), record(tables, 4, folder=texts, before_step=move)
    assert [row["loss"] for row in expected.rows] == [row["loss"] for row in moved.rows]
    assert_same_bits(expected.weights, moved.weights)


@pytest.mark.parametrize("changes", [{"precision__compute": "bf16"}, {"batch__micro_size": 2}], ids=["bf16", "microbatches"])
def test_one_rank(changes: dict[str, Any], texts: Path) -> None:
    assert_same(*run_three_variants(on_gpu(**changes), texts))


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}},
        {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.002}]},
    ],
    ids=["sharded weights", "sharded optimizer"],
)
def test_two_ranks_on_one_device(ranks: Callable[..., Any], changes: dict[str, Any], texts: Path) -> None:
    tables = on_gpu(**changes, precision__compute="bf16")
    for found in ranks(2, timeout_s=180, init=False)(run_three_variants, tables, texts):
        assert_same(*found)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["use"])
def test_a_policy(policy: dict[str, Any], texts: Path) -> None:
    tables = on_gpu(precision__compute="bf16")
    wanted, found = (record(one, 5, folder=texts) for one in (tables, changed(tables, activations=policy)))
    assert [row["loss"] for row in wanted.rows] == [row["loss"] for row in found.rows]
    assert_same_bits(wanted.weights, found.weights)


@pytest.mark.parametrize("compute", ["fp64", "fp32", "bf16"])
def test_an_optimizer_on_the_host_is_as_close_as_its_arithmetic(compute: str, texts: Path) -> None:
    """Only the rounding of the processor differs from that of the device."""
    tables = on_gpu(precision__compute=compute)
    wanted = record_reference(tables, 5, folder=texts)
    found = record(changed(tables, offload=ON_HOST), 5, folder=texts)
    for name, weight in wanted.weights.items():
        error = float((weight.double() - found.weights[name].double()).norm() / weight.double().norm())
        assert error <= WEIGHTS[compute], (name, error)
