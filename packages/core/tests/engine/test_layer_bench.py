"""What is timed of a layer is what a run does with it: how its gradients are accumulated, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.comm.device import Device
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.draft import draft_model
from sley_core.engine.layer_bench import LayerBench
from sley_core.plan.load import plan_from_dict
from sley_core.testing.plans import small_plan

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


def additions(accumulation: str, compute: str = "fp32", *, split: bool = False) -> tuple[dict[str, list[Tensor]], int]:
    """What was added to while the first block was timed, and how many weights its linears have."""
    data = {"use": "core.text", "source": "python-stdlib", "sequence": 24}
    plan = plan_from_dict(small_plan(data=data, precision={"compute": compute, "accumulation": accumulation}))
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = draft_model(plan, dataset.info)
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    bench = LayerBench(plan, Device(torch.device("cpu")), model, dataset, dtype, torch.float32, REPETITIONS)
    embed, block = model.layers[:2]
    _, value = bench.time(embed, None)
    weights = [one.weight for one in block.module.modules() if isinstance(one, nn.Linear)]
    with Additions({weight.shape for weight in weights}) as seen:
        bench.time(block, value, split=split)
    return seen.found, len(weights)


@pytest.mark.parametrize(
    ("accumulation", "compute", "operator"),
    [("autograd", "fp32", "add_"), ("autograd", "bf16", "add_"), ("direct", "fp32", "addmm_")],
)
def test_a_backward_adds_to_the_same_memory_each_time_as_the_plan_says(accumulation, compute, operator) -> None:
    found, num_weights = additions(accumulation, compute)
    assert found.keys() == {operator}
    assert len(found[operator]) == num_weights * (1 + REPETITIONS)
    assert len({tensor.data_ptr() for tensor in found[operator]}) == num_weights
    assert {tensor.dtype for tensor in found[operator]} == {torch.float32}


def test_a_split_backward_adds_its_products_to_the_same_memory_each_time() -> None:
    found, num_weights = additions("autograd", split=True)
    assert len(found["addmm_"]) == num_weights * (1 + REPETITIONS)
    assert len({tensor.data_ptr() for tensor in found["addmm_"]}) == num_weights


def test_a_split_backward_of_narrow_weights_adds_its_products_too() -> None:
    """Autograd has no gradient for the hook that adds it in the wider type: its product waits in the queue."""
    found, num_weights = additions("autograd", "bf16", split=True)
    assert len(found["add_"]) == 2 * num_weights * (1 + REPETITIONS), "whole backwards, and products of split ones"
