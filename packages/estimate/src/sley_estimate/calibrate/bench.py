"""Times layers one at a time on the device, so that the whole model does not need to fit there.

A layer gets its initial values on the device, runs forward and backward as in a run, and returns to meta. It is timed in up to
three ways, where "lead" stands for other work on the device before the timed part:

whole     lead, forward, lead, backward
split     lead, forward, lead, first half of the backward, lead, second half
rows      forward, forward, ... backward, backward, ...    whole or split, by a host that does not wait for the device
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from sley_core.comm.device import Device
from sley_core.comm.exchanges import first_line
from sley_core.comm.transport import gather_values
from sley_core.comm.world import World
from sley_core.data.batches import SequenceSlicer, narrow_batch, open_dataset
from sley_core.data.dataset import AnyDataset, DataContext, DataInfo
from sley_core.data.feed import Feed
from sley_core.engine.call import LayerCaller
from sley_core.engine.direct import WeightQueue
from sley_core.errors import RunError
from sley_core.model.build import HostModel
from sley_core.model.layers import Layer, Model
from sley_core.plan.load import replace_values
from sley_core.plan.plan import Plan
from sley_estimate.calibrate.device import LeadingWrites
from sley_estimate.layers import trace
from sley_estimate.layers.times import LayerSeconds
from sley_estimate.search.layouts import list_choices
from sley_trainer.assemble import DTYPES, build_meta_model, weight_dtypes
from sley_trainer.execute import ChunkState, describe_output, find_gradient_edges
from train_cli.meta_model import meta_micro_batch

NUM_CALLS, NUM_CALIBRATION_CALLS = 5, 15  # timed calls of each layer, for a partition and for a machine file
NUM_HOST_CALLS = 3  # calls on an idle device, which show how long the host needs to launch a call

HOST_S = 0.03  # seconds to time the host, per timed call; other programs can slow a host by a third for a tenth of a second

HOST_BOUND_SHARE = 0.5
"""If the host needs more than this share of the device's time for a layer, the host is timed over rows of calls. Otherwise, the
layer is so large that memory may not have room for a row."""

ROW_LENGTH = 4  # the number of calls in a row, which runs all forwards and then all backwards
NUM_EMPTY_BACKWARDS = 20  # the number of timed backwards without operators
DIGITS = 6  # decimals to which times are rounded, so that a resolved plan contains exactly the numbers used to partition it


class PartSeconds(NamedTuple):
    """The time of a part of a call on the device, and the time that the host needs to launch the part, in seconds."""

    device_s: float
    host_s: float


Parts = Sequence[PartSeconds]
"""The three parts of a call: the forward; the backward, or the first half of a split backward; the second half, or 0."""

NO_LEAD = (0.0, 0.0, 0.0)  # the duration of the leading writes before each part of a call, if they only clear caches


class LayerBench:
    """Times the layers of `model`, which is on meta, on one microbatch of the plan's data. dtype: the dtype of the weights with
    which layers compute. num_calls: the number of timed calls of a layer, after one warm-up call; their median counts.
    """

    def __init__(
        self, plan: Plan, device: Device, model: Model, dataset: AnyDataset, dtype: torch.dtype, num_calls: int = NUM_CALLS
    ) -> None:
        self.plan = plan
        self.device = device
        self.model = model
        self.num_calls = num_calls
        self._dtype = dtype
        self._gradients = DTYPES[plan.precision.gradients]
        self._is_direct = self._gradients == self._dtype and plan.precision.accumulation == "direct"
        self._caller = LayerCaller(device, plan.run.seed, plan.activations.build([layer.name for layer in model.layers]))
        self._fields, self._loss = self._load_microbatch(dataset), plan.loss.build()
        self._lead = LeadingWrites(device)
        self._empty_backward_s = time_empty_backward(device) if device.is_async else 0.0
        self._host = HostModel(model)
        self._drops_gradients = False

    def time_layer(self, layer: Layer, value: trace.Value | None, *, split: bool = False) -> tuple[LayerSeconds, trace.Value]:
        """Returns the median times of `layer`, and its output. The host's times exclude the accumulation of gradients; they are
        0 if the host does not run ahead of the device, as on a CPU. value: the output of the previous layer; None for the first
        layer. split: whether to also time the two halves of a split backward; otherwise their times are 0.
        """
        meta_module = layer.module
        host_tensors = [
            (module, name, tensor)
            for module in self._host.factory_module(layer).modules()
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(recurse=False, remove_duplicate=False)
        ]
        device, fp32_patterns = self.device.torch_device, self.plan.precision.keep
        self._host.load_values({layer.name}, dtype=self._dtype, device=device, keep=fp32_patterns)
        queue, outputs = WeightQueue(), list[Any]()
        with self._accumulate_gradients(layer):
            products = partial(trace.queue_weight_gradients, layer.module, queue, self._gradients)
            with products() if self._is_direct else nullcontext():
                forward, backward, _ = self._median_parts(layer, value, None, outputs)
            first_half = second_half = PartSeconds(0.0, 0.0)
            if split:
                with products():
                    _, first_half, second_half = self._median_parts(layer, value, queue, outputs)
        for module, name, tensor in host_tensors:
            setattr(module, name, tensor)
        layer.module = meta_module
        parts = forward, backward, first_half, second_half
        times = LayerSeconds(*(part.device_s for part in parts), *(part.host_s for part in parts))
        return times, trace.describe_next_input(outputs[-1], layer)

    def _median_parts(self, layer: Layer, value: trace.Value | None, queue: WeightQueue | None, outputs: list[Any]) -> Parts:
        """Returns the median times of each part of a call. value: the input. queue: the queue for weight gradients in a split
        backward; None for a whole backward. outputs: is set to a list with the output of the last call.
        """

        def median_host_s() -> list[float]:
            calls = [self._time_call(layer, value, queue, outputs, NO_LEAD) for _ in range(NUM_HOST_CALLS)]
            return [median(part.host_s for part in parts) for parts in zip(*calls, strict=True)]

        self._time_call(layer, value, queue, outputs, NO_LEAD)  # loads kernels and allocates memory
        launch_s = median_host_s() if self.device.is_async else NO_LEAD
        calls = [self._time_call(layer, value, queue, outputs, launch_s) for _ in range(self.num_calls)]
        device_s = [median(part.device_s for part in parts) for parts in zip(*calls, strict=True)]
        host_s: Sequence[float] = NO_LEAD
        if self.device.is_async:
            is_host_bound = any(host > HOST_BOUND_SHARE * device for host, device in zip(launch_s, device_s, strict=True))
            self._drops_gradients = True
            until_s = time.perf_counter() + HOST_S * self.num_calls
            rows = [self._time_rows(layer, value, queue) if is_host_bound else median_host_s()]
            while is_host_bound and time.perf_counter() < until_s:
                rows.append(self._time_rows(layer, value, queue))
            self._drops_gradients = False
            host_s = [median(part) for part in zip(*rows, strict=True)]
        return [PartSeconds(*part) for part in zip(device_s, host_s, strict=True)]

    @contextmanager
    def _accumulate_gradients(self, layer: Layer) -> Iterator[None]:
        """Makes backwards within the block add the gradients of the layer to separate buffers, as a run does."""

        def add_gradient(accumulated: torch.Tensor, parameter: torch.Tensor) -> None:
            """Adds `parameter.grad` to `accumulated`, unless the gradient is None or to be dropped, and sets it to None."""
            if parameter.grad is not None and not self._drops_gradients:
                accumulated.add_(parameter.grad)
            parameter.grad = None

        with ExitStack() as hooks:
            for parameter in layer.module.parameters():
                if parameter.requires_grad:
                    accumulated = torch.zeros_like(parameter, dtype=self._gradients)
                    hook = parameter.register_post_accumulate_grad_hook(partial(add_gradient, accumulated))  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            yield

    def _load_microbatch(self, dataset: AnyDataset) -> Mapping[str, torch.Tensor]:
        """Returns the first microbatch of `dataset` on the device; if `sp` > 1, only the first slice of each sequence."""
        plan, size = self.plan, self.plan.batch.global_size
        rows = range(plan.batch.micro_size)
        data: Any = plan.data.config
        with Feed(dataset, seed=plan.run.seed, batch_size=size, rows=rows, shuffle=data.shuffle) as feed:
            batch = narrow_batch(feed.next(), dataset.info.fields, 0, 1)
        declared = {name: field for name, field in dataset.info.fields.items() if name in batch}
        first = SequenceSlicer(declared, plan.parallel.sp, 0)(batch)
        return {name: self.device.move(value) for name, value in first.items()}

    def _time_call(
        self, layer: Layer, value: trace.Value | None, queue: WeightQueue | None, outputs: list[Any], launch_s: Sequence[float]
    ) -> Parts:
        """Runs one call on the input `value`, and returns the times of its parts. queue: receives the weight gradients of a
        split backward; None for a whole backward. outputs: is set to a list with the output. launch_s: the time that the
        host needs to launch each part; 0 if unknown.
        """
        in_flight, args, named = trace.prepare_call(layer, value, self._fields)
        outputs.clear()

        def forward() -> None:
            outputs.append(self._call_layer(layer, in_flight, args, named))

        def backward() -> None:
            with nullcontext() if queue is None else queue.collect((0, 0)):
                trace.run_backward(in_flight, gradients)

        forward_s, forward_device_s = self._time_work(forward, launch_s[0])
        gradients = trace.make_output_gradients(in_flight, outputs[-1])
        backward_s, backward_device_s = self._time_work(backward, launch_s[1])
        parts = [
            PartSeconds(forward_device_s(), forward_s),
            PartSeconds(backward_device_s(), max(0.0, backward_s - self._empty_backward_s)),
        ]
        if queue is None:
            return [*parts, PartSeconds(0.0, 0.0)]
        products_s, products_device_s = self._time_work(lambda: queue.run((0, 0)), launch_s[2])
        return [*parts, PartSeconds(products_device_s(), products_s)]

    def _time_work(self, work: Callable[[], object], host_s: float) -> tuple[float, Callable[[], float]]:
        """Runs `work` after leading writes. Returns the host's time, and a function that waits for the device's time."""
        self._lead(host_s)
        start, start_s = self.device.moment(), time.perf_counter()
        work()
        host_s, end = time.perf_counter() - start_s, self.device.moment()
        return host_s, lambda: self.device.seconds_between(start, end)

    def _time_rows(self, layer: Layer, value: trace.Value | None, queue: WeightQueue | None) -> tuple[float, float, float]:
        """Runs a row of calls without waiting for the device. Returns the host's mean time for each part of one call."""
        calls = [trace.prepare_call(layer, value, self._fields) for _ in range(ROW_LENGTH)]
        self.device.wait_until(self.device.moment())
        times = [time.perf_counter()]
        outputs = [self._call_layer(layer, *started_call) for started_call in calls]
        times.append(time.perf_counter())
        gradients = [
            trace.make_output_gradients(in_flight, output) for (in_flight, _, _), output in zip(calls, outputs, strict=True)
        ]
        times.append(time.perf_counter())
        for number, (in_flight, _, _) in enumerate(calls):
            with nullcontext() if queue is None else queue.collect((0, number)):
                trace.run_backward(in_flight, gradients[number])
        times.append(time.perf_counter())
        for number in range(ROW_LENGTH):
            if queue is not None:
                queue.run((0, number))
        times.append(time.perf_counter())
        forward_s, _, backward_s, products_s = ((end - start) / ROW_LENGTH for start, end in pairwise(times))
        return forward_s, max(0.0, backward_s - self._empty_backward_s), products_s

    def _call_layer(self, layer: Layer, in_flight: ChunkState, args: tuple[Any, ...], named: Mapping[str, torch.Tensor]) -> Any:
        """Returns the output of `layer`. For the last layer, also sets the loss in `in_flight`."""
        output = self._caller(layer, args, named, trace.MICRO_STEP)
        if layer is self.model.layers[-1]:
            in_flight.loss = self._loss.loss(output, self._fields)
        return output


def time_empty_backward(device: Device) -> float:
    """Returns the host's median time in seconds for a backward without operators, which a layer's time does not include."""
    value = torch.ones(1, device=device.torch_device)
    description, tensors = describe_output(value.requires_grad_())
    seconds = []
    for _ in range(1 + NUM_EMPTY_BACKWARDS):
        in_flight = ChunkState()
        output = in_flight.build_input(description, [tensor.detach() for tensor in tensors]).view(1)
        in_flight.edges = find_gradient_edges(*describe_output(output))
        gradients = [torch.ones_like(value)]
        start_s = time.perf_counter()
        in_flight.backward(gradients)
        seconds.append(time.perf_counter() - start_s)
    return median(seconds[1:])


def layer_seconds(plan: Plan, world: World, build_model: Callable[[DataInfo], Model], dtype: torch.dtype) -> list[float]:
    """Returns the time in seconds of the forward plus the backward of each layer, equal on all ranks. This is a partitioner's
    `timer`. A blocking collective of `world`: rank 0 times the layers on one microbatch of the plan's data, and the other ranks
    wait. build_model: returns the model on meta; only rank 0 calls it. dtype: the dtype of the weights with which layers
    compute. If rank 0 fails, it raises its error, and the other ranks raise RunError `start-failed`.
    """
    seconds: list[float] = []
    failure: Exception | None = None
    if world.rank == 0:
        try:
            dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
            value: trace.Value | None = None
            with world.device.preserve_random_state():
                bench = LayerBench(plan, world.device, build_model(dataset.info), dataset, dtype)
                for layer in bench.model.layers:
                    times, value = bench.time_layer(layer, value)
                    seconds.append(round(times.total_s, DIGITS))
        except Exception as error:
            failure = error
    fault = f"{type(failure).__name__}: {first_line(failure)}" if failure else ""
    if world.size > 1:
        fault, seconds = gather_values([fault, seconds])[0]
    if failure is not None:
        raise failure
    if fault:
        raise RunError("start-failed", f"rank 0 could not time the layers: {fault}")
    return seconds


def measure_layers(plan: Plan, device: Device) -> list[dict[str, Any]]:
    """Returns a `[[layers]]` table of a machine file for each distinct layer of the plan's model, timed on `device` with whole
    sequences. Raises the errors that layers raise.
    """
    variant = {"activations": str(list_choices(plan).policies[0]), "micro_size": plan.batch.micro_size}
    plan = replace_values(plan, {("parallel", "sp"): 1})
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = build_meta_model(plan, dataset.info)
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = trace.layer_keys(plan, model, policy, meta_micro_batch(plan, dataset))
    tables: dict[str, dict[str, Any]] = {}
    outputs: dict[str, trace.Value] = {}
    value: trace.Value | None = None
    with device.preserve_random_state():
        bench = LayerBench(plan, device, model, dataset, weight_dtypes(plan)[0], NUM_CALIBRATION_CALLS)
        for layer, key in zip(model.layers, keys, strict=True):
            if key not in tables:
                times, outputs[key] = bench.time_layer(layer, value, split=True)
                seconds = {name: value for name, value in asdict(times).items() if value or not name.startswith("host_")}
                output_bytes = sum(leaf.num_bytes for leaf in outputs[key][0].leaves)
                tables[key] = {"key": key, "name": layer.name, "output_bytes": output_bytes, **seconds, **variant}
            value = outputs[key]
    return list(tables.values())
