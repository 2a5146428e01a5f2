"""A small manager of copies gives the same bits in every order; without any one of its waits it is caught."""

from __future__ import annotations

import hashlib
from functools import partial

import pytest
import torch
from torch import Tensor

from sley_core.comm.copies import CopyEvent, free, grow
from sley_core.comm.device import Device
from sley_testing.drawn_copies import DrawnDevice, Site, wait_sites, without

NUM_ORDERS = [50, pytest.param(500, marks=pytest.mark.campaign)]
NUM_TRIES = 20
"""In how many orders a missing wait may show; measured: in the first, each."""


class Manager:
    """Parks tensors in one piece of host memory, by one stream, and fills them or twins of them from it by another."""

    def __init__(self, device: Device, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        sizes = [tensor.numel() for tensor in tensors]
        self.host = device.host_memory(4 * sum(sizes)).data.view(torch.float32)
        self.rooms = list(self.host.split(sizes))
        self.out, self.back = device.copy_stream(), device.copy_stream()
        self.left = self.came = self.mirrored = self.back.record()
        self.num_bytes: list[int] = []

    def offload(self) -> None:
        """Starts the copies to the host; the tensors stay readable."""
        self.out.follow()
        self.out.after(self.mirrored)
        for room, tensor in zip(self.rooms, self.tensors, strict=True):
            self.out.copy(room, tensor)
        self.left = self.out.record()

    def mirror(self, twins: list[Tensor]) -> None:
        """Starts to fill twins of the tensors with what is on its way to the host."""
        self.back.follow()
        self.back.after(self.left)
        for room, twin in zip(self.rooms, twins, strict=True):
            self.back.copy(twin, room)
        self.mirrored = self.back.record()

    def release(self) -> None:
        self.left.hold_device()
        self.num_bytes = [free(tensor) for tensor in self.tensors]

    def onload(self) -> None:
        for tensor, num_bytes in zip(self.tensors, self.num_bytes, strict=True):
            grow(tensor, num_bytes)
        self.back.follow()
        for room, tensor in zip(self.rooms, self.tensors, strict=True):
            self.back.copy(tensor, room)
        self.came = self.back.record()

    def hold(self, event: CopyEvent) -> None:
        event.hold_device()

    def read(self) -> float:
        """The sum of what is parked, by the host."""
        self.left.wait()
        return float(self.host.sum())

    def close(self) -> None:
        """Waits until nobody needs the host memory, which goes with this object."""
        self.back.record().wait()


def digest(device: Device) -> str:
    """Of four rounds in which three tensors and their twins are worked with, and move in between.

    In the second the host reads them, and twins are still on their way when the third parks the tensors anew.
    """
    tensors = [torch.arange(float(size)) for size in (4, 7, 2)]
    twins = [torch.zeros_like(tensor) for tensor in tensors]
    manager = Manager(device, tensors)
    seen: list[float] = []
    for number in range(4):
        for tensor, twin in zip(tensors, twins, strict=True):
            tensor.mul_(1.5)
            if number != 2:
                tensor.add_(twin)
        manager.offload()
        if number != 2:
            manager.mirror(twins)
        if number == 1:
            seen.append(manager.read())
        else:
            manager.release()
            manager.onload()
            manager.hold(manager.came)
            manager.hold(manager.mirrored)
    manager.close()
    return hashlib.sha256(b"".join(bytes(one.numpy().tobytes()) for one in (*tensors, *twins)) + str(seen).encode()).hexdigest()


def drawn(order: int, *, is_strict: bool = True) -> str:
    device = DrawnDevice(order=order, is_strict=is_strict)
    with device.watching():
        return digest(device)


PLAIN = digest(Device(torch.device("cpu")))
SITES = wait_sites(partial(drawn, 0))
EQUIVALENT = {
    ("mirror", "follow"): "the stream comes after `left`, whose stream followed the device after the last use of twins"
}


@pytest.mark.parametrize("num_orders", NUM_ORDERS)
def test_every_order_gives_the_same_bits(num_orders: int) -> None:
    assert {drawn(order) for order in range(num_orders)} == {PLAIN}


def test_every_wait_is_found() -> None:
    """By the line that calls it, each once."""
    assert [(site.function, site.wait) for site in SITES] == [
        ("offload", "follow"),
        ("offload", "after"),
        ("mirror", "follow"),
        ("mirror", "after"),
        ("release", "hold_device"),
        ("onload", "follow"),
        ("hold", "hold_device"),
        ("read", "wait"),
        ("close", "wait"),
    ]


def first_caught(site: Site, num_orders: int, *, is_strict: bool) -> int | None:
    """How many orders it took until the program without `site` raised or gave other bits; None if it never did."""
    for order in range(num_orders):
        with without(site):
            try:
                found = drawn(order, is_strict=is_strict)
            except AssertionError:
                return order + 1
        if found != PLAIN:
            return order + 1
    return None


@pytest.mark.parametrize("num_orders", NUM_ORDERS)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_without_one_of_its_waits_a_program_is_caught(site: Site, num_orders: int) -> None:
    """By a rule or by its bits. Printed: in which order first, and in which by its bits alone."""
    why = EQUIVALENT.get((site.function, site.wait))
    by_rules = first_caught(site, num_orders if why else NUM_TRIES, is_strict=True)
    by_bits = first_caught(site, NUM_TRIES, is_strict=False)
    print(f"{site}: caught in order {by_rules}, by bits alone in {by_bits}" + (f" ({why})" if why else ""))
    assert (by_rules is None) == (why is not None)
