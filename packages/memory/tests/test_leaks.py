"""What still has memory after an offload is named by the way that leads to it; what a run keeps is moved, or listed."""

from __future__ import annotations

import gc

import pytest
import torch
from odd_parts import PLAN
from parking import EVERYTHING, running
from torch._subclasses.fake_tensor import FakeTensorMode

from sley_core.comm.copies import HostMemory, storage_id
from sley_memory.leaks import find_leaks
from sley_testing.plans import small_plan

CACHING = {**PLAN, "model": {"factory": "odd_parts:caching"}, "offload": EVERYTHING}
KEPT: list[torch.Tensor] = []

pytestmark = pytest.mark.timeout(120)


def test_a_model_that_keeps_its_output_is_named():
    """Largest first, with bytes, and no longer once the model has let go."""
    with running(CACHING) as run:
        run.step()
        run.memory.offload().wait()
        (leak,) = [leak for leak in find_leaks(run) if leak.path.startswith("layers")]
        assert leak.path == "layers[0].module.cache['last'][0]"
        assert (leak.num_bytes, leak.dtype, leak.shape) == (2 * 512 * 4, torch.float32, (2, 512))
        assert str(leak) == "layers[0].module.cache['last'][0]: float32 [2, 512], 0.00 MiB"
        run.layers[0].module.cache.clear()
        assert not [leak for leak in find_leaks(run) if leak.path.startswith("layers")]


def test_other_holders_are_named():
    """A global variable, a local one, a closure, an attribute of an optimizer's hook; a view counts as the whole."""
    with running(CACHING) as run:
        run.step()
        KEPT.append(torch.ones(2001))
        of_a_closure = torch.ones(3001)
        a_local = [torch.ones(4001)[:1]]
        run.stepper.update.optimizer.kept = {"last": torch.ones(5001)}
        run.stepper.update.optimizer.register_step_post_hook(lambda *_: of_a_closure.sum())
        run.memory.offload()
        found = {leak.num_bytes: leak.path for leak in find_leaks(run)}
        assert found[20_004] == "optimizer.kept['last']"
        assert found[16_004].startswith("a_local in test_other_holders_are_named()")
        assert found[8004].endswith("test_leaks.KEPT[0]")
        assert "of_a_closure" in found[12_004]
        assert a_local
        KEPT.clear()


def test_a_tensor_without_values_is_no_leak():
    with FakeTensorMode():
        KEPT.append(torch.ones(6001))
    with running(CACHING) as run:
        run.step()
        run.memory.offload()
        assert not [leak for leak in find_leaks(run) if leak.shape == (6001,)]
    KEPT.clear()


def test_what_is_here_is_no_leak():
    with running(CACHING) as run:
        run.step()
        run.layers[0].module.cache.clear()
        weight = run.layers[0].module.linear.weight
        run.memory.offload("masters", "gradients")
        assert not [leak for leak in find_leaks(run) if leak.path.startswith(("layers", "optimizer", "store"))]
        assert weight.untyped_storage().nbytes() > 4096


def size(tensor):
    try:
        storage = tensor.untyped_storage()
        return storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError:  # of stand-ins, which have none
        return 0


def storages():
    """Bytes of all storages of this process that are not an arena's, by their id."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.layout == torch.strided]
    with torch._C.DisableTorchFunctionSubclass():
        return {storage_id(one): size(one) for one in tensors if not HostMemory.contains(one)}


def left_over(tables, folder):
    """The paths of what has memory after an offload of everything and was not there before the run, beyond 2 KiB each."""
    before = storages()
    with running(tables, folder) as run:
        for _ in range(3):
            run.step()
        run.memory.offload().wait()
        new = {key for key, size in storages().items() if key not in before and size > 2048}
        listed = {leak.path: leak for leak in find_leaks(run, 2048)}
        moved = sum(moved.given_back for moved in run.memory.report.values())
        return len(new), sorted(listed), moved


LAYOUTS = {
    "alone": {},
    "sharded weights": {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}},
    "columns of the table, slices of the vocabulary": {
        "parallel": {"wp": 2},
        "weights": {"use": "isp.communicator", "embedding": "hidden", "head": "vocabulary"},
    },
    "sharded optimizer": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded"}]},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_run_keeps_nothing_that_it_does_not_move(ranks, changes, texts):
    """All storages of the process are counted: after an offload only the data's are left."""
    tables = small_plan(precision__compute="bf16", model__hidden=64, offload=EVERYTHING, **changes)
    for num_new, paths, moved in ranks(2 if changes else 1, timeout_s=100)(left_over, tables, texts):
        assert moved > 200_000
        assert num_new <= 2, paths
