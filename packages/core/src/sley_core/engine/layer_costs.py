"""What each layer costs, so that a pipeline's parts can be cut evenly: its parameters, or the seconds that it takes.

Seconds are those of the first rank, which tells the others: one cut, on every rank. A layer is timed alone, on one
micro-batch of the plan's data and on the run's device: it is materialised, called a few times forward and backward as the
engine does it (recomputation included, and the loss behind the last), and is on meta again before the next one. The layers
are a second copy of the model, so nothing that they do when called reaches the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.data.cut import cut
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.data.feed import Feed
from sley_core.engine.call import LayerCaller
from sley_core.engine.in_flight import InFlight, describe, edges_of
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.model.materialize import materialize
from sley_core.records import PartitionerRecord

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.comm.world import World
    from sley_core.data.dataset import AnyDataset, DataInfo
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Loss

REPETITIONS = 3
"""Timed calls of a layer, behind one that warms up; the shortest counts, as whatever disturbs it makes it longer."""

DIGITS = 6
"""Decimals of the seconds: what the plan of the run's folder holds is exactly what the layers were cut by."""


def by_parameters(model: Model) -> list[float]:
    """Returns the number of parameters of each layer; one that several layers hold counts in each of them."""
    return [float(sum(p.numel() for p in layer.module.parameters())) for layer in model.layers]


def are_timed(plan: Plan) -> bool:
    """Whether the plan's partition wants seconds and has none yet."""
    if plan.partition is None or not isinstance(plan.partition.record, PartitionerRecord):
        return False
    return plan.partition.record.costs == "seconds" and plan.partition.config.layer_costs is None


def timed(plan: Plan, world: World, draft: Callable[[DataInfo], Model], dtype: torch.dtype) -> list[float]:
    """Returns the seconds of each layer, equal on every rank; a blocking collective of start-up.

    draft: makes the model on meta; only the first rank calls it. dtype: of the working weights.
    """

    def measure() -> list[float]:
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        with world.device.random_state_kept():
            return _Bench(plan, world.device, draft(dataset.info), dataset, dtype).seconds()

    return world.from_first(measure, "time the layers")


class _Bench:
    def __init__(self, plan: Plan, device: Device, model: Model, dataset: AnyDataset, dtype: torch.dtype) -> None:
        self.plan = plan
        self.device = device
        self.model = model
        self.dtype = dtype
        self.loss: Loss = plan.loss.build()
        policy = plan.activations.build([layer.name for layer in model.layers])
        self.caller = LayerCaller(device, plan.run.seed, policy)
        self.fields = self._micro_batch(dataset)
        self.micro = MicroStep(0, 0, Phase.TRAIN, 0, 0)

    def seconds(self) -> list[float]:
        """Returns each layer's shortest time, in order; every layer gets the output of the one before."""
        found = []
        value: Any = None
        remembered = [(layer, layer.written, layer.held) for layer in self.model.layers]
        for layer in self.model.layers:
            for each, written, held in remembered:  # `materialize` forgets what other ranks need
                each.written, each.held = written, held
            as_it_was = _Tensors(layer.module)
            materialize(
                self.model.layers,
                seed=self.plan.run.seed,
                init_weights=self.model.init_weights,
                dtype=self.dtype,
                device=self.device.torch_device,
                owned={layer.name},
            )
            taken_s = []
            for _ in range(1 + REPETITIONS):
                output, seconds = self._call(layer, value)
                taken_s.append(seconds)
            as_it_was.put_back()
            found.append(round(min(taken_s[1:]), DIGITS))
            description, tensors = describe(output)
            value = description, [tensor.detach() for tensor in tensors]
        return found

    def _call(self, layer: Layer, value: Any) -> tuple[Any, float]:
        """Returns the layer's output, after its backward, and the seconds of forward and backward."""
        held = InFlight()
        args: tuple[Any, ...] = ()
        if value is not None:
            args = (held.enter(*value),)
        named = {name: self.fields[name] for name in layer.fields}
        began = self.device.moment()
        output = self.caller(layer, args, named, self.micro)
        description, tensors = describe(output)
        pairs = zip(description.leaves, tensors, strict=True)
        gradients = [torch.ones_like(tensor) for leaf, tensor in pairs if leaf.has_gradient]
        if layer is self.model.layers[-1]:
            held.loss = self.loss.loss(output, self.fields)
            gradients = [torch.ones_like(held.loss)]
        else:
            held.edges = edges_of(description, tensors)
        if held.loss is None or held.loss.requires_grad:
            held.backward(gradients)
        seconds = self.device.seconds_between(began, self.device.moment())
        layer.module.zero_grad(set_to_none=True)
        return output, seconds

    def _micro_batch(self, dataset: AnyDataset) -> Mapping[str, Tensor]:
        """The first micro-batch of the run, on the device."""
        plan, size = self.plan, self.plan.batch.global_size
        rows = range(plan.batch.micro_size)
        data: Any = plan.data.config
        with Feed(dataset, seed=plan.run.seed, batch_size=size, rows=rows, shuffle=data.shuffle) as feed:
            batch = cut(feed.next(), dataset.info.fields, 0, 1)
        return {name: self.device.move(value) for name, value in batch.items()}


class _Tensors:
    """The parameters and buffers of a module as they are now, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self._found: Sequence[tuple[nn.Module, str, Tensor]] = [
            (each, name, tensor)
            for each in module.modules()
            for named in (each.named_parameters, each.named_buffers)
            for name, tensor in named(recurse=False, remove_duplicate=False)
        ]

    def put_back(self) -> None:
        for module, name, tensor in self._found:
            setattr(module, name, tensor)
