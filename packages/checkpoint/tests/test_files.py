"""What is in a checkpoint: rectangles, files of safetensors that others open, and values that come back as they were."""

import gc
import json
import weakref
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_checkpoint.reader import read
from sley_checkpoint.saving import HostCopies
from sley_core.checkpointing import Rectangle, Region, join_leaves
from sley_core.comm.device import HostMemory
from sley_core.engine.buffers import ElementRange
from sley_core.engine.shards import Shard
from sley_core.errors import RunError
from sley_core.json_text import decode_value, encode_value
from sley_testing.drawn_copies import DrawnDevice, DrawnStream
from sley_testing.plans import changed, small_plan
from sley_testing.runs import record
from sley_trainer.restore import name_leaves, state_leaves


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.integers(1, 3), st.integers(1, 3), st.data())
@settings(deadline=None, max_examples=40)
def test_the_parts_of_all_ranks_are_the_whole_and_nothing_twice(shape, count, spans, data):
    """Shards along any dim, padded, each cut into spans of its elements, as a sharded optimizer has them."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.arange(prod(shape)).view(shape)
    times = torch.zeros(shape)
    for index in range(count):
        shard = Shard(shape, count, index, dim)
        own, numel = shard.cut(whole + 1), prod(shard.local_shape)
        ends = [numel * number // spans for number in range(spans + 1)]
        for first, last in pairwise(ends):
            region = Region(shape, shard, ElementRange(first, last))
            for rectangle, view in region.split(own.reshape(-1)[first:last].view(region.local_shape)):
                place = rectangle.slices_in(Rectangle.from_shape(shape))
                assert torch.equal(whole[place] + 1, view)
                times[place] += 1
    assert torch.equal(times, torch.ones(shape))


@pytest.mark.parametrize(
    "value",
    [None, [1, (2.5, "x"), {"a": [True], 3: b"\x00\xff"}], {"sley:tuple": 1}, (), {"nan": [float("inf")], "big": 1 << 80}],
)
def test_values_come_back_as_they_were(value):
    assert decode_value(json.loads(json.dumps(encode_value(value)))) == value


def test_what_is_no_plain_data_is_refused():
    with pytest.raises(TypeError, match=r"builtins\.set is not plain data"):
        encode_value({"a": {1}})


@pytest.mark.parametrize("state", [{"a": 1}, {"a": {"b": [1, 2, (3, {"c": 4})]}, "d": 5}, {"a": [], "b": ()}, {"empty": {}}])
def test_nested_states_come_back(state):
    tree = decode_value(json.loads(json.dumps(encode_value(name_leaves(state)))))
    assert join_leaves(tree, dict(state_leaves(state))) == state


def test_a_state_under_a_key_that_names_nothing_is_refused():
    for state in ({3: 1}, {"a/b": 1}):
        with pytest.raises(RunError, match="optimizer-state"):
            name_leaves(state)


def test_two_ranks_write_half_of_the_tensors_each_and_safetensors_opens_the_files(texts, tmp_path, ranks):
    safetensors = pytest.importorskip("safetensors")
    tables = changed(small_plan(), parallel={"dp": 2}, gradient_handlers=[{"use": "core.each"}])
    ranks(2)(record, tables, 2, folder=texts, save=tmp_path / "saved")
    files = list((tmp_path / "saved").glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 2
    assert max(sizes) < 1.1 * min(sizes)
    checkpoint = read(tmp_path / "saved")
    assert all(len(info.pieces) == 1 for info in checkpoint.index.tensors.values())
    names = set()
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                names.add(name)
                assert torch.equal(opened.get_tensor(name), checkpoint[name]), name
    assert names == set(checkpoint)
    weights = dict(checkpoint.weights())
    assert {f"weights/{name}" for name in weights} == {name for name in names if name.startswith("weights/")}
    assert all(torch.equal(value, checkpoint[f"weights/{name}"]) for name, value in weights.items())


# -- copies on an asynchronous device ----------------------------------------------------------------------------------


class Asynchronous(DrawnDevice):
    """Runs ahead of the host, as CUDA does."""

    @property
    def is_async(self) -> bool:
        return True


@pytest.mark.parametrize("order", range(4))
def test_copies_have_the_values_of_their_beginning_and_saves_share_memory(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Update and writer wait for copies. The host waits for those to unlocked memory, and exchanges need CUDA's 32 streams."""
    memories: list[weakref.ref[HostMemory]] = []
    num_streams = 0
    device = Asynchronous(copy_seed=order)
    host_memory, copy_stream = device.host_memory, device.copy_stream

    def lock_memory(num_bytes: int) -> HostMemory:
        memory = host_memory(num_bytes)
        memories.append(weakref.ref(memory))
        return memory

    def open_stream() -> DrawnStream:
        nonlocal num_streams
        num_streams += 1
        return copy_stream()

    monkeypatch.setattr(device, "host_memory", lock_memory)
    monkeypatch.setattr(device, "copy_stream", open_stream)
    host_copies = HostCopies(device)
    with device.watching():
        for number in (2, 2, 3):
            tensors = [torch.full((300,), 1.0), torch.full((20, 30), 2.0).t(), torch.full((300,), 3.0)][:number]
            wanted = [tensor.clone() for tensor in tensors]
            copies, event = host_copies.start(tensors)
            gc.collect()
            assert memories[-1]() is not None, "unlocked before the copies are done"
            if order % 2:
                event.wait()
                assert all(map(torch.equal, copies, wanted)), number
            event.make_device_wait()
            for tensor in tensors:
                tensor.add_(1.0)
            event.wait()
            assert all(map(torch.equal, copies, wanted)), number
            assert all(copy.is_contiguous() for copy in copies)
        assert (len(memories), num_streams) == (2, 1), "only larger buffers are locked again"
        host_copies.free()
        del copies
        gc.collect()
        assert all(memory() is None for memory in memories)
