"""On CUDA: the driver gets the memory back, no second copy is made on the device, and copies are as fast as plain ones."""

from __future__ import annotations

import os
import time

import pytest
import torch
from parking import sha

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_memory.leaks import find_leaks
from sley_testing.plans import small_plan

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
    plan = plan_from_dict(LARGE)
    with World.join("cuda") as world, assemble(plan, world) as made:
        made.step()
        yield made


def test_the_driver_gets_the_memory_back(run):
    """All but 2 MiB of what the parts had; 98 % of it is the driver's."""
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    size = sum(run.memory.bytes.values())
    run.memory.offload().wait()
    left = find_leaks(run, MIB)
    assert not left, "\n".join(map(str, left))
    assert before - torch.cuda.memory_allocated() >= size - 2 * MIB
    assert torch.cuda.mem_get_info()[0] - free >= 0.98 * size
    run.memory.onload()
    run.step()


def test_no_second_copy_is_made_on_the_device(run):
    """Leaving takes no more than a fingerprint's products; coming back, what was there and a bucket."""
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        run.memory.offload().wait()
        assert torch.cuda.max_memory_allocated() <= before + 32 * MIB
        run.memory.onload().wait()
        assert torch.cuda.max_memory_allocated() <= before + 32 * MIB


def test_what_came_back_lies_in_few_pieces_of_memory(run):
    """The driver takes some 40 microseconds for each, and no copy can hide the time in which it takes them back."""

    def num_pieces():
        return torch.cuda.memory_stats()["segment.large_pool.current"]

    num_states = sum(tensor.nbytes > MIB for _, tensor in run.memory.holdings.everything("optimizer_states"))
    run.memory.offload().wait()
    left = num_pieces()
    run.memory.onload().wait()
    assert num_states > 20
    assert num_pieces() - left <= len(run.memory.report)
    free = torch.cuda.mem_get_info()[0]
    run.memory.offload().wait()
    assert torch.cuda.mem_get_info()[0] > free


def seconds(function):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def test_copies_are_as_fast_as_plain_ones(run, monkeypatch):
    """At least 80 % of one copy of as many page-locked bytes; the host's memory stays that of the first offload.

    Without what the driver takes to get the memory back, which no copy can hide: it waits for all of them.
    """
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    size = 512 * MIB
    here, there = (torch.empty(size, dtype=torch.uint8, device="cuda"), torch.empty(size, dtype=torch.uint8, pin_memory=True))
    plain_out = size / min(seconds(lambda: there.copy_(here, non_blocking=True)) for _ in range(5))
    plain_in = size / min(seconds(lambda: here.copy_(there, non_blocking=True)) for _ in range(5))
    rates, hosts = [], set()
    for _ in range(5):
        run.step()
        before = sum(moved.copied_out for moved in run.memory.report.values())
        out = seconds(lambda: run.memory.offload().wait())
        copied = sum(moved.copied_out for moved in run.memory.report.values()) - before
        back = seconds(lambda: run.memory.onload().wait())
        rates.append((copied / out, copied / back))
        hosts.add(sum(moved.host_bytes for moved in run.memory.report.values()))
    assert max(rate for rate, _ in rates) >= 0.8 * plain_out
    assert max(rate for _, rate in rates) >= 0.8 * plain_in
    assert len(hosts) == 1


def test_bits_are_those_of_a_run_that_stayed(run):
    for _ in range(3):
        run.memory.offload().wait()
        run.memory.onload()
        run.step()
    found = sha(run)
    plan = plan_from_dict({**LARGE, "offload": []})
    with World.join("cuda") as world, assemble(plan, world) as plain:
        for _ in range(4):
            plain.step()
        assert sha(plain) == found


def test_calls_may_come_from_any_stream(run):
    """The run works on its own stream: what a caller's has been given comes before, and what it is given later after."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(3):
        for stream, call in zip(streams, (run.memory.offload, run.memory.onload, run.step), strict=True):
            with torch.cuda.stream(stream):
                call()
    found = sha(run)
    plan = plan_from_dict({**LARGE, "offload": []})
    with World.join("cuda") as world, assemble(plan, world) as plain:
        for _ in range(4):
            plain.step()
        assert sha(plain) == found


def in_queues(count):
    """The digest of a run that moves everything between steps, in a process whose driver has `count` queues."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(count)
    plan = plan_from_dict({**LARGE, "activations": {"use": "memory.host"}})
    with World.join("cuda") as world, assemble(plan, world) as made:
        for _ in range(3):
            made.step()
            made.memory.offload()
            made.memory.onload()
        return sha(made)


def test_the_number_of_queues_changes_no_bit(ranks):
    assert len({ranks(1, 200, fresh=True)(in_queues, count)[0] for count in (1, 8, 32)}) == 1
