"""Tests that each missing wait is reported, and that early reads return NaN and freed memory is reported."""

import math
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from sley_core.comm.device import free, reallocate
from sley_testing.drawn_copies import DrawnDevice, Site, patch_tensor_repr, skip_wait, storage_guard, wait_sites


class Bench:
    """Holds weights on a device, memory for them on the host, and two streams."""

    def __init__(self, seed: int = 0, *, is_strict: bool = True) -> None:
        self.device = DrawnDevice(copy_seed=seed, is_strict=is_strict)
        self.weights = torch.arange(4.0)
        self.host = self.device.host_memory(16).data.view(torch.float32)
        self.first, self.second = self.device.copy_stream(), self.device.copy_stream()

    def offload(self) -> None:
        """Copies the weights to the host without a wait."""
        self.first.wait_for_device()
        self.first.copy(self.host, self.weights)

    def finish_offload(self) -> None:
        """Copies the weights to the host and waits on device and host."""
        self.offload()
        self.first.record().wait()

    def reload(self) -> None:
        """Offloads the weights, and copies them back without a wait."""
        self.finish_offload()
        self.weights.zero_()
        self.first.wait_for_device()
        self.first.copy(self.weights, self.host)


def write_during_copy(bench: Bench) -> None:
    bench.offload()
    bench.weights.add_(1)


def free_during_copy(bench: Bench) -> None:
    bench.offload()
    free(bench.weights)


def copy_into_tensor_in_use(bench: Bench) -> None:
    bench.finish_offload()
    bench.weights.sum()
    bench.first.copy(bench.weights, bench.host)


RACES: dict[Callable[[Bench], None], str] = {
    write_during_copy: r"aten.add_.Tensor writes float32 \[4\] while copy 1 of stream 1, from .*`make_device_wait` is missing",
    free_during_copy: r"the storage of 16 bytes is resized while copy 1 of stream 1, from .*`make_device_wait` is missing",
    copy_into_tensor_in_use: r"stream 1 copies into float32 \[4\], which the device read .*: `wait_for_device` is missing",
}
"""`test_skipped_wait_is_reported` has a race for each kind of missing wait."""


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_missing_wait_is_reported_in_any_order(race: Callable[[Bench], None]) -> None:
    """Includes orders in which the copy is done in time."""
    for seed in range(4):
        bench = Bench(seed)
        with pytest.raises(AssertionError, match=RACES[race]), bench.device.watching():
            race(bench)


def test_ordered_accesses_pass() -> None:
    """Reads during a copy from the same memory, writes other parts of copied memory, and orders two streams."""
    for seed in range(20):
        bench = Bench(seed)
        with bench.device.watching():
            bench.offload()
            assert bench.weights.sum() == 6
            event = bench.first.record()
            bench.second.wait_for(event)
            twin = torch.zeros(4)
            bench.second.wait_for_device()
            bench.second.copy(twin[:2], bench.host[:2])
            twin[2:].fill_(7)
            bench.second.record().make_device_wait()
            assert twin.tolist() == [0, 1, 7, 7]
            free(bench.weights)  # the device follows the second stream, which follows the first
            event.wait()
            assert bench.host.tolist() == [0, 1, 2, 3]


@pytest.fixture
def late_bench() -> Bench:
    """A bench without rules, whose copies are executed as late as possible."""
    bench = Bench(is_strict=False)
    bench.device.copies.rate = 0.0
    return bench


def test_early_read_returns_nan(late_bench: Bench) -> None:
    with late_bench.device.watching():
        reallocate(late_bench.weights, free(late_bench.weights))
        assert late_bench.weights.isnan().all(), "new memory"
        late_bench.weights.copy_(torch.arange(4.0))
        late_bench.reload()
        assert math.isnan(late_bench.weights.sum())
        late_bench.first.record().make_device_wait()
        assert late_bench.weights.sum() == 6


def test_late_copy_reads_changed_source(late_bench: Bench) -> None:
    """Overwrites the source of a pending copy, and then frees it."""
    with late_bench.device.watching():
        write_during_copy(late_bench)
        late_bench.first.record().wait()
        assert late_bench.host.tolist() == [1, 2, 3, 4]
        free_during_copy(late_bench)
        late_bench.first.record().wait()
        assert late_bench.host.isnan().all()


@pytest.mark.parametrize(("is_after", "orders"), [(False, {"00", "01", "10", "11"}), (True, {"00", "10", "11"})])
def test_all_permitted_orders_of_streams_occur(is_after: bool, orders: set[str]) -> None:
    actual: set[str] = set()
    for seed in range(40):
        device = DrawnDevice(copy_seed=seed)
        streams = [device.copy_stream() for _ in range(2)]
        targets, source = [torch.zeros(1) for _ in streams], torch.ones(1)
        with device.watching():
            event = None
            for stream, target in zip(streams, targets, strict=True):
                if is_after and event is not None:
                    stream.wait_for(event)
                stream.wait_for_device()
                stream.copy(target, source)
                event = stream.record()
            for _ in range(8):
                device.copies.execute_some()
                with torch.utils._python_dispatch._disable_current_modes():  # reads without the rules
                    actual.add("".join(str(int(target.item() == 1)) for target in targets))
    assert actual == orders


def test_seed_determines_order() -> None:
    def history(seed: int) -> list[bool]:
        bench, is_done = Bench(seed), []
        with bench.device.watching():
            for _ in range(10):
                bench.offload()
                is_done.append(bench.first.record().is_done())
                bench.first.record().wait()
        return is_done

    assert history(3) == history(3)
    assert len({tuple(history(seed)) for seed in range(20)}) > 3


def move_weights(order: int) -> list[float]:
    """Offloads the weights, and copies them to a twin and back by another stream. Needs each of its waits."""
    bench = Bench(order)
    with bench.device.watching():
        bench.weights.mul_(1.5)
        bench.first.wait_for_device()
        bench.first.copy(bench.host, bench.weights)
        offloaded = bench.first.record()
        twin = torch.zeros(4)
        bench.second.wait_for_device()
        bench.second.wait_for(offloaded)
        bench.second.copy(twin, bench.host)
        offloaded.make_device_wait()
        reallocate(bench.weights, free(bench.weights))
        bench.second.wait_for_device()
        bench.second.copy(bench.weights, bench.host)
        bench.second.record().make_device_wait()
        values = (bench.weights + 2 * twin).tolist()
        offloaded.wait()
        values += bench.host.tolist()
        bench.second.record().wait()
        bench.host = torch.zeros(1)
    return values


SITES = wait_sites(partial(move_weights, 0))


def test_all_orders_give_same_bits_and_waits_have_sites() -> None:
    assert {tuple(move_weights(order)) for order in range(20)} == {(0.0, 4.5, 9.0, 13.5, 0.0, 1.5, 3.0, 4.5)}
    assert " ".join(site.wait for site in SITES) == (
        "wait_for_device wait_for_device wait_for make_device_wait wait_for_device make_device_wait wait wait"
    )
    assert {site.function for site in SITES} == {"move_weights"}
    assert len({site.line for site in SITES}) == len(SITES)


@pytest.mark.parametrize("site", SITES, ids=str)
def test_skipped_wait_is_reported(site: Site) -> None:
    for order in range(5):
        with skip_wait(site), pytest.raises(AssertionError, match=f"`{site.wait}` is missing"):
            move_weights(order)


# -- freed memory ------------------------------------------------------------------------------------------------------


def freed_tensor(*shape: int) -> Tensor:
    tensor = torch.ones(shape)
    free(tensor)
    return tensor


ACCESSES: dict[str, Callable[[Tensor], object]] = {
    "aten.mm": lambda freed: torch.ones(2, 4) @ freed,
    "aten.linalg_vector_norm": lambda freed: torch.linalg.vector_norm(freed),
    "aten._foreach_norm": lambda freed: torch._foreach_norm([torch.ones(2), freed], 2),
    "aten.copy_.default reads": lambda freed: torch.zeros(4, 4).copy_(freed),
    "aten.copy_.default writes": lambda freed: freed.copy_(torch.ones(4, 4)),
    "aten.addmm.out writes": lambda freed: torch.addmm(torch.ones(4), torch.ones(4, 4), torch.ones(4, 4), out=freed),
    "aten.select.int": lambda freed: freed[0, 0].item(),
    "Tensor.numpy": lambda freed: freed.numpy(),
}


@pytest.mark.parametrize("name", ACCESSES)
def test_access_to_freed_memory_is_reported(name: str) -> None:
    """Expects the operation, and dtype and shape of the tensor, before the access."""
    freed = freed_tensor(4, 4)
    with (
        pytest.raises(AssertionError, match=r"float32 \[(4, 4)?\], which needs \d+ bytes of a storage of 0") as error,
        storage_guard(),
    ):
        ACCESSES[name](freed)
    assert str(error.value).startswith(name)


def test_operations_without_memory_access_pass() -> None:
    freed, empty = freed_tensor(4, 4), freed_tensor(0, 4)
    with storage_guard():
        assert (freed.shape, freed.numel(), freed.stride(), freed.dtype) == ((4, 4), 16, (4, 1), torch.float32)
        views = [freed.view(16), freed.detach(), freed.data, freed.view(torch.int32)]
        assert {view.untyped_storage().nbytes() for view in views} == {0}
        assert torch.zeros_like(freed).sum() == 0
        assert freed.new_ones(2).sum() == 2
        assert empty.sum() == 0
        torch.cat([empty, torch.ones(1, 4)])
        nn.Parameter(freed)
        reallocate(freed, 64)
        assert freed.fill_(2).sum() == 32


def test_view_needs_only_its_bytes() -> None:
    """Counts offset and strides instead of the number of elements."""
    full = torch.ones(8)
    views = full[3:6], full[::7]
    full.untyped_storage().resize_(20)
    with storage_guard():
        assert full[:5].sum() == 5
        for view in views:
            with pytest.raises(AssertionError, match="of a storage of 20"):
                view.sum()


def test_backward_is_watched() -> None:
    """Runs a backward on the CPU, in the thread of its caller."""
    layer = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    threads: list[int] = []
    layer[0].weight.register_hook(lambda _: threads.append(threading.get_ident()))
    with storage_guard():
        layer(torch.ones(2, 4)).sum().backward()
        loss = layer(torch.ones(2, 4)).sum()
        free(layer[1].weight)
        with pytest.raises(AssertionError, match=r"aten.t.default reads float32 \[4, 1\]"):
            loss.backward()
    assert threads == [threading.get_ident()]


def test_freed_tensors_can_be_printed() -> None:
    """Otherwise the process would crash while pytest formats the traceback of a failed test."""
    with patch_tensor_repr():
        assert repr([freed_tensor(4, 4), torch.ones(1)]) == "[<float32 [4, 4], freed>, tensor([1.])]"
