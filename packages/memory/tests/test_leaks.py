"""Tests that memory on the device after an offload is named by its path, and that a run keeps no other memory."""

from __future__ import annotations

import gc

import pytest
import torch
from odd_parts import PLAN
from parking import EVERYTHING, running
from torch._subclasses.fake_tensor import FakeTensorMode

from sley_core.comm.device import HostMemory, storage_id
from sley_memory.leaks import find_leaks
from sley_testing.plans import small_plan

CACHING = {**PLAN, "model": {"factory": "odd_parts:caching"}, "offload": EVERYTHING}
KEPT: list[torch.Tensor] = []

pytestmark = pytest.mark.timeout(120)


def test_holders_are_named():
    """Tests a module's attribute, a global variable, a local one, a closure and an attribute of the optimizer. A view counts as
    its whole storage. Tensors of the run and tensors without values are no leaks.
    """
    with FakeTensorMode():
        KEPT.append(torch.ones(6001))
    with running(CACHING) as run:
        run.step()
        KEPT.append(torch.ones(2001))
        of_a_closure = torch.ones(3001)
        a_local = [torch.ones(4001)[:1]]
        run.stepper.update.optimizer.kept = {"last": torch.ones(5001)}
        run.stepper.update.optimizer.register_step_post_hook(lambda *_: of_a_closure.sum())
        run.memory.offload("masters", "gradients")
        leaks = {leak.num_bytes: leak for leak in find_leaks(run)}
        paths = {size: leak.path for size, leak in leaks.items()}
        cached = 2 * 512 * 4
        assert (leaks[cached].dtype, leaks[cached].shape) == (torch.float32, (2, 512))
        assert str(leaks[cached]) == "layers[0].module.cache['last'][0]: float32 [2, 512], 0.00 MiB"
        assert paths[20_004] == "optimizer.kept['last']"
        assert paths[16_004].startswith("a_local in test_holders_are_named()")
        assert paths[8004].endswith("test_leaks.KEPT[1]")
        assert "of_a_closure" in paths[12_004]
        assert a_local
        KEPT.clear()
        expected = {paths[cached], paths[20_004], paths[12_004]}
        assert {path for path in paths.values() if path.startswith(("layers", "optimizer", "store"))} <= expected
        run.layers[0].module.cache.clear()
        run.memory.offload()
        assert not [leak for leak in find_leaks(run) if leak.path.startswith("layers")]


def size(tensor):
    try:
        storage = tensor.untyped_storage()
        return storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError:  # of stand-ins, which have none
        return 0


def storage_sizes():
    """Returns the bytes of all storages of this process outside of arenas, by their id."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.layout == torch.strided]
    with torch._C.DisableTorchFunctionSubclass():
        return {storage_id(one): size(one) for one in tensors if not HostMemory.contains(one)}


def unmoved_storages(tables, folder):
    """Returns the number of new storages of more than 2 KiB after an offload of all memory, the paths of leaks, and the
    freed bytes.
    """
    before = storage_sizes()
    with running(tables, folder) as run:
        for _ in range(3):
            run.step()
        run.memory.offload().wait()
        new = {key for key, size in storage_sizes().items() if key not in before and size > 2048}
        listed = {leak.path: leak for leak in find_leaks(run, 2048)}
        moved = sum(moved.given_back for moved in run.memory.report.values())
        return len(new), sorted(listed), moved


LAYOUTS = {
    "sharded weights": {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}},
    "one rank": {},
    "columns of the table, slices of the vocabulary": {
        "parallel": {"wp": 2},
        "weights": {"use": "isp.communicator", "embedding": "hidden", "head": "vocabulary"},
    },
    "sharded optimizer": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded"}]},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_run_keeps_no_memory_that_it_does_not_move(ranks, changes, texts):
    """Counts all storages of the process. After an offload only those of the data are left."""
    tables = small_plan(precision__compute="bf16", model__hidden=64, offload=EVERYTHING, **changes)
    for num_new, paths, moved in ranks(2 if changes else 1, timeout_s=100)(unmoved_storages, tables, texts):
        assert moved > 200_000
        assert num_new <= 2, paths
