"""What reducers keep is in a checkpoint: the same layout goes on bit for bit."""

from __future__ import annotations

import pytest

from sley_testing.checkpointer_contract import assert_goes_on, assert_same_stretch, stretch
from sley_testing.plans import changed


def there_and_back(tables, folder, path, steps):
    """Six steps; so many, and a checkpoint; and the rest from there."""
    whole = stretch(tables, 6, folder=folder)
    stretch(tables, steps, folder=folder, save=path)
    return whole, stretch(tables, 6 - steps, folder=folder, load=path)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_same_layout_goes_on_bit_for_bit(ranks, own, tmp_path, small, steps):
    # Over sockets what is added first depends on the place in a bucket, from three ranks on: the bits need the kept order.
    tables = small(parallel={"dp": 3, "cross_memory_attach": False}, model__factory="dp_parts:branches")
    tables["batch"]["global_size"] = 3
    every = ranks(3, 120)(there_and_back, tables, own, tmp_path / "saved", steps)
    assert_same_stretch([one for one, _ in every], [other for _, other in every])


@pytest.mark.parametrize("handler", ["dp.bucketed", "dp.sharded"])
def test_a_model_of_odd_parameters_goes_on_in_another_layout(ranks, own, tmp_path, small, handler):
    """A scalar, one without elements, and one of seven: what no rank steps an element of is saved, too."""
    tables = small({"use": handler, "bucket_mb": 0.001}, parallel={"dp": 2}, model__factory="dp_parts:odd")
    saved = ranks(2)(stretch, tables, 2, folder=own, save=tmp_path / "saved")
    alone = changed(tables, parallel=None, gradient_handlers=None)
    wanted = stretch(alone, 3, folder=own)
    assert_goes_on(wanted, ranks(2)(stretch, tables, 1, folder=own, load=tmp_path / "saved"), "fp32")
    assert_goes_on(wanted, [stretch(alone, 1, folder=own, load=tmp_path / "saved")], "fp32")
    assert saved[0].weights["a.nothing"].shape == (0, 3)


def buckets_after(tables, folder, path, steps):
    """What lies in each bucket in the step after so many: of a run in one go, and of one that goes on from a checkpoint."""
    found = []

    def prepare(run):
        run.listeners.append(lambda _: found.append([[one.name for one in buffer.params] for buffer in run.store.buffers]))

    stretch(tables, steps + 1, folder=folder, prepare=prepare)
    whole = found.copy()
    stretch(tables, steps, folder=folder, save=path)
    stretch(tables, 1, folder=folder, load=path, prepare=prepare)
    return whole, found[-1]


@pytest.mark.parametrize("steps", [1, 3])
def test_buckets_lie_as_in_a_run_in_one_go(ranks, own, tmp_path, small, steps):
    """In the order that the first step has seen, and not in that of a run that begins."""
    for whole, after in ranks(2)(buckets_after, small(model__factory="dp_parts:branches"), own, tmp_path / "saved", steps):
        assert whole[0] != whole[1], "the first step teaches nothing here"
        assert after == whole[-1]
