"""Calls one layer forward and backward as the engine does, and times the halves of that, on the device and on the host.

whole     lead, forward, lead, backward                    the halves: forward, backward
split     forward, lead, first half, lead, second half     the halves: those of a split backward
in a row  forward, forward, ... backward, backward, ...    either halves, of a host that does not wait in between
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sley_core.engine.boundary import Description
from sley_core.engine.execute import InFlight, describe, edges_of
from sley_core.engine.step_state import MicroStep, Phase
from sley_estimate.bench.lead import Lead, seconds_of_an_empty_backward

if TYPE_CHECKING:
    from sley_core.comm.device import Device, Span
    from sley_core.engine.call import LayerCaller
    from sley_core.engine.direct import WeightQueue
    from sley_core.model.layers import Layer
    from sley_core.protocols import Loss

ROW = 4
"""Calls in a row. They are for small layers, which a host starts slowly: as many in flight fit."""

MICRO = MicroStep(0, 0, Phase.TRAIN, 0, 0)

Handed = tuple[Description, list[Tensor]]
"""A layer's output, as it is passed to the next layer."""


class Half(NamedTuple):
    """The seconds of one half of a call. host_s: to start it."""

    device_s: float
    host_s: float


Halves = tuple[Half, Half]
"""Forward and backward, or the two halves of a split backward."""


class LayerCalls:
    """Calls layers on one micro-batch, whose fields are on the device.

    last: the layer after which the loss is computed. forgets: whether gradients are dropped after each call. apart: returns the
    spans of device work since its last call that are not the layer's own; they are subtracted.
    """

    def __init__(
        self,
        device: Device,
        caller: LayerCaller,
        fields: Mapping[str, Tensor],
        loss: Loss,
        last: Layer,
        *,
        forgets: bool,
        apart: Callable[[], Sequence[Span]],
    ) -> None:
        self.device = device
        self.caller = caller
        self.fields = fields
        self.loss = loss
        self.last = last
        self.forgets = forgets
        self.apart = apart
        self._lead = Lead(device)
        self._empty_s = seconds_of_an_empty_backward(device) if device.is_async else 0.0

    def whole(self, layer: Layer, value: Handed | None, outputs: list[Any], host_s: tuple[float, float]) -> Halves:
        """Runs the layer forward and backward, as two halves; its output is all that `outputs` has afterwards.

        host_s: the host's seconds to start each half, for which the device is kept at work before it.
        """
        outputs.clear()
        held, args, named = self._entered(layer, value)
        self._lead(host_s[0])
        self.apart()
        began, began_s = self.device.moment(), time.perf_counter()
        output = self._called(layer, held, args, named)
        ended_s, ready, there = time.perf_counter(), self.device.moment(), self.apart()
        outputs.append(output)
        gradients = self._left(held, output)
        self._lead(host_s[1])
        turned, turned_s = self.device.moment(), time.perf_counter()
        _backward(held, gradients)
        done_s, ended, back = time.perf_counter(), self.device.moment(), self.apart()
        self._forget(layer)
        return (
            Half(self._seconds((began, ready), there), ended_s - began_s),
            Half(self._seconds((turned, ended), back), max(0.0, done_s - turned_s - self._empty_s)),
        )

    def split(self, layer: Layer, value: Handed | None, queue: WeightQueue, host_s: tuple[float, float]) -> Halves:
        """Runs the layer with a split backward, whose parts are the halves. host_s: as `whole` takes it."""
        held, args, named = self._entered(layer, value)
        gradients = self._left(held, self._called(layer, held, args, named))
        self._lead(host_s[0])
        self.apart()
        began, began_s = self.device.moment(), time.perf_counter()
        with queue.collecting((0, 0)):
            _backward(held, gradients)
        ended_s, done, first = time.perf_counter(), self.device.moment(), self.apart()
        self._lead(host_s[1])
        turned, turned_s = self.device.moment(), time.perf_counter()
        queue.run((0, 0))
        done_s, ended, second = time.perf_counter(), self.device.moment(), self.apart()
        self._forget(layer)
        return (
            Half(self._seconds((began, done), first), max(0.0, ended_s - began_s - self._empty_s)),
            Half(self._seconds((turned, ended), second), done_s - turned_s),
        )

    def in_a_row(self, layer: Layer, value: Handed | None, queue: WeightQueue | None) -> tuple[float, float]:
        """Runs the layer some times forward, then as often backward; returns the host's seconds for each half of one: of a host
        that waits for nothing in between, as in a run. queue: to split the backward, whose halves count then.
        """
        entered = [self._entered(layer, value) for _ in range(ROW)]
        self.device.wait_until(self.device.moment())
        times = [time.perf_counter()]
        outputs = [self._called(layer, *one) for one in entered]
        times.append(time.perf_counter())
        gradients = [self._left(held, output) for (held, _, _), output in zip(entered, outputs, strict=True)]
        times.append(time.perf_counter())
        for number, (held, _, _) in enumerate(entered):
            with nullcontext() if queue is None else queue.collecting((0, number)):
                _backward(held, gradients[number])
        times.append(time.perf_counter())
        for number in range(ROW):
            if queue is not None:
                queue.run((0, number))
        times.append(time.perf_counter())
        self._forget(layer)
        forward_s, _, backward_s, products_s = ((later - earlier) / ROW for earlier, later in pairwise(times))
        backward_s = max(0.0, backward_s - self._empty_s)
        return (forward_s, backward_s) if queue is None else (backward_s, products_s)

    def _seconds(self, span: Span, apart: Sequence[Span]) -> float:
        """Returns the seconds of `span` on the device, without those of `apart`. Waits for the device: called once all work is
        queued, so that no timed work waits.
        """
        whole, *others = (self.device.seconds_between(*one) for one in (span, *apart))
        return max(0.0, whole - sum(others))

    def _forget(self, layer: Layer) -> None:
        if self.forgets:
            layer.module.zero_grad(set_to_none=True)

    def _entered(self, layer: Layer, value: Handed | None) -> tuple[InFlight, tuple[Any, ...], Mapping[str, Tensor]]:
        """Returns what is in flight, and the layer's arguments and fields."""
        held = InFlight()
        args: tuple[Any, ...] = () if value is None else (held.enter(*value),)
        return held, args, {name: self.fields[name] for name in layer.fields}

    def _called(self, layer: Layer, held: InFlight, args: tuple[Any, ...], named: Mapping[str, Tensor]) -> Any:
        """Runs the layer's forward, and the loss after the last; returns its output."""
        output = self.caller(layer, args, named, MICRO)
        if layer is self.last:
            held.loss = self.loss.loss(output, self.fields)
        return output

    def _left(self, held: InFlight, output: Any) -> list[Tensor]:
        """Returns the gradients (ones) to start the backward with."""
        if held.loss is not None:
            return [torch.ones_like(held.loss)]
        description, tensors = describe(output)
        held.edges = edges_of(description, tensors)
        pairs = zip(description.leaves, tensors, strict=True)
        return [torch.ones_like(tensor) for leaf, tensor in pairs if leaf.has_gradient]


def _backward(held: InFlight, gradients: list[Tensor]) -> None:
    """Runs the backward of what is in flight, if anything of it has one."""
    if held.loss is None or held.loss.requires_grad:
        held.backward(gradients)
