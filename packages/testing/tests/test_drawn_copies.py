"""Each rule of streams, broken alone, is named; and what a program reads too early is not a number."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from sley_core.comm.copies import free, grow
from sley_testing.drawn_copies import DrawnDevice, Site, safe_to_print, skip_wait, storage_guard, wait_sites


class Bench:
    """A device's weights, room for them on the host, and two streams."""

    def __init__(self, device: DrawnDevice) -> None:
        self.device = device
        self.weights = torch.arange(4.0)
        self.host = device.host_memory(16).data.view(torch.float32)
        self.first, self.second = device.copy_stream(), device.copy_stream()

    def parked(self) -> None:
        """Copies the weights away and waits for it, on both sides."""
        self.first.follow()
        self.first.copy(self.host, self.weights)
        self.first.record().wait()


def bench(seed: int = 0, *, is_strict: bool = True) -> Bench:
    return Bench(DrawnDevice(order=seed, is_strict=is_strict))


def away(b: Bench) -> None:
    b.first.follow()
    b.first.copy(b.host, b.weights)


def back(b: Bench) -> None:
    b.parked()
    b.weights.zero_()
    b.first.follow()
    b.first.copy(b.weights, b.host)


def written_under_a_copy(b: Bench) -> None:
    away(b)
    b.weights.add_(1)


def read_under_a_copy(b: Bench) -> None:
    back(b)
    b.weights.sum()


def freed_under_a_copy(b: Bench) -> None:
    away(b)
    free(b.weights)


def forgotten_under_a_copy(b: Bench) -> None:
    away(b)
    b.weights = torch.zeros(1)
    b.first.record()


def host_reads_too_early(b: Bench) -> None:
    """Held is the device, not the host."""
    away(b)
    b.first.record().hold_device()
    b.host.sum()


def host_reads_as_numpy_too_early(b: Bench) -> None:
    away(b)
    b.host.numpy()


def host_writes_too_early(b: Bench) -> None:
    back(b)
    b.first.record().hold_device()
    b.host.zero_()


def copied_without_follow(b: Bench) -> None:
    b.weights.add_(1)
    b.first.copy(b.host, b.weights)


def copied_into_what_the_device_reads(b: Bench) -> None:
    b.parked()
    b.weights.sum()
    b.first.copy(b.weights, b.host)


def copied_into_memory_just_given(b: Bench) -> None:
    b.parked()
    num_bytes = free(b.weights)
    grow(b.weights, num_bytes)
    b.first.copy(b.weights, b.host)


def copied_back_before_it_was_away(b: Bench) -> None:
    away(b)
    other = torch.zeros(4)
    b.second.follow()
    b.second.copy(other, b.host)


def two_into_one_place(b: Bench) -> None:
    away(b)
    b.second.follow()
    b.second.copy(b.host, torch.zeros(4))


WRONG: dict[Callable[[Bench], None], str] = {
    written_under_a_copy: r"aten.add_.Tensor writes float32 \[4\] while copy 1 of stream 1, from .*`hold_device` is missing",
    read_under_a_copy: r"aten.sum.default reads float32 \[4\] while copy 2 of stream 1, into .*`hold_device` is missing",
    freed_under_a_copy: r"the storage of 16 bytes is resized while copy 1 of stream 1, from .*`hold_device` is missing",
    forgotten_under_a_copy: r"memory was freed while copy 1 of stream 1, from .*`hold_device` is missing",
    host_reads_too_early: r"aten.sum.default reads float32 \[4\] while copy 1 of stream 1, into .*`wait` is missing",
    host_reads_as_numpy_too_early: r"Tensor.numpy reads float32 \[4\] while copy 1 of stream 1, into .*`wait` is missing",
    host_writes_too_early: r"aten.zero_.default writes float32 \[4\] while copy 2 of stream 1, from .*`wait` is missing",
    copied_without_follow: r"stream 1 copies from float32 \[4\], which the device wrote .*: `follow` is missing",
    copied_into_what_the_device_reads: r"stream 1 copies into float32 \[4\], which the device read .*: `follow` is missing",
    copied_into_memory_just_given: r"stream 1 copies into float32 \[4\], which the device wrote .*: `follow` is missing",
    copied_back_before_it_was_away: r"stream 2 copies from float32 \[4\] while copy 1 of stream 1, into .*`after` is missing",
    two_into_one_place: r"stream 2 copies into float32 \[4\] while copy 1 of stream 1, into .*`after` is missing",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_missing_wait_is_named_in_any_order(wrong: Callable[[Bench], None]) -> None:
    """Also where the copy happened to be done in time."""
    for seed in range(20):
        b = bench(seed)
        with pytest.raises(AssertionError, match=WRONG[wrong]), b.device.watching():
            wrong(b)


def test_what_is_in_order_passes() -> None:
    """Reads beside reads, copies of parts beside work on other parts, and streams that follow each other."""
    for seed in range(50):
        b = bench(seed)
        with b.device.watching():
            away(b)
            assert b.weights.sum() == 6  # a copy reads them: so may the device
            event = b.first.record()
            b.second.after(event)
            twin = torch.zeros(4)
            b.second.follow()
            b.second.copy(twin[:2], b.host[:2])
            twin[2:].fill_(7)
            b.second.record().hold_device()
            assert twin.tolist() == [0, 1, 7, 7]
            free(b.weights)  # the second came after the first, and the device after the second
            event.wait()
            assert b.host.tolist() == [0, 1, 2, 3]


def late(is_strict: bool) -> Bench:
    """A device whose copies happen when they must."""
    made = bench(is_strict=is_strict)
    made.device.copies.rate = 0.0
    return made


def test_what_is_read_too_early_is_not_a_number() -> None:
    b = late(is_strict=False)
    with b.device.watching():
        back(b)
        assert math.isnan(b.weights.sum())
        b.first.record().hold_device()
        assert b.weights.sum() == 6


def test_memory_that_came_back_is_not_a_number() -> None:
    """Whoever forgets to fill it, or to zero what lies between two views, does not find the old values there."""
    b = late(is_strict=False)
    with b.device.watching():
        grow(b.weights, free(b.weights))
        assert b.weights.isnan().all()


def test_a_source_is_copied_as_it_is_then() -> None:
    """Overwritten or freed too early, and without a rule: the host gets what is there, or nothing."""
    b = late(is_strict=False)
    with b.device.watching():
        written_under_a_copy(b)
        b.first.record().wait()
        assert b.host.tolist() == [1, 2, 3, 4]
        away(b)
        free(b.weights)
        b.first.record().wait()
        assert b.host.isnan().all()


def test_streams_overtake_each_other_unless_one_comes_after_the_other() -> None:
    """Over the seeds every order comes, and only the permitted ones."""
    orders: dict[bool, set[str]] = {False: set(), True: set()}
    for is_after in orders:
        for seed in range(60):
            device = DrawnDevice(order=seed)
            streams = [device.copy_stream() for _ in range(2)]
            targets, one = [torch.zeros(1) for _ in streams], torch.ones(1)
            with device.watching():
                event = None
                for stream, target in zip(streams, targets, strict=True):
                    if is_after and event is not None:
                        stream.after(event)
                    stream.follow()
                    stream.copy(target, one)
                    event = stream.record()
                for _ in range(8):
                    device.copies.tick()
                    orders[is_after].add("".join(str(int(target.item() == 1)) for target in _unseen(targets)))
    assert orders == {False: {"00", "01", "10", "11"}, True: {"00", "10", "11"}}


def _unseen(targets: list[Tensor]) -> list[Tensor]:
    """The targets as another process would read them, past the rules."""
    with torch.utils._python_dispatch._disable_current_modes():
        return [target.clone() for target in targets]


def test_the_same_seed_draws_the_same_order() -> None:
    def history(seed: int) -> list[bool]:
        b = bench(seed)
        found = []
        with b.device.watching():
            for _ in range(10):
                away(b)
                found.append(b.first.record().is_done())
                b.first.record().wait()
        return found

    assert history(3) == history(3)
    assert len({tuple(history(seed)) for seed in range(20)}) > 3


def moved(order: int) -> list[float]:
    """Parks the weights by one stream, and fills a twin and then the weights by another; none of its waits may be missing."""
    b = bench(order)
    with b.device.watching():
        b.weights.mul_(1.5)
        b.first.follow()
        b.first.copy(b.host, b.weights)
        left = b.first.record()
        twin = torch.zeros(4)
        b.second.follow()
        b.second.after(left)
        b.second.copy(twin, b.host)
        left.hold_device()
        grow(b.weights, free(b.weights))
        b.second.follow()
        b.second.copy(b.weights, b.host)
        b.second.record().hold_device()
        seen = (b.weights + 2 * twin).tolist()
        left.wait()
        seen += b.host.tolist()
        b.second.record().wait()
        b.host = torch.zeros(1)
    return seen


SITES = wait_sites(partial(moved, 0))


def test_every_order_gives_the_same_bits_and_every_wait_is_found_by_its_line() -> None:
    assert {tuple(moved(order)) for order in range(50)} == {(0.0, 4.5, 9.0, 13.5, 0.0, 1.5, 3.0, 4.5)}
    assert [site.wait for site in SITES] == [
        "follow",
        "follow",
        "after",
        "hold_device",
        "follow",
        "hold_device",
        "wait",
        "wait",
    ]
    assert {site.function for site in SITES} == {"moved"}
    assert len({site.line for site in SITES}) == len(SITES)


@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("order", range(5))
def test_without_one_of_its_waits_a_program_is_caught(site: Site, order: int) -> None:
    with skip_wait(site), pytest.raises(AssertionError, match=f"`{site.wait}` is missing"):
        moved(order)


# -- freed memory ------------------------------------------------------------------------------------------------------


def freed(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.ones(shape, dtype=dtype)
    free(tensor)
    return tensor


READS: dict[str, Callable[[Tensor], object]] = {
    "aten.mm": lambda gone: torch.ones(2, 4) @ gone,
    "aten.sum": lambda gone: gone.sum(),
    "aten.linalg_vector_norm": lambda gone: torch.linalg.vector_norm(gone),
    "aten._foreach_norm": lambda gone: torch._foreach_norm([torch.ones(2), gone], 2),
    "aten.cat": lambda gone: torch.cat([torch.ones(1, 4), gone]),
    "aten.copy_.default reads": lambda gone: torch.zeros(4, 4).copy_(gone),
    "aten.copy_.default writes": lambda gone: gone.copy_(torch.ones(4, 4)),
    "aten.add_": lambda gone: gone.add_(1),
    "aten.zero_": lambda gone: gone.zero_(),
    "aten.addmm.out writes": lambda gone: torch.addmm(torch.ones(4), torch.ones(4, 4), torch.ones(4, 4), out=gone),
    "aten.clone": lambda gone: gone.clone(),
    "aten._to_copy": lambda gone: gone.double(),
    "aten.equal": lambda gone: torch.equal(gone, torch.ones(4, 4)),
    "aten.select.int": lambda gone: gone[0, 0].item(),
    "Tensor.numpy": lambda gone: gone.numpy(),
    "Tensor.tolist": lambda gone: gone.tolist(),
}


@pytest.mark.parametrize("name", READS)
def test_whatever_reads_or_writes_freed_memory_is_named(name: str) -> None:
    """With the tensor's type and shape, and before it happens."""
    gone = freed(4, 4)
    with (
        pytest.raises(AssertionError, match=r"float32 \[(4, 4)?\], which needs \d+ bytes of a storage of 0") as error,
        storage_guard(),
    ):
        READS[name](gone)
    assert str(error.value).startswith(name)


def test_what_needs_no_memory_is_allowed() -> None:
    gone, empty = freed(4, 4), freed(0, 4)
    with storage_guard():
        assert (gone.shape, gone.numel(), gone.stride(), gone.dtype) == ((4, 4), 16, (4, 1), torch.float32)
        views = [gone.view(16), gone.detach(), gone.data, gone.view(torch.int32)]
        assert {view.untyped_storage().nbytes() for view in views} == {0}
        assert torch.zeros_like(gone).sum() == 0
        assert gone.new_ones(2).sum() == 2
        assert empty.sum() == 0
        torch.cat([empty, torch.ones(1, 4)])
        nn.Parameter(gone)
        grow(gone, 64)
        assert gone.fill_(2).sum() == 32


def test_a_part_of_the_memory_is_enough_for_what_lies_in_it() -> None:
    """Offset and strides count, not the number of elements."""
    whole = torch.ones(8)
    parts = whole[3:6], whole[::7]
    whole.untyped_storage().resize_(20)
    with storage_guard():
        assert whole[:5].sum() == 5
        for part in parts:
            with pytest.raises(AssertionError, match="of a storage of 20"):
                part.sum()


def test_a_backward_is_seen_in_its_thread() -> None:
    """On a CPU that is the thread that called it."""
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


KINDS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for-loop": {"foreach": False}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", ["weight", "gradient", "state"])
def test_optimizers_are_seen(kind: str, label: str) -> None:
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(weights, **KINDS[kind])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with storage_guard():
        optimizer.step()
        last = weights[1]
        assert last.grad is not None
        free({"weight": last.data, "gradient": last.grad, "state": optimizer.state[last]["exp_avg"]}[label])
        with pytest.raises(AssertionError, match=r"\[2\], which needs 8 bytes of a storage of 0"):
            optimizer.step()


def test_a_traceback_can_name_what_was_freed() -> None:
    """Else the process ends while pytest writes down why the test failed."""
    gone = freed(4, 4)
    with safe_to_print():
        assert repr([gone, torch.ones(1)]) == "[<float32 [4, 4], freed>, tensor([1.])]"
