"""`run.memory` with core alone: an offload manager of a test's own plugin, and a run without any."""

import gc
import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sley_core.comm.device import Device, HostMemory, free, reallocate, storage_id
from sley_core.errors import StateError, UsageError
from sley_core.memory import PARTS, DevicePool, Moved, Where, block_bytes, group_by_storage
from sley_core.plan.check import check_offload
from sley_core.plan.load import plan_from_dict
from sley_core.records import OffloadManagerRecord
from sley_testing.plans import small_plan
from sley_testing.runs import running


class Shelf:
    """Moves one part to clones on the host: the least that a manager must do."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.calls: list[str] = []
        self.copies: list[tuple[Any, Tensor, int]] = []
        self.cost = Moved()

    @property
    def parts(self) -> Sequence[Any]:
        return [self.part]

    def attach(self, parts: Any, inventory: Any) -> None:
        self.inventory = inventory

    def offload(self, part: Any) -> Callable[[], None]:
        self.calls.append(f"offload {part}")
        pieces = self.inventory.storages(part)
        self.copies = [(piece, piece.memory.clone(), free(piece.memory)) for piece in pieces]
        self.cost.copied_out += sum(size for _, _, size in self.copies)
        return lambda: self.calls.append(f"wait {part}")

    def onload(self, part: Any) -> Callable[[], None]:
        self.calls.append(f"onload {part}")
        for piece, copy, size in self.copies:
            reallocate(piece.memory, size)
            piece.memory.copy_(copy)
        self.copies = []
        return lambda: None

    def require(self, part: Any, caller: str) -> None:
        if self.copies:
            raise StateError.offloaded_error(part, caller)

    def where(self, part: Any) -> Where:
        return Where.AWAY if self.copies else Where.HERE

    def moved(self, part: Any) -> Moved:
        return self.cost

    def host(self, part: Any) -> dict[int, Tensor]:
        return {storage_id(piece.memory): copy for piece, copy, _ in self.copies}

    def detach(self) -> None: ...


@pytest.fixture
def run(texts):
    with running(small_plan(precision__compute="bf16", evaluation={"every": 100}), texts) as made:
        yield made


def with_shelves(run, *parts):
    """`run` with a manager for each of `parts`, as `assemble` attaches those of a plan."""
    shelves = [Shelf(part) for part in parts]
    for shelf in shelves:
        shelf.attach(run.parts, run.memory.inventory)
    run.memory.managers = shelves
    return shelves


def test_a_run_says_what_it_holds_without_any_manager(run):
    """Masters and states are fp32; states come in the first step; without stages or pools nothing else is kept."""
    numel = sum(param.numel for param in run.registry)
    before = run.memory.bytes
    assert [*before] == [*PARTS]
    assert (before["weights"], before["optimizer_states"], before["pools"]) == (2 * numel, 0, 0)
    assert before["masters"] >= 4 * numel
    run.step()
    assert run.memory.bytes["optimizer_states"] == 8 * numel
    assert set(run.memory.where.values()) == {Where.HERE}
    assert run.memory.report == {}
    with pytest.raises(UsageError, match="no offload manager in the plan moves the run's memory"):
        run.memory.offload()


def test_parts_leave_the_last_first_and_come_back_the_first_first(run):
    """Gradients go before weights: then the device's peak is lowest."""
    shelves = with_shelves(run, "weights", "masters", "optimizer_states")
    run.step()
    calls: list[str] = []
    for shelf in shelves:
        shelf.calls = calls
    run.memory.offload().wait()
    run.memory.onload("masters")
    run.memory.onload()
    assert calls[:3] == ["offload optimizer_states", "offload masters", "offload weights"]
    assert sorted(calls[3:6]) == ["wait masters", "wait optimizer_states", "wait weights"]
    assert calls[6:] == ["onload masters", "onload weights", "onload masters", "onload optimizer_states"]
    run.step()


def test_what_is_away_is_asked_for_by_name(run):
    with_shelves(run, "masters")
    run.step()
    run.memory.offload()
    for call, label in ((run.step, "a step"), (run.train, "a step"), (lambda: run.load_weights({}), "loading weights")):
        with pytest.raises(StateError, match=f"{label} needs the run's masters, but they are offloaded"):
            call()
    run.evaluate()
    run.memory.onload()
    run.step()


def test_what_is_away_is_read_on_the_host(run):
    """And what is here, and the scalars that optimizers keep."""
    with_shelves(run, "optimizer_states")
    run.step()
    here = {name: value.clone() for name, value in run.memory.host("optimizer_states")}
    run.memory.offload()
    away = dict(run.memory.host("optimizer_states"))
    assert here.keys() == away.keys()
    assert all(torch.equal(here[name], value) for name, value in away.items())
    assert {value.dim() for name, value in away.items() if name.endswith(".step")} == {0}
    names = [name for name, _ in run.memory.host("weights")]
    assert names == [param.name for param in run.registry]
    with pytest.raises(UsageError, match="not-copied"):
        run.memory.host("pools")


def test_a_storage_that_two_parts_have_moves_with_the_first(run):
    run.step()
    param = next(iter(run.registry))
    optimizer = run.stepper.update.optimizer
    parameter = next(one.parameter for one in run.stepper.update.masters.local_params if one.param is param)
    optimizer.state[parameter]["alias"] = param.parameter.detach()
    names = [name for piece in run.memory.inventory.storages("optimizer_states") for name in piece.tensors]
    assert f"{param.name}.exp_avg" in names
    assert f"{param.name}.alias" not in names
    params = [one for one in run.stepper.update.masters.local_params if one.param is param]
    assert storage_id(param.parameter) in run.memory.inventory.storage_ids_without(params)


def test_pieces_are_storages_with_all_that_lies_in_them():
    base = torch.arange(12.0)
    other = torch.ones(3, dtype=torch.int16)
    first, second = group_by_storage([("row", base[4:8]), ("other", other), ("turned", base.view(3, 4).t())])
    assert [*first.tensors] == ["row", "turned"]
    assert (first.memory.shape, first.memory.dtype) == ((48,), torch.uint8)
    assert second.memory.shape == (6,)


ADAMW, OWN = {"use": "core.adamw", "lr": 0.1}, {"factory": "torch.optim:LBFGS", "lr": 0.1}


@pytest.mark.parametrize(
    ("optimizer", "scope", "moves", "codes"),
    [
        (ADAMW, "global", [("masters",), ("weights", "buffers")], []),
        (ADAMW, "global", [("masters", "weights"), ("weights",)], ["offload-twice"]),
        (ADAMW, "per_matrix", [("masters",)], []),
        (OWN, "global", [("masters",)], []),
        (OWN, "per_matrix", [("masters",)], ["offload-optimizer"]),
        ({**OWN, "scope": "elementwise"}, "per_matrix", [("masters",)], []),
    ],
)
def test_managers_that_move_one_part_or_update_apart_what_belongs_together_are_refused(optimizer, scope, moves, codes):
    plan = plan_from_dict(small_plan(optimizer=optimizer))
    managers = []
    for parts in moves:
        record = OffloadManagerRecord(
            name="shelf",
            config=type(plan.loss.config),
            build="nowhere:Shelf",
            parts=lambda config, parts=parts: parts,
            scope=lambda config: scope,
        )
        managers.append(replace(plan.optimizer, record=record, name="own.shelf"))
    plan = replace(plan, offload=tuple(managers))
    assert [problem.code for problem in check_offload(plan)] == codes


# -- pools and host memory ---------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


@given(st.integers(0, 2**44))
def test_a_block_holds_the_request_and_little_more(num_bytes: int) -> None:
    size = block_bytes(num_bytes)
    assert size >= num_bytes
    assert size % 256 == 0
    assert size - num_bytes <= num_bytes / 8 + 256
    assert block_bytes(size) == size, "a block's own size would be lent from a larger one"


def test_other_shapes_and_dtypes_of_almost_the_same_size_share_a_block() -> None:
    pool = DevicePool()
    for shape, dtype in [((60, 100), torch.float32), ((24_100,), torch.uint8), ((100, 120), torch.bfloat16), ((), torch.int64)]:
        for _ in range(2):
            with pool.lease(shape, dtype, CPU) as buffer:
                assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == (shape, dtype, True)
                assert buffer.data_ptr() % 256 == 0
        with pool.lease(shape, dtype, CPU) as again:
            assert again is buffer, "users cache by the tensor"
    assert pool.num_allocations == 2, "one for about 24,000 bytes, and one for 8"


def test_leased_buffers_have_one_user_and_their_memory_does_not_grow() -> None:
    """Leases and returns buffers in random order."""
    pool, generator = DevicePool(), Random(7)
    leases: list[tuple[int, Any, torch.Tensor]] = []
    for number in range(300):
        if leases and (len(leases) == 12 or generator.random() < 0.45):
            fill_value, lease, buffer = leases.pop(generator.randrange(len(leases)))
            assert (buffer == fill_value).all()
            lease.__exit__(None, None, None)
            continue
        lease = pool.lease((generator.choice([0, 3, 15, 1000]),), generator.choice([torch.float32, torch.int64]), CPU)
        leases.append((number, lease, lease.__enter__().fill_(number)))
    assert pool.counts()["lent_bytes"] == sum(buffer.untyped_storage().nbytes() for _, _, buffer in leases)
    assert pool.counts()["allocations"] <= 3 * 12 < pool.counts()["leases"]


def test_trim_frees_only_memory_that_is_not_lent() -> None:
    pool = DevicePool()
    with pool.lease((9,), torch.float32, CPU) as free_buffer:
        reference = StorageWeakRef(free_buffer.untyped_storage())  # type: ignore[no-untyped-call]
        del free_buffer
        with pool.lease((9,), torch.float32, CPU) as lent:
            pass
    with pool.lease((5000,), torch.uint8, CPU) as lent:
        lent.fill_(9)
        num_bytes = pool.num_bytes
        assert pool.trim() == num_bytes - pool.num_bytes > 0
        assert (lent == 9).all()
        assert reference.expired()  # type: ignore[no-untyped-call]
    assert pool.trim() > 0 == pool.num_bytes


def test_a_buffer_whose_lease_is_lost_is_not_lent_again_and_not_kept() -> None:
    """A failed step forgets what it was receiving; gloo may still write there."""
    pool = DevicePool()
    lost = pool.lease((8,), torch.float32, CPU).__enter__()
    gc.collect()
    with ExitStack() as stack:
        buffers = [stack.enter_context(pool.lease((8,), torch.float32, CPU)) for _ in range(3)]
        assert len({buffer.data_ptr() for buffer in [lost, *buffers]}) == 4
        assert pool.num_lent == 3
    assert (pool.num_lent, pool.num_bytes, len(list(pool.named_tensors()))) == (0, 3 * 512, 3)


def test_many_sizes_take_twice_the_peak_at_most() -> None:
    """With sequences of many lengths the pool stops growing: it lends larger blocks, and frees old ones."""
    pool = DevicePool()
    with pool.lease((100_000,), torch.uint8, CPU), pool.lease((100_000,), torch.uint8, CPU):
        pass
    for size in range(99_000, 1000, -1000):
        with pool.lease((size,), torch.uint8, CPU), pool.lease((2 * size,), torch.uint8, CPU) as buffer:
            assert buffer.shape == (2 * size,)
        assert pool.num_bytes <= 2 * (106_752 + 213_248)
    assert pool.num_allocations <= 6


def test_views_hooks_and_gradients_survive_memory_that_leaves() -> None:
    """A parameter that is a view of the freed memory keeps its hooks, its graph node and its place."""
    whole = torch.arange(8.0)
    parameter = torch.nn.Parameter(whole[2:6])
    seen: list[float] = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
    num_bytes = free(whole)
    assert (num_bytes, whole.untyped_storage().nbytes(), parameter.untyped_storage().nbytes()) == (32, 0, 0)
    assert parameter.shape == (4,)
    reallocate(parameter, num_bytes)
    whole.copy_(torch.arange(8.0))
    (parameter * 2).sum().backward()
    assert parameter.tolist() == [2, 3, 4, 5]
    assert seen == [8.0]


def test_host_memory_takes_whole_pages_and_no_more() -> None:
    """The tensor outlives the object that made it."""
    memory = Device(torch.device("cpu")).host_memory(3 * mmap.PAGESIZE + 1)
    assert (memory.num_bytes, memory.is_locked) == (4 * mmap.PAGESIZE, False)
    data = memory.data
    assert data.shape == (3 * mmap.PAGESIZE + 1,)
    assert data.data_ptr() % mmap.PAGESIZE == 0
    assert not data.any()
    del memory
    gc.collect()
    data.fill_(7)
    assert int(data.sum()) == 7 * data.numel()


class Runtime:
    """In place of CUDA's: locks any memory."""

    is_unlocked = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # CUDA's name
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
        self.is_unlocked = True
        return 0


def test_pages_are_locked_as_long_as_their_object_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory(10, lock=True)
    data = memory.data
    assert (memory.is_locked, runtime.is_unlocked) == (True, False)
    del memory
    gc.collect()
    assert runtime.is_unlocked
    assert not data.any()
