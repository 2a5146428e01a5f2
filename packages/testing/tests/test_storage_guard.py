"""Memory that is not there is an error with a name, where it would be the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sley_core.comm.copies import free, grow
from sley_testing.drawn_copies import safe_to_print, storage_guard


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
@pytest.mark.parametrize("what", ["weight", "gradient", "state"])
def test_optimizers_are_seen(kind: str, what: str) -> None:
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(weights, **KINDS[kind])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with storage_guard():
        optimizer.step()
        last = weights[1]
        assert last.grad is not None
        free({"weight": last.data, "gradient": last.grad, "state": optimizer.state[last]["exp_avg"]}[what])
        with pytest.raises(AssertionError, match=r"\[2\], which needs 8 bytes of a storage of 0"):
            optimizer.step()


def test_a_traceback_can_name_what_was_freed() -> None:
    """Else the process ends while pytest writes down why the test failed."""
    gone = freed(4, 4)
    with safe_to_print():
        assert repr([gone, torch.ones(1)]) == "[<float32 [4, 4], freed>, tensor([1.])]"
