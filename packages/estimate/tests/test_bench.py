"""What is timed of a layer is what a run does with it, with the host ahead of the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.assemble import build_meta_model
from sley_core.comm.device import Device
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.plan.load import plan_from_dict
from sley_estimate.calibrate import bench as benches
from sley_estimate.calibrate import device as devices
from sley_estimate.calibrate.bench import NUM_HOST_CALLS, ROW_LENGTH, LayerBench
from sley_estimate.layers.prices import LayerSeconds
from sley_testing.plans import small_plan

REPETITIONS = 3


class Additions(TorchDispatchMode):
    """Keeps what tensors of `shapes` were added to in place, by operator; kept, none has the memory of another."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.found: dict[str, list[Tensor]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.addmm_.default) and args[0].shape in self.shapes:
            self.found[func.overloadpacket.__name__].append(args[0])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class AtOnce(Device):
    """A device that works through a queue, in no time."""

    @property
    def is_async(self) -> bool:
        return True

    def moment(self) -> float:
        return 0.0

    def seconds_between(self, first: object, last: object) -> float:
        return 0.0

    def move(self, tensor: Tensor) -> Tensor:
        return tensor


CPU = Device(torch.device("cpu"))


def additions(
    accumulation: str, compute: str = "fp32", *, split: bool = False, device: Device = CPU
) -> tuple[dict[str, list[Tensor]], int, LayerSeconds]:
    """What was added to while the first block was timed, how many weights its linears have, and its times."""
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    plan = plan_from_dict(small_plan(data=data, precision={"compute": compute, "accumulation": accumulation}))
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = build_meta_model(plan, dataset.info)
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    bench = LayerBench(plan, device, model, dataset, dtype, torch.float32, REPETITIONS)
    embed, block = model.layers[:2]
    _, value = bench.time(embed, None)
    weights = [one.weight for one in block.module.modules() if isinstance(one, nn.Linear)]
    with Additions({weight.shape for weight in weights}) as seen:
        times, _ = bench.time(block, value, split=split)
    return seen.found, len(weights), times


@pytest.mark.parametrize(
    ("accumulation", "compute", "operator"),
    [("autograd", "fp32", "add_"), ("autograd", "bf16", "add_"), ("direct", "fp32", "addmm_")],
)
def test_a_backward_adds_to_the_same_memory_each_time_as_the_plan_says(accumulation, compute, operator) -> None:
    found, num_weights, _ = additions(accumulation, compute)
    assert found.keys() == {operator}
    assert len(found[operator]) == num_weights * (1 + REPETITIONS)
    assert len({tensor.data_ptr() for tensor in found[operator]}) == num_weights
    assert {tensor.dtype for tensor in found[operator]} == {torch.float32}


def test_a_split_backward_of_narrow_weights_adds_its_products_too() -> None:
    """Autograd has no gradient for the hook that adds it in the wider type: its product waits in the queue."""
    found, num_weights, _ = additions("autograd", "bf16", split=True)
    assert len(found["add_"]) == 2 * num_weights * (1 + REPETITIONS), "whole backwards, and products of split ones"


def test_a_device_that_is_faster_than_its_host_is_waited_for_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half takes the host's seconds, of one call of the row; split ones multiply as often, and add to the same memory."""
    reads = count()  # a second from one reading of the clock to the next
    clock = SimpleNamespace(perf_counter=lambda: float(next(reads)))
    monkeypatch.setattr(benches, "time", clock)
    monkeypatch.setattr(benches, "time_empty_backward", lambda device: 0.05)
    monkeypatch.setattr(benches, "HOST_S", 0.0)
    monkeypatch.setattr(devices, "WRITTEN_BYTES", {"cpu": 1})
    found, num_weights, times = additions("autograd", split=True, device=AtOnce(CPU.torch_device))
    assert astuple(times) == pytest.approx(
        (0.0,) * 4 + (1 / ROW_LENGTH, 1 / ROW_LENGTH - 0.05, 1 / ROW_LENGTH - 0.05, 1 / ROW_LENGTH)
    )
    assert times.whole_s == pytest.approx(2 / ROW_LENGTH - 0.05), "the slower counts"
    assert len(found["addmm_"]) == num_weights * (1 + NUM_HOST_CALLS + REPETITIONS + ROW_LENGTH)
    assert len({tensor.data_ptr() for tensor in found["addmm_"]}) == num_weights
