"""What a rank holds: every storage is counted once, and estimates equal what the allocator says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sley_core.comm.groups import nothing
from sley_core.comm.progress import Members
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.fake_tensors import FakeTensors, OpResultCache
from sley_estimate.bytes.fake_world import FakeTransport
from sley_estimate.bytes.ledger import Ledger, StepPosition
from sley_estimate.bytes.rank import rank_bytes
from sley_testing.live_bytes import real_bytes
from sley_testing.plans import changed, small_plan

NOWHERE = StepPosition(1, "F0.0", "")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(lambda: NOWHERE)


def test_aliases_count_once_and_memory_goes_with_the_last(ledger):
    with FakeTensors(ledger):
        whole = torch.empty(100)
        part = whole[10:20].view(2, 5)
        assert ledger.current_bytes == 400
        del whole
        assert ledger.current_bytes == 400
        del part
    assert ledger.current_bytes == 0
    assert ledger.peak()[0] == 400


def test_memory_that_leaves_by_its_storage_is_gone_and_comes_back(ledger):
    tensors = FakeTensors(ledger)
    with tensors.patch_torch(), tensors:
        one = torch.empty(100)
        one.untyped_storage().resize_(0)
        assert ledger.current_bytes == 0
        one.untyped_storage().resize_(400)
        assert ledger.current_bytes == 400
    assert [piece.num_bytes for piece in ledger.allocations] == [400, 400]


def test_a_weak_reference_keeps_nothing(ledger):
    """Torch's own keeps the Python object of the storage, by which the ledger hears of its end."""
    tensors = FakeTensors(ledger)
    with tensors.patch_torch(), tensors:
        one = torch.empty(100)
        reference = StorageWeakRef(one.untyped_storage())
        again = torch.empty(0).set_(one.untyped_storage())
        del one, again
        assert reference.expired()
        kept = torch.empty(1)
        assert ledger.current_bytes == kept.nbytes


def test_addresses_do_not_meet(ledger):
    tensors = FakeTensors(ledger)
    with tensors.patch_torch(), tensors:
        one, two = torch.empty(100), torch.empty(7)
        spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in (one, two))
        assert 0 < spans[0][0] < spans[0][1] <= spans[1][0]
        assert one[3:].data_ptr() == one.data_ptr() + 12
    assert torch.empty(3).data_ptr() != 0


def told(*, remembers: bool) -> list[tuple[int, int, int | None]]:
    ledger = Ledger(lambda: NOWHERE)
    recipes = OpResultCache() if remembers else None
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
        assert recipes.num_hits > 50
    return [(piece.num_bytes, piece.allocated_at, piece.freed_at) for piece in ledger.allocations]


def test_what_is_remembered_is_what_torch_says():
    assert told(remembers=True) == told(remembers=False)


PLAN = small_plan(
    model={"use": "models.llama", "num_layers": 2, "hidden": 128, "heads": 4},
    data__sequence=64,
    batch__global_size=4,
    precision={"compute": "fp32"},
)
"""Of a megabyte and more, so that bytes are the tensors' and not those of a batch, a seed or a list of names."""
CASES = {
    "plain": {},
    "recomputed": {"activations": {"use": "core.recompute"}},
    "narrow, with masters": {"precision": {"compute": "bf16"}},
    "scaled": {"precision": {"compute": "fp16"}},
    "fused SGD, tied": {"optimizer": {"use": "core.sgd", "lr": 0.1, "momentum": 0.9}, "model__tie_embeddings": True},
    "by factory": {"optimizer": {"factory": "torch.optim:RMSprop", "lr": 0.01}},
    "canonical": {"parallel": {"reduction": "canonical"}, "batch__micro_size": 1},
    "frozen": {"optimizer__groups": [{"match": "embed.*", "freeze": True}]},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_it_is_what_the_allocator_says(texts, changes):
    tables = changed(PLAN, **changes)
    real = real_bytes(tables, 2, folder=texts)
    estimated = rank_bytes(plan_from_dict(tables, texts), 0, 1)
    print(f"real {real}, estimated {estimated}")
    assert estimated.states == real.states
    assert estimated.peak - estimated.batch == pytest.approx(real.peak, rel=0.01)


def test_a_device_has_no_scratch_of_the_cpus_operators(texts):
    """Its kernels read several types; between steps both hold the same."""
    on_cpu, on_device = (
        rank_bytes(plan_from_dict(changed(PLAN, precision={"compute": "fp16"}, run__device=device), texts), 0, 1)
        for device in ("cpu", "cuda")
    )
    assert on_device.states == on_cpu.states
    both = list(zip(on_device.curve, on_cpu.curve, strict=True))
    assert all(device[1] <= cpu[1] for device, cpu in both)
    assert any(device[1] < cpu[1] for device, cpu in both)


def test_what_was_alive_at_the_peak_is_the_peak(texts):
    """Nothing is left out of the parts, and the curve has the peak where it is said to be."""
    found = rank_bytes(plan_from_dict(PLAN, texts), 0, 1)
    assert sum(found.alive.values()) == found.peak
    assert max(num_bytes for _, num_bytes in found.curve) == found.peak
    assert (found.position.entry, found.peak) in found.curve
    assert found.alive["weights"] == found.states["weights"]
    assert found.alive["activations"] > 0


def test_a_layer_that_asks_for_values_is_named(texts, own_layers):
    tables = changed(PLAN, model={"factory": "asking_layers:layers"})
    with pytest.raises(
        RunError, match=r"reads values of tensors.*_local_scalar_dense.* layer `asks` \(Asks\) in microbatch 0"
    ) as caught:
        rank_bytes(plan_from_dict(tables, own_layers), 0, 1)
    assert caught.value.diagnostics[0].code == "estimate-layer"


def imitated() -> tuple[FakeTransport, Members, list[int]]:
    """A transport of two ranks, who they are, and the elements for which it has taken memory so far."""
    members, taken = Members("dp", (0, 1), 0), list[int]()

    def scratch(own: Tensor) -> None:
        taken.append(own.numel())

    return FakeTransport(members, "reduce", lambda *_: nothing, lambda rows: 0, scratch), members, taken


def test_a_sum_is_made_once_where_it_is_awaited() -> None:
    transport, _, taken = imitated()
    works = [
        transport.reduce_scatter([torch.ones(4, 3), torch.ones(2)], [], label="two"),
        transport.all_reduce(torch.ones(7), label="one"),
    ]
    for work in works:
        assert not work.test()
    assert not taken
    for work in works[::-1]:
        work.wait()
        assert work.test()
        work.wait_sent()
    assert taken == [4, 6, 1]


def test_a_look_in_a_later_entry_finds_that_peers_have_come() -> None:
    """What they offer is read then, but the exchange stays under way: its wait is where the list has it."""
    transport, members, taken = imitated()
    work = transport.reduce_scatter([torch.ones(4, 3)], [], label="one")
    assert not work.test()
    assert not taken
    members.progress.step_progress.begin_entry("B0.1")
    assert not work.test()
    assert taken == [6]
    work.wait()
    assert work.test()
    assert taken == [6]
