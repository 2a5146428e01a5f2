"""Tests that a run keeps no memory on the device that an offload does not move."""

import gc

import pytest
import torch
from parking import EVERYTHING, running

from sley_core.comm.device import HostMemory, storage_id
from sley_testing.plans import small_plan

pytestmark = pytest.mark.timeout(120)


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
    """Returns the sizes of new storages of more than 2 KiB after an offload of all memory, and the freed bytes."""
    before = storage_sizes()
    with running(tables, folder) as run:
        for _ in range(2):
            run.step()
        run.memory.offload().wait()
        new_sizes = [size for key, size in storage_sizes().items() if key not in before and size > 2048]
        return new_sizes, sum(moved.given_back for moved in run.memory.report.values())


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
    tables = small_plan(precision__compute="bf16", batch__global_size=4, model__hidden=64, offload=EVERYTHING, **changes)
    for new_sizes, moved in ranks(2 if changes else 1, timeout_s=100)(unmoved_storages, tables, texts):
        assert moved > 200_000
        assert len(new_sizes) <= 2, new_sizes
