"""Times layers one at a time, alone on the device, so that a model that does not fit there can be timed too.

A layer is materialised, called a few times forward and backward as the engine does it (recomputation included, and the loss
after the last), and put back on meta before the next one. The layers are a second copy of the model, so nothing that they do
when called affects the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.data.cut import cut
from sley_core.data.feed import Feed
from sley_core.data.slices import Slices
from sley_core.engine.boundary import Description
from sley_core.engine.call import LayerCaller
from sley_core.engine.direct import accumulates_directly, queued_products
from sley_core.engine.in_flight import InFlight, describe, edges_of
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.engine.weight_queue import WeightQueue
from sley_core.model.materialize import materialize

if TYPE_CHECKING:
    from sley_core.comm.device import Device, Span
    from sley_core.data.dataset import AnyDataset
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Loss

REPETITIONS = 5
"""Default number of timed calls of a layer, after one to warm up. Their median is used, not the minimum: what disturbs a call
here disturbs those of a run, too.
"""

EVICTED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Bytes written before each timed half, to evict the caches: in a run, other layers have filled them before a layer's turn."""

PLACE = (0, 0)
"""Chunk and micro-batch under which the weight gradients are queued."""

Handed = tuple[Description, list[Tensor]]
"""A layer's output, as it is passed to the next layer."""


@dataclass(frozen=True)
class LayerTimes:
    """Holds the seconds of a layer: medians. backward, input_gradient: recomputation included."""

    forward: float
    backward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0


class LayerBench:
    """Times the layers of `model`, which is on meta as it was drafted, on one micro-batch of the plan's data.

    dtype: of the working weights. gradients: dtype of the accumulated gradients, to which a backward adds its own; None omits
    the accumulation. repetitions: timed calls of a layer. apart: returns the spans of device work since its last call that are
    not the layer's own; they are subtracted.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        model: Model,
        dataset: AnyDataset,
        dtype: torch.dtype,
        gradients: torch.dtype | None = None,
        repetitions: int = REPETITIONS,
        apart: Callable[[], Sequence[Span]] = lambda: (),
    ) -> None:
        self.plan = plan
        self.device = device
        self.model = model
        self.dtype = dtype
        self.gradients = gradients
        self.repetitions = repetitions
        self.apart = apart
        self._is_direct = gradients == dtype and accumulates_directly(plan.precision.accumulation, device)
        self.loss: Loss = plan.loss.build()
        policy = plan.activations.build([layer.name for layer in model.layers])
        self.caller = LayerCaller(device, plan.run.seed, policy)
        self.fields = self._micro_batch(dataset)
        self.micro = MicroStep(0, 0, Phase.TRAIN, 0, 0)
        size = EVICTED_BYTES["cuda" if device.type == "cuda" else "cpu"]
        self._evicting = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        self._remembered = [(layer, layer.written, layer.held) for layer in model.layers]

    def time(self, layer: Layer, value: Handed | None, *, split: bool = False) -> tuple[LayerTimes, Handed]:
        """Returns the times of `layer`, and its output for the next one. value: the output of the layer before it; None for the
        first.

        split: whether the two halves of a split backward are timed too; else their times are 0.
        """
        for each, written, held in self._remembered:  # `materialize` clears these for layers that it does not own
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
        queue = WeightQueue()
        with self._accumulating(layer):
            with self._products(layer, queue) if self._is_direct else nullcontext():
                whole = [self._whole(layer, value) for _ in range(1 + self.repetitions)][1:]
            halves = [(0.0, 0.0)]
            if split:
                with self._products(layer, queue):
                    halves = [self._split(layer, value, queue) for _ in range(1 + self.repetitions)][1:]
        as_it_was.put_back()
        description, tensors = describe(whole[-1][0])
        times = LayerTimes(
            median(one[1] for one in whole),
            median(one[2] for one in whole),
            median(one[0] for one in halves),
            median(one[1] for one in halves),
        )
        return times, (description, [tensor.detach() for tensor in tensors])

    @contextmanager
    def _accumulating(self, layer: Layer) -> Iterator[None]:
        """Returns a context manager in which gradients are added to memory allocated for the layer, as in the store of a run:
        by autograd, or by a hook if the dtypes differ. If accumulation is omitted, it does nothing.
        """
        trained = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
        with ExitStack() as hooks:
            for parameter in trained if self.gradients is not None else ():
                slot = torch.zeros_like(parameter, dtype=self.gradients)
                if parameter.dtype == self.gradients:
                    parameter.grad = slot
                else:
                    hook = parameter.register_post_accumulate_grad_hook(partial(_add_to, slot))  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            yield
        layer.module.zero_grad(set_to_none=True)

    def _products(self, layer: Layer, queue: WeightQueue) -> AbstractContextManager[None]:
        return queued_products(layer.module, queue, self.gradients or self.dtype)

    def _whole(self, layer: Layer, value: Handed | None) -> tuple[Any, float, float]:
        """Runs the layer forward and backward; returns its output, and the seconds of forward and backward."""
        self._evict()
        self.apart()
        began = self.device.moment()
        held, output, gradients = self._forward(layer, value)
        ready, there = self.device.moment(), self.apart()
        self._evict()
        turned = self.device.moment()
        if held.loss is None or held.loss.requires_grad:
            held.backward(gradients)
        ended, back = self.device.moment(), self.apart()
        self._forget(layer)
        return output, self._seconds((began, ready), there), self._seconds((turned, ended), back)

    def _split(self, layer: Layer, value: Handed | None, queue: WeightQueue) -> tuple[float, float]:
        """Runs the layer with a split backward; returns the seconds of its two halves."""
        held, _, gradients = self._forward(layer, value)
        self._evict()
        self.apart()
        began = self.device.moment()
        with queue.collecting(PLACE):
            if held.loss is None or held.loss.requires_grad:
                held.backward(gradients)
        done, first = self.device.moment(), self.apart()
        self._evict()
        turned = self.device.moment()
        queue.run(PLACE)
        ended, second = self.device.moment(), self.apart()
        self._forget(layer)
        return self._seconds((began, done), first), self._seconds((turned, ended), second)

    def _seconds(self, span: Span, apart: Sequence[Span]) -> float:
        """Returns the seconds of `span` on the device, without those of `apart`. Waits for the device: called once all work is
        queued, so that no timed work waits.
        """
        whole, *others = (self.device.seconds_between(*one) for one in (span, *apart))
        return max(0.0, whole - sum(others))

    def _forget(self, layer: Layer) -> None:
        if self.gradients is None:
            layer.module.zero_grad(set_to_none=True)

    def _evict(self) -> None:
        """Evicts the layer's data from the device's caches, by writing to other memory."""
        self._evicting.zero_()

    def _forward(self, layer: Layer, value: Handed | None) -> tuple[InFlight, Any, list[Tensor]]:
        """Runs the layer's forward; returns what is in flight, its output, and the gradients (ones) to start the backward
        with.
        """
        held = InFlight()
        args: tuple[Any, ...] = () if value is None else (held.enter(*value),)
        named = {name: self.fields[name] for name in layer.fields}
        output = self.caller(layer, args, named, self.micro)
        description, tensors = describe(output)
        if layer is self.model.layers[-1]:
            held.loss = self.loss.loss(output, self.fields)
            return held, output, [torch.ones_like(held.loss)]
        held.edges = edges_of(description, tensors)
        pairs = zip(description.leaves, tensors, strict=True)
        return held, output, [torch.ones_like(tensor) for leaf, tensor in pairs if leaf.has_gradient]

    def _micro_batch(self, dataset: AnyDataset) -> Mapping[str, Tensor]:
        """Returns the first micro-batch of the run, as the first rank of `sp` gets it, on the device."""
        plan, size = self.plan, self.plan.batch.global_size
        rows = range(plan.batch.micro_size)
        data: Any = plan.data.config
        with Feed(dataset, seed=plan.run.seed, batch_size=size, rows=rows, shuffle=data.shuffle) as feed:
            batch = cut(feed.next(), dataset.info.fields, 0, 1)
        declared = {name: field for name, field in dataset.info.fields.items() if name in batch}
        first = Slices(declared, plan.parallel.sp, 0)(batch)
        return {name: self.device.move(value) for name, value in first.items()}


def _add_to(slot: Tensor, parameter: Tensor) -> None:
    """Adds the gradient that autograd has made to `slot`, and frees it; there is none where a product waits in the queue."""
    if parameter.grad is not None:
        slot.add_(parameter.grad)
        parameter.grad = None


class _Tensors:
    """Remembers the parameters and buffers of a module, to put them back."""

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
