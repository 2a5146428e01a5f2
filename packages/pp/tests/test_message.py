"""Tests that the memory of a message is not reused while any Python object refers to it."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.api.comm import Device
from sley_core.api.memory import DevicePool
from sley_pp.messages import Message, MessagePool, message_bytes

LAYOUT = ((torch.float64, (4, 4)), (torch.float32, (3,)))
CPU = torch.device("cpu")
HOST = Device(CPU)

WAYS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "view": lambda tensor: tensor[1:],
    "detached": lambda tensor: tensor.detach(),
    "saved by autograd": lambda tensor: tensor.requires_grad_().square().sum(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "storage of a view": lambda tensor: tensor[1:].untyped_storage(),
    "tensor of the storage": lambda tensor: torch.empty(0).set_(tensor.untyped_storage()),
    "array": lambda tensor: tensor.numpy(),
    "array of an array": lambda tensor: tensor.numpy()[1:],
    "buffer of an array": lambda tensor: memoryview(tensor.numpy()),
    "tensor of an array": lambda tensor: torch.from_numpy(tensor.numpy()),
    "capsule": lambda tensor: tensor.__dlpack__(),
    "tensor of a capsule": lambda tensor: torch.from_dlpack(tensor),
}


@pytest.mark.parametrize("separate_header", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_any_reference_to_a_message_keeps_its_memory(way: str, separate_header: bool) -> None:
    """The memory is free again without the reference, also after another layout."""
    pool = MessagePool(DevicePool(), HOST, separate_header=separate_header)
    message = pool.lease(LAYOUT)
    for layout in (LAYOUT, LAYOUT, LAYOUT[:1], LAYOUT):
        message.set_layout(layout)
        assert not message.is_shared
        kept = [WAYS[way](message.aliases()[0])]
        assert message.is_shared
        kept.clear()
        assert not message.is_shared


def test_other_views_of_the_memory_are_no_users_of_the_message() -> None:
    """A pool may lend several views of one storage, and earlier users may still hold views."""
    memory = torch.empty(2 * message_bytes(LAYOUT, separate_header=False), dtype=torch.uint8)
    stale = [memory[:100]]
    message = Message(memory[: len(memory) // 2], LAYOUT, HOST, separate_header=False)
    kept = message.aliases()
    stale.clear()
    assert message.is_shared
    kept.clear()
    assert not message.is_shared
    assert message.tensors[0].data_ptr() == memory.data_ptr() + 1024 + 256


def test_a_message_is_cached_until_the_pool_frees_its_buffer() -> None:
    pool = DevicePool()
    lending = MessagePool(pool, HOST, separate_header=False)
    message = lending.lease(LAYOUT)
    lending.release(message)
    assert lending.lease(LAYOUT) is message
    assert pool.trim() == 0, "it is lent"
    lending.release(message)
    gone = weakref.ref(message)
    del message
    assert pool.trim() >= message_bytes(LAYOUT, separate_header=False)
    assert gone() is None
    assert (pool.num_bytes, list(pool.named_tensors())) == (0, [])
