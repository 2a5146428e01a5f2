"""The memory of a message is not free while anything has it, in whatever way Python lets a layer keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_pp.message import Message
from sley_pp.pool import Pool

LAYOUT = ((torch.float64, (4, 4)), (torch.float32, (3,)))
CPU = torch.device("cpu")

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


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_whoever_has_a_message_keeps_its_memory(way: str, apart: bool) -> None:
    """And the memory is free again without it: once more, and after another layout."""
    pool = Pool(CPU, apart=apart)
    message = pool.lease(LAYOUT)
    for layout in (LAYOUT, LAYOUT, LAYOUT[:1], LAYOUT):
        message.lay(layout)
        assert not message.is_shared
        kept = [WAYS[way](message.lent()[0])]
        assert message.is_shared
        kept.clear()
        assert not message.is_shared


def test_a_pool_leases_nothing_that_a_layer_has_by_its_storage() -> None:
    pool = Pool(CPU, apart=False)
    message = pool.lease(LAYOUT)
    message.tensors[0].fill_(3.0)
    storage = message.lent()[0].untyped_storage()
    pool.lend(message)
    other = pool.lease(LAYOUT)
    other.tensors[0].fill_(4.0)
    assert other is not message
    assert torch.empty(0, dtype=torch.uint8).set_(storage).numel() == message.num_bytes
    assert torch.equal(message.tensors[0], torch.full((4, 4), 3.0, dtype=torch.float64))
    del storage
    assert pool.lease(LAYOUT) is message


def test_lent_tensors_are_let_go_together() -> None:
    message = Message(LAYOUT, CPU, apart=False)
    first, second = message.lent()
    del first
    assert message.is_shared
    del second
    assert not message.is_shared
