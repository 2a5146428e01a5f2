"""Times layers one at a time, alone on the device, so that a model that does not fit there can be timed too.

A layer is materialised, called a few times forward and backward as the engine does it (recomputation included, and the loss
after the last), and put back on meta before the next one. The layers are a second copy of the model, so nothing that they do
when called affects the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sley_core.data.cut import cut
from sley_core.data.feed import Feed
from sley_core.data.slices import Slices
from sley_core.engine.boundary import Description
from sley_core.engine.call import LayerCaller
from sley_core.engine.direct import accumulates_directly, queued_products
from sley_core.engine.in_flight import InFlight, describe, edges_of
from sley_core.engine.kept_tensors import KeptTensors
from sley_core.engine.lead import Lead, seconds_of_an_empty_backward
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

HOST_CALLS = 3
"""Calls of an idle device, where it works through a queue: by them it is known how far the host must be ahead."""

HOST_S = 0.03
"""Seconds for each repetition of a layer that the host takes longer to start than the device to run. Hosts have other work, by
turns: a layer that was timed within a tenth of a second had seconds that differed by a third from those of a run.
"""

PLACE = (0, 0)
"""Chunk and micro-batch under which the weight gradients are queued."""

Handed = tuple[Description, list[Tensor]]
"""A layer's output, as it is passed to the next layer."""


@dataclass(frozen=True)
class LayerTimes:
    """Holds the seconds of a layer: medians. backward, input_gradient: recomputation included.

    They are the device's, with the host ahead of it; or the host's, where it takes longer to start the work than the device to
    do it.
    """

    forward: float
    backward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0


class _Timed(NamedTuple):
    """The seconds of one half of a call. host_s: to start it."""

    device_s: float
    host_s: float


Halves = tuple[_Timed, _Timed]
"""Forward and backward, or the two halves of a split backward."""


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
        self._lead = Lead(device)
        self._empty_s = seconds_of_an_empty_backward(device) if device.is_async else 0.0
        self._remembered = [(layer, layer.written, layer.held) for layer in model.layers]

    def time(self, layer: Layer, value: Handed | None, *, split: bool = False) -> tuple[LayerTimes, Handed]:
        """Returns the times of `layer`, and its output for the next one. value: the output of the layer before it; None for the
        first.

        split: whether the two halves of a split backward are timed too; else their times are 0.
        """
        for each, written, held in self._remembered:  # `materialize` clears these for layers that it does not own
            each.written, each.held = written, held
        as_it_was = KeptTensors(layer.module)
        materialize(
            self.model.layers,
            seed=self.plan.run.seed,
            init_weights=self.model.init_weights,
            dtype=self.dtype,
            device=self.device.torch_device,
            owned={layer.name},
        )
        queue = WeightQueue()
        outputs: list[Any] = []
        with self._accumulating(layer):
            with self._products(layer, queue) if self._is_direct else nullcontext():
                forward, backward = self._medians(lambda host_s: self._whole(layer, value, outputs, host_s))
            first, second = 0.0, 0.0
            if split:
                with self._products(layer, queue):
                    first, second = self._medians(lambda host_s: self._split(layer, value, queue, host_s))
        as_it_was.put_back()
        description, tensors = describe(outputs[-1])
        times = LayerTimes(forward, backward, first, second)
        return times, (description, [tensor.detach() for tensor in tensors])

    def _medians(self, call: Callable[[tuple[float, float]], Halves]) -> tuple[float, float]:
        """Calls `call` as often as is asked for, and returns the seconds of its halves.

        call: given the host's seconds to start each half, 0 where they are not known yet.
        """
        unknown = (0.0, 0.0)
        call(unknown)  # loads kernels, and takes memory
        ahead, idle = unknown, list[Halves]()
        if self.device.is_async:
            idle = [call(unknown) for _ in range(HOST_CALLS)]
            ahead = median(one.host_s for one, _ in idle), median(one.host_s for _, one in idle)
        until_s = time.perf_counter() + HOST_S * self.repetitions
        led = [call(ahead) for _ in range(self.repetitions)]
        while self.device.is_async and _waits_for_host(led) and time.perf_counter() < until_s:
            led.append(call(ahead))
        return _slower(idle, led, 0), _slower(idle, led, 1)

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

    def _whole(self, layer: Layer, value: Handed | None, outputs: list[Any], host_s: tuple[float, float]) -> Halves:
        """Runs the layer forward and backward, as two halves; its output is all that `outputs` has afterwards."""
        outputs.clear()
        held, args, named = self._entered(layer, value)
        self._lead(host_s[0])
        self.apart()
        began, began_s = self.device.moment(), time.perf_counter()
        output = self._called(layer, held, args, named)
        ended_s, ready, there = time.perf_counter(), self.device.moment(), self.apart()
        outputs.append(output)
        gradients = self._left(layer, held, output)
        self._lead(host_s[1])
        turned, turned_s = self.device.moment(), time.perf_counter()
        self._backward(held, gradients)
        done_s, ended, back = time.perf_counter(), self.device.moment(), self.apart()
        self._forget(layer)
        return (
            _Timed(self._seconds((began, ready), there), ended_s - began_s),
            _Timed(self._seconds((turned, ended), back), max(0.0, done_s - turned_s - self._empty_s)),
        )

    def _split(self, layer: Layer, value: Handed | None, queue: WeightQueue, host_s: tuple[float, float]) -> Halves:
        """Runs the layer with a split backward, whose parts are the halves."""
        held, args, named = self._entered(layer, value)
        gradients = self._left(layer, held, self._called(layer, held, args, named))
        self._lead(host_s[0])
        self.apart()
        began, began_s = self.device.moment(), time.perf_counter()
        with queue.collecting(PLACE):
            self._backward(held, gradients)
        ended_s, done, first = time.perf_counter(), self.device.moment(), self.apart()
        self._lead(host_s[1])
        turned, turned_s = self.device.moment(), time.perf_counter()
        queue.run(PLACE)
        done_s, ended, second = time.perf_counter(), self.device.moment(), self.apart()
        self._forget(layer)
        return (
            _Timed(self._seconds((began, done), first), max(0.0, ended_s - began_s - self._empty_s)),
            _Timed(self._seconds((turned, ended), second), done_s - turned_s),
        )

    def _backward(self, held: InFlight, gradients: list[Tensor]) -> None:
        """Runs the backward of what is in flight, if anything of it has one."""
        if held.loss is None or held.loss.requires_grad:
            held.backward(gradients)

    def _seconds(self, span: Span, apart: Sequence[Span]) -> float:
        """Returns the seconds of `span` on the device, without those of `apart`. Waits for the device: called once all work is
        queued, so that no timed work waits.
        """
        whole, *others = (self.device.seconds_between(*one) for one in (span, *apart))
        return max(0.0, whole - sum(others))

    def _forget(self, layer: Layer) -> None:
        if self.gradients is None:
            layer.module.zero_grad(set_to_none=True)

    def _entered(self, layer: Layer, value: Handed | None) -> tuple[InFlight, tuple[Any, ...], Mapping[str, Tensor]]:
        """Returns what is in flight, and the layer's arguments and fields."""
        held = InFlight()
        args: tuple[Any, ...] = () if value is None else (held.enter(*value),)
        return held, args, {name: self.fields[name] for name in layer.fields}

    def _called(self, layer: Layer, held: InFlight, args: tuple[Any, ...], named: Mapping[str, Tensor]) -> Any:
        """Runs the layer's forward, and the loss after the last; returns its output."""
        output = self.caller(layer, args, named, self.micro)
        if layer is self.model.layers[-1]:
            held.loss = self.loss.loss(output, self.fields)
        return output

    def _left(self, layer: Layer, held: InFlight, output: Any) -> list[Tensor]:
        """Returns the gradients (ones) to start the backward with."""
        if held.loss is not None:
            return [torch.ones_like(held.loss)]
        description, tensors = describe(output)
        held.edges = edges_of(description, tensors)
        pairs = zip(description.leaves, tensors, strict=True)
        return [torch.ones_like(tensor) for leaf, tensor in pairs if leaf.has_gradient]

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


def _waits_for_host(led: Sequence[Halves]) -> bool:
    """Returns whether the host takes longer to start a half than the device to run it."""
    return any(median(one[half].host_s - one[half].device_s for one in led) > 0 for half in (0, 1))


def _slower(idle: Sequence[Halves], led: Sequence[Halves], half: int) -> float:
    """Returns the seconds of a half, 0 or 1, medians: the device's with the host ahead, or the host's where that is more.

    idle: calls of an idle device, none where it does not work through a queue. A layer that waits for the device waits for the
    lead too, but not there.
    """
    host_s = min(median(one[half].host_s for one in calls) for calls in (led, idle)) if idle else 0.0
    return max(median(one[half].device_s for one in led), host_s)


def _add_to(slot: Tensor, parameter: Tensor) -> None:
    """Adds the gradient that autograd has made to `slot`, and frees it; there is none where a product waits in the queue."""
    if parameter.grad is not None:
        slot.add_(parameter.grad)
        parameter.grad = None
