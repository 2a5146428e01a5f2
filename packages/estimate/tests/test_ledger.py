"""Every storage is counted once, from when it comes to when it goes, however it does either."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from sley_core.losses.cross_entropy import CHUNK_ELEMENTS, SumOfCrossEntropies
from sley_core.model.tensors import alike, counted
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.ledger import Ledger, StepPlace
from sley_estimate.bytes.recipes import Recipes

NOWHERE = StepPlace(1, "F0.0", "")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(lambda: NOWHERE)


def test_aliases_count_once_and_memory_goes_with_the_last(ledger):
    with FakeTensors(ledger):
        whole = torch.empty(100)
        part = whole[10:20].view(2, 5)
        assert ledger.now == 400
        del whole
        assert ledger.now == 400
        del part
    assert ledger.now == 0
    assert ledger.peak()[0] == 400


def test_memory_that_leaves_by_its_storage_is_gone_and_comes_back(ledger):
    tensors = FakeTensors(ledger)
    with tensors.watched(), tensors:
        one = torch.empty(100)
        one.untyped_storage().resize_(0)
        assert ledger.now == 0
        one.untyped_storage().resize_(400)
        assert ledger.now == 400
    assert [piece.num_bytes for piece in ledger.pieces] == [400, 400]


def test_a_weak_reference_keeps_nothing(ledger):
    """Torch's own keeps the Python object of the storage, by which the ledger hears of its end."""
    tensors = FakeTensors(ledger)
    with tensors.watched(), tensors:
        one = torch.empty(100)
        reference = StorageWeakRef(one.untyped_storage())
        again = torch.empty(0).set_(one.untyped_storage())
        del one, again
        assert reference.expired()
        kept = torch.empty(1)
        assert ledger.now == kept.nbytes


def test_addresses_do_not_meet(ledger):
    tensors = FakeTensors(ledger)
    with tensors.watched(), tensors:
        one, two = torch.empty(100), torch.empty(7)
        spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in (one, two))
        assert 0 < spans[0][0] < spans[0][1] <= spans[1][0]
        assert one[3:].data_ptr() == one.data_ptr() + 12
    assert torch.empty(3).data_ptr() != 0


def told(*, remembers: bool) -> list[tuple[int, int, int | None]]:
    ledger = Ledger(lambda: NOWHERE)
    recipes = Recipes() if remembers else None
    tensors = FakeTensors(ledger, recipes)
    with tensors:
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            heads = model(torch.randn(4, 6, 8)).unflatten(-1, (2, 4)).transpose(1, 2)
            nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if recipes is not None:
        assert recipes.num_used > 50
    return [(piece.num_bytes, piece.born, piece.died) for piece in ledger.pieces]


def test_what_is_remembered_is_what_torch_says():
    assert told(remembers=True) == told(remembers=False)


def test_a_fake_tensor_made_fast_is_as_torch_makes_it(ledger):
    tensors, device = FakeTensors(ledger), torch.device("cpu")
    for _ in range(2):
        elem = torch.empty(3, 4, device="meta")
        made, usual = tensors.made(elem, device), FakeTensor(tensors, elem, device)
        assert vars(made) == vars(usual)
        assert (made.device, made.dtype, made.shape) == (usual.device, usual.dtype, usual.shape)
        assert (made + 1).device == device


def of_a_loss(ledger: Ledger) -> tuple[int, int]:
    """The peak of 12 chunks of logits, and how many pieces of memory there were."""
    logits = torch.empty(12 * (CHUNK_ELEMENTS["cpu"] >> 10), 1 << 10, requires_grad=True)
    SumOfCrossEntropies.apply(logits, torch.zeros(len(logits), dtype=torch.int64), -100, 0.1).backward()
    return ledger.peak()[0], len(ledger.pieces)


def test_chunks_that_take_the_same_are_looked_at_until_nothing_is_new():
    every, few = Ledger(lambda: NOWHERE), Ledger(lambda: NOWHERE)
    with FakeTensors(every):
        peak, num_pieces = of_a_loss(every)
    with FakeTensors(few), counted(lambda: few.now):
        found, num_looked_at = of_a_loss(few)
    assert found == peak
    assert num_looked_at < num_pieces / 2


def test_chunks_that_leave_something_behind_are_all_looked_at(ledger):
    with FakeTensors(ledger), counted(lambda: ledger.now):
        kept = [torch.empty(number) for number in alike(range(1, 9))]
    assert len(kept) == 8
