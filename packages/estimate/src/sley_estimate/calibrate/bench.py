"""Times layers one at a time, alone on the device, so that a model that does not fit there can be timed.

A layer gets its first values on the device, is called forward and backward as the engine does it, and is put back on meta:

whole     lead, forward, lead, backward                    the halves: forward, backward
split     forward, lead, first half, lead, second half     the halves: those of a split backward
in a row  forward, forward, ... backward, backward, ...    either halves, of a host that does not wait in between
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from sley_core.comm.device import Device, Span
from sley_core.comm.guard import first_line
from sley_core.comm.startup import gather_values
from sley_core.comm.world import World
from sley_core.data.batches import Slices, cut
from sley_core.data.dataset import AnyDataset, DataContext, DataInfo
from sley_core.data.factory import open_dataset
from sley_core.data.feed import Feed
from sley_core.engine.call import LayerCaller
from sley_core.engine.direct import WeightQueue
from sley_core.engine.execute import InFlight, describe, gradient_edges
from sley_core.errors import RunError
from sley_core.model.layers import Layer, Model
from sley_core.model.values import HostModel
from sley_core.plan.plan import Plan
from sley_core.protocols import SequenceCommunicator
from sley_estimate.calibrate.device import Lead
from sley_estimate.layers.prices import LayerSeconds
from sley_estimate.layers.trace import MICRO, Value, entered, queued_products, run_backward, seeds

REPETITIONS = 5
"""Default number of timed calls of a layer, after one to warm up. The median counts: what disturbs a call disturbs a run
too.
"""

HOST_CALLS = 3  # calls of an idle device that show how far the host must be ahead

HOST_S = 0.03
"""Seconds per repetition in which the host is timed: hosts have other work at times, by up to a third within a tenth of a
second.
"""

NEARLY = 0.5
"""Share of the device's seconds from which the host is timed in rows; wider layers, of which few fit, in single calls."""

ROW = 4  # calls in a row
EMPTY_BACKWARDS = 20  # backwards through nothing that are timed
DIGITS = 6  # decimals of seconds in a resolved plan, so that it has exactly the numbers by which the layers were cut


class Half(NamedTuple):
    """The seconds of one half of a call. host_s: to start it."""

    device_s: float
    host_s: float


Halves = tuple[Half, Half]
T = TypeVar("T")


class LayerBench:
    """Times the layers of `model`, a copy on meta, on one micro-batch of the plan's data.

    dtype: of the working weights. gradients: dtype in which gradients are accumulated; None omits that. apart: returns the
    spans of device work since its last call that are not the layer's, which are subtracted. attention: is attached meanwhile.
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
        self._is_direct = gradients == dtype and plan.precision.accumulation == "direct"
        self._caller = LayerCaller(device, plan.run.seed, plan.activations.build([layer.name for layer in model.layers]))
        self._fields, self._loss, self._apart = self._micro_batch(dataset), plan.loss.build(), apart
        self._lead = Lead(device)
        self._empty_s = empty_backward_s(device) if device.is_async else 0.0
        self._host = HostModel(model)
        self._attention = attention
        self._gradients: LayerGradients | None = None

    def time(self, layer: Layer, value: Value | None, *, split: bool = False) -> tuple[LayerSeconds, Value]:
        """Returns the median seconds of `layer`, and its output for the next one. Those of the host, ahead of its device, are
        without the accumulation of gradients, which is the engine's; 0 for a device without a queue.

        value: the output of the layer before; None for the first. split: whether the halves of a split backward are timed; else
        they are 0.
        """
        on_meta = layer.module
        on_host = [
            (module, name, tensor)
            for module in self._host.made(layer).modules()
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(recurse=False, remove_duplicate=False)
        ]
        device, keep = self.device.torch_device, self.plan.precision.keep
        self._host.place({layer.name}, dtype=self.dtype, device=device, keep=keep)
        if self._attention is not None:
            self._attention.attach(self.model.layers)
        queue, outputs = WeightQueue(), list[Any]()
        with self._accumulating(layer):
            products = partial(queued_products, layer.module, queue, self.gradients or self.dtype)
            with products() if self._is_direct else nullcontext():
                whole = self._medians(
                    lambda host_s: self._whole(layer, value, outputs, host_s), lambda: self._in_a_row(layer, value, None)
                )
            parts = Half(0.0, 0.0), Half(0.0, 0.0)
            if split:
                with products():
                    parts = self._medians(
                        lambda host_s: self._split(layer, value, queue, host_s), lambda: self._in_a_row(layer, value, queue)
                    )
        if self._attention is not None:
            self._attention.detach()
        for module, name, tensor in on_host:
            setattr(module, name, tensor)
        layer.module = on_meta
        description, tensors = describe(outputs[-1])
        halves = *whole, *parts
        times = LayerSeconds(*(half.device_s for half in halves), *(half.host_s for half in halves))
        return times, (description, [tensor.detach() for tensor in tensors])

    def _medians(self, call: Callable[[tuple[float, float]], Halves], in_a_row: Callable[[], tuple[float, float]]) -> Halves:
        """Returns the median seconds of the halves of `call`, which takes the host's seconds to start each, 0 if unknown.
        in_a_row: returns those of the host.
        """
        ahead = unknown = (0.0, 0.0)
        call(unknown)  # loads kernels, and takes memory
        if self.device.is_async:
            ahead = _host_medians([call(unknown) for _ in range(HOST_CALLS)])
        led = [call(ahead) for _ in range(self.repetitions)]
        device_s = [median(halves[at].device_s for halves in led) for at in (0, 1)]
        host_s = (0.0, 0.0)
        if self.device.is_async:
            is_near = any(host > NEARLY * device for host, device in zip(ahead, device_s, strict=True))
            with self._gradients.dropped() if self._gradients else nullcontext():
                until_s = time.perf_counter() + HOST_S * self.repetitions
                rows = [in_a_row() if is_near else _host_medians([call(unknown) for _ in range(HOST_CALLS)])]
                while is_near and time.perf_counter() < until_s:
                    rows.append(in_a_row())
                host_s = median(first for first, _ in rows), median(second for _, second in rows)
        return Half(device_s[0], host_s[0]), Half(device_s[1], host_s[1])

    @contextmanager
    def _accumulating(self, layer: Layer) -> Iterator[None]:
        """Adds gradients to memory allocated for the layer, as in the store of a run, unless that is omitted."""
        if self.gradients is not None:
            trained = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
            self._gradients = LayerGradients(trained, self.gradients)
        try:
            yield
        finally:
            if self._gradients is not None:
                self._gradients.close()
                self._gradients = None
        layer.module.zero_grad(set_to_none=True)

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

    def _whole(self, layer: Layer, value: Value | None, outputs: list[Any], host_s: tuple[float, float]) -> Halves:
        """Runs the layer forward and backward; sets `outputs` to its output. host_s: of the host to start each half."""
        outputs.clear()
        in_flight, args, named = entered(layer, value, self._fields)

        def forward() -> None:
            outputs.append(self._called(layer, in_flight, args, named))

        forward_s, there = self._timed(forward, host_s[0])
        gradients = seeds(in_flight, outputs[-1])
        backward_s, back = self._timed(lambda: run_backward(in_flight, gradients), host_s[1])
        self._forget(layer)
        return Half(there(), forward_s), Half(back(), max(0.0, backward_s - self._empty_s))

    def _split(self, layer: Layer, value: Value | None, queue: WeightQueue, host_s: tuple[float, float]) -> Halves:
        """Runs the layer with a split backward, whose halves are timed."""
        in_flight, args, named = entered(layer, value, self._fields)
        gradients = seeds(in_flight, self._called(layer, in_flight, args, named))

        def first_half() -> None:
            with queue.collecting((0, 0)):
                run_backward(in_flight, gradients)

        first_s, first = self._timed(first_half, host_s[0])
        second_s, second = self._timed(lambda: queue.run((0, 0)), host_s[1])
        self._forget(layer)
        return Half(first(), max(0.0, first_s - self._empty_s)), Half(second(), second_s)

    def _timed(self, work: Callable[[], object], host_s: float) -> tuple[float, Callable[[], float]]:
        """Runs `work` behind a lead; returns the host's seconds, and a function that waits and returns the device's."""
        self._lead(host_s)
        self._apart()
        began, began_s = self.device.moment(), time.perf_counter()
        work()
        taken_s, ended, apart = time.perf_counter() - began_s, self.device.moment(), self._apart()

        def device_s() -> float:
            whole, *others = (self.device.seconds_between(*span) for span in ((began, ended), *apart))
            return max(0.0, whole - sum(others))

        return taken_s, device_s

    def _in_a_row(self, layer: Layer, value: Value | None, queue: WeightQueue | None) -> tuple[float, float]:
        """Runs the layer some times forward, then as often backward; returns the host's seconds for each half of one call, of a
        host that does not wait. queue: splits the backward, whose halves count then.
        """
        calls = [entered(layer, value, self._fields) for _ in range(ROW)]
        self.device.wait_until(self.device.moment())
        times = [time.perf_counter()]
        outputs = [self._called(layer, *each) for each in calls]
        times.append(time.perf_counter())
        gradients = [seeds(in_flight, output) for (in_flight, _, _), output in zip(calls, outputs, strict=True)]
        times.append(time.perf_counter())
        for number, (in_flight, _, _) in enumerate(calls):
            with nullcontext() if queue is None else queue.collecting((0, number)):
                run_backward(in_flight, gradients[number])
        times.append(time.perf_counter())
        for number in range(ROW):
            if queue is not None:
                queue.run((0, number))
        times.append(time.perf_counter())
        self._forget(layer)
        forward_s, _, backward_s, products_s = ((later - earlier) / ROW for earlier, later in pairwise(times))
        backward_s = max(0.0, backward_s - self._empty_s)
        return (forward_s, backward_s) if queue is None else (backward_s, products_s)

    def _forget(self, layer: Layer) -> None:
        if self.gradients is None:
            layer.module.zero_grad(set_to_none=True)

    def _called(self, layer: Layer, in_flight: InFlight, args: tuple[Any, ...], named: Mapping[str, Tensor]) -> Any:
        output = self._caller(layer, args, named, MICRO)
        if layer is self.model.layers[-1]:
            in_flight.loss = self._loss.loss(output, self._fields)
        return output


def _host_medians(calls: Sequence[Halves]) -> tuple[float, float]:
    return median(first.host_s for first, _ in calls), median(second.host_s for _, second in calls)


def empty_backward_s(device: Device) -> float:
    """Returns the host's median seconds of a backward through nothing: a run starts one for many layers."""
    value = torch.ones(1, device=device.torch_device)
    description, tensors = describe(value.requires_grad_())
    taken = []
    for _ in range(1 + EMPTY_BACKWARDS):
        in_flight = InFlight()
        output = in_flight.enter(description, [tensor.detach() for tensor in tensors]).view(1)
        in_flight.edges = gradient_edges(*describe(output))
        gradients = [torch.ones_like(value)]
        began = time.perf_counter()
        in_flight.backward(gradients)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


class LayerGradients:
    """Adds gradients of `trained` to memory of `dtype`, allocated here: by autograd, or by a hook if the dtypes differ."""

    def __init__(self, trained: Sequence[Parameter], dtype: torch.dtype) -> None:
        self._direct = [(parameter, torch.zeros_like(parameter)) for parameter in trained if parameter.dtype == dtype]
        self._are_dropped = False
        self._hooks = ExitStack()
        for parameter in trained:
            if parameter.dtype != dtype:
                _hook(self._hooks, parameter, partial(self._add, torch.zeros_like(parameter, dtype=dtype)))
        self._keep()

    def close(self) -> None:
        """Removes hooks and gradients."""
        self._hooks.close()
        for parameter, _ in self._direct:
            parameter.grad = None

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Drops gradients within the block as soon as autograd hands them over."""
        with ExitStack() as hooks:
            for parameter, _ in self._direct:
                parameter.grad = None
                _hook(hooks, parameter, lambda summed: setattr(summed, "grad", None))
            self._are_dropped = True
            try:
                yield
            finally:
                self._are_dropped = False
                self._keep()

    def _keep(self) -> None:
        for parameter, accumulated in self._direct:
            parameter.grad = accumulated

    def _add(self, accumulated: Tensor, parameter: Tensor) -> None:
        """Adds the gradient, unless it is dropped; there is none where a product waits in the queue."""
        if parameter.grad is not None and not self._are_dropped:
            accumulated.add_(parameter.grad)
        parameter.grad = None


def _hook(hooks: ExitStack, parameter: Parameter, take: Callable[[Tensor], None]) -> None:
    hook = parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]  # torch's
    hooks.callback(hook.remove)


def layer_seconds(plan: Plan, world: World, draft: Callable[[DataInfo], Model], dtype: torch.dtype) -> list[float]:
    """Returns the seconds of a forward and backward of each layer, equal on every rank: `timer` of a partitioner's record.

    A blocking collective of `world`: the first rank times each layer alone, on one micro-batch of the plan's data, so that all
    ranks cut alike. draft: makes the model on meta; the first rank alone calls it. dtype: of the working weights.
    """

    def measure() -> list[float]:
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        seconds = []
        value: Value | None = None
        with world.device.random_state_kept():
            bench = LayerBench(plan, world.device, draft(dataset.info), dataset, dtype)
            for layer in bench.model.layers:
                times, value = bench.time(layer, value)
                seconds.append(round(times.whole_s, DIGITS))
        return seconds

    return measure() if world.size == 1 else on_ranks(world, measure, "time the layers", only_first=True)


def on_ranks(world: World, make: Callable[[], T], what: str, *, only_first: bool = False) -> T:
    """Calls `make` on every rank and returns each its own result; a blocking collective over the default group.

    only_first: calls it on rank 0 alone, and returns its result, which JSON can carry, on all. what: what it does, for errors.
    Raises what `make` raises on that rank, RunError `start-failed` on the others.
    """
    value: Any = None
    fault = ""
    failure: Exception | None = None
    if world.rank == 0 or not only_first:
        try:
            value = make()
        except Exception as error:
            failure, fault = error, f"{type(error).__name__}: {first_line(error)}"
    # All ranks call this once, before any of them makes a group.
    try:
        said = gather_values([fault, value if only_first else None])
    except RuntimeError as error:  # ranks that are late, or gone, must not hide this rank's error
        message = f"rank {world.rank} heard nothing from a rank that was to {what}: {first_line(error)}"
        raise failure or RunError("start-failed", message) from error
    if failure is not None:
        raise failure
    for rank, (other_fault, _) in enumerate(said):
        if other_fault:
            raise RunError("start-failed", f"rank {rank} could not {what}: {other_fault}")
    result: T = said[0][1] if only_first else value
    return result
