"""Times layers one at a time, alone on the device, so that a model that does not fit there can be timed too.

A layer gets its first values on the device, is called a few times forward and backward as the engine does it (recomputation
included, and the loss after the last), and is put back on meta before the next one. Layers of builders are built one by one; a
factory's are on the host meanwhile. The layers are a second copy of the model, so nothing that they do
when called affects the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.data.batches import Slices, cut
from sley_core.data.feed import Feed
from sley_core.engine.call import LayerCaller
from sley_core.engine.direct import WeightQueue, accumulates_directly
from sley_core.engine.execute import describe
from sley_core.model.values import HostModel
from sley_estimate.bench.layer_calls import Half, Halves, Handed, LayerCalls
from sley_estimate.bench.layer_gradients import LayerGradients, queued_products

if TYPE_CHECKING:
    from sley_core.comm.device import Device, Span
    from sley_core.data.dataset import AnyDataset
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import SequenceCommunicator

REPETITIONS = 5
"""Default number of timed calls of a layer, after one to warm up. Their median is used, not the minimum: what disturbs a call
here disturbs those of a run, too.
"""

HOST_CALLS = 3
"""Calls of an idle device, where it works through a queue: by them it is known how far the host must be ahead."""

HOST_S = 0.03
"""Seconds for each repetition of a layer that the host may take longer to start than the device to run. Hosts have other work,
by turns: a layer that was timed within a tenth of a second had seconds that differed by a third from those of a run.
"""

NEARLY = 0.5
"""Share of the device's seconds from which the host's are timed so. Calls in a row are for layers of which several fit; of
others single calls tell, in which a host that has waited for its device is a little slower.
"""


NOTHING = Half(0.0, 0.0)
"""Of a half that was not asked for."""


@dataclass(frozen=True)
class LayerTimes:
    """Holds the seconds of a layer, medians: of the device, with the host ahead of it. backward, input_gradient: recomputation
    included. host_forward and so on: of the host to start each, but for what becomes of gradients that autograd hands over,
    which is the engine's and timed by itself; 0 for a device without a queue.
    """

    forward: float
    backward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    host_input_gradient: float = 0.0
    host_weight_gradient: float = 0.0

    @property
    def whole_s(self) -> float:
        """Returns the seconds of forward and backward, each of the slower of device and host."""
        return max(self.forward, self.host_forward) + max(self.backward, self.host_backward)


class LayerBench:
    """Times the layers of `model`, which is on meta as it was drafted, on one micro-batch of the plan's data.

    dtype: of the working weights. gradients: dtype of the accumulated gradients, to which a backward adds its own; None omits
    the accumulation. repetitions: timed calls of a layer. apart: returns the spans of device work since its last call that are
    not the layer's own; they are subtracted. attention: is attached to the model while a layer is timed.
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
        attention: SequenceCommunicator | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        self.model = model
        self.dtype = dtype
        self.gradients = gradients
        self.repetitions = repetitions
        self._is_direct = gradients == dtype and accumulates_directly(plan.precision.accumulation, device)
        caller = LayerCaller(device, plan.run.seed, plan.activations.build([layer.name for layer in model.layers]))
        fields, forgets = self._micro_batch(dataset), gradients is None
        last, loss = model.layers[-1], plan.loss.build()
        self._calls = LayerCalls(device, caller, fields, loss, last, forgets=forgets, apart=apart)
        self._host = HostModel(model)
        self._attention = attention
        self._gradients: LayerGradients | None = None

    def time(self, layer: Layer, value: Handed | None, *, split: bool = False) -> tuple[LayerTimes, Handed]:
        """Returns the times of `layer`, and its output for the next one. value: the output of the layer before it; None for the
        first.

        split: whether the two halves of a split backward are timed too; else their times are 0.
        """
        on_meta, on_host = layer.module, KeptTensors(self._host.made(layer))
        device, keep = self.device.torch_device, self.plan.precision.keep
        self._host.place({layer.name}, dtype=self.dtype, device=device, keep=keep)
        if self._attention is not None:
            self._attention.attach(self.model.layers)
        calls, queue, outputs = self._calls, WeightQueue(), list[Any]()
        with self._accumulating(layer):
            with self._products(layer, queue) if self._is_direct else nullcontext():
                whole = self._medians(
                    lambda host_s: calls.whole(layer, value, outputs, host_s), lambda: calls.in_a_row(layer, value, None)
                )
            parts = NOTHING, NOTHING
            if split:
                with self._products(layer, queue):
                    parts = self._medians(
                        lambda host_s: calls.split(layer, value, queue, host_s), lambda: calls.in_a_row(layer, value, queue)
                    )
        if self._attention is not None:
            self._attention.detach()
        on_host.put_back()
        layer.module = on_meta
        description, tensors = describe(outputs[-1])
        halves = *whole, *parts
        times = LayerTimes(*(half.device_s for half in halves), *(half.host_s for half in halves))
        return times, (description, [tensor.detach() for tensor in tensors])

    def _medians(self, call: Callable[[tuple[float, float]], Halves], in_a_row: Callable[[], tuple[float, float]]) -> Halves:
        """Calls `call` as often as is asked for, and returns the seconds of its halves, medians.

        call: given the host's seconds to start each half, 0 where they are not known yet. in_a_row: tells those of the host.
        """
        ahead = unknown = (0.0, 0.0)
        call(unknown)  # loads kernels, and takes memory
        if self.device.is_async:
            ahead = _host_medians([call(unknown) for _ in range(HOST_CALLS)])
        led = [call(ahead) for _ in range(self.repetitions)]
        device_s = [median(one[half].device_s for one in led) for half in (0, 1)]
        host_s = (0.0, 0.0)
        if self.device.is_async:
            is_near = any(host > NEARLY * device for host, device in zip(ahead, device_s, strict=True))
            with self._gradients.dropped() if self._gradients else nullcontext():
                host_s = self._row_medians(in_a_row) if is_near else _host_medians([call(unknown) for _ in range(HOST_CALLS)])
        return Half(device_s[0], host_s[0]), Half(device_s[1], host_s[1])

    def _row_medians(self, in_a_row: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """Calls `in_a_row` for a while, and returns the host's seconds to start each half, medians."""
        until_s = time.perf_counter() + HOST_S * self.repetitions
        rows = [in_a_row()]
        while time.perf_counter() < until_s:
            rows.append(in_a_row())
        return median(one for one, _ in rows), median(one for _, one in rows)

    @contextmanager
    def _accumulating(self, layer: Layer) -> Iterator[None]:
        """Returns a context manager in which gradients are added to memory allocated for the layer, as in the store of a run.
        If accumulation is omitted, it does nothing.
        """
        if self.gradients is not None:
            trained = [one for one in layer.module.parameters() if one.requires_grad]
            self._gradients = LayerGradients(trained, self.gradients)
        try:
            yield
        finally:
            if self._gradients is not None:
                self._gradients.close()
                self._gradients = None
        layer.module.zero_grad(set_to_none=True)

    def _products(self, layer: Layer, queue: WeightQueue) -> AbstractContextManager[None]:
        return queued_products(layer.module, queue, self.gradients or self.dtype)

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


def _host_medians(calls: Sequence[Halves]) -> tuple[float, float]:
    """Returns the host's seconds to start each half, medians."""
    return median(one.host_s for one, _ in calls), median(one.host_s for _, one in calls)


class KeptTensors:
    """Remembers the parameters and buffers of a module, to put them back (`put_back`)."""

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
