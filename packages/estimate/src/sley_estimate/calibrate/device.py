"""Measures a device (matrix products, bandwidth, launches) and its host (copies, an optimizer on the host's cores, the engine).

The engine is the host's work in a step outside the layers: batches, gradients from autograd, norm, clipping, optimizer, totals.

    step time in seconds = step_s + parameter_s x weights + microbatches x (micro_s + gradient_s x weights)

Four runs, with few or many weights and with one or several microbatches, determine these four figures. All weights have one
element, so the device is almost idle, and a step takes as long as the host works.
"""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from math import ceil
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sley_core.comm.device import CopyEvent, CopyStream, Device, HostMemory, free, reallocate
from sley_core.comm.world import World
from sley_core.data.dataset import DataInfo, Field
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.machine import EngineTable
from sley_trainer.assemble import DTYPES, assemble
from sley_trainer.run import Run

SIZES = {"cpu": (64, 192, 384, 768), "cuda": (256, 1024, 2048, 4096, 8192)}  # the edges of the square matrices to multiply

MOVED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes of each tensor in the addition that measures bandwidth; exceed caches
NUM_LAUNCHES = 200  # the number of tiny operators whose launches are timed
MAX_FIGURE_S = 0.5  # after this number of seconds of measuring a figure, no further repetition starts

REPETITIONS = 7  # the maximum number of timed calls for one figure

SMALL_BYTES, NUM_SMALL = 1 << 12, 100  # the size in bytes of a copy whose latency is timed, and the number of copies in a row

NUM_BUCKETS, BUCKET_NUMEL = 4, 1 << 24
"""The number of buckets of an optimizer on the host, and of elements per bucket: 64 MiB of fp32, as in a run. Together, the
buckets exceed the caches."""

RING = 2  # the number of buckets of `HostOptimizerBench` whose gradients are on the host at the same time

STEP_BYTES = 7 * 4 + 6
"""The bytes that an AdamW step moves per fp32 element: it reads the weight, the gradient and two states, writes all of them
except the gradient, and rounds the weight to bf16 (reads 4 bytes, writes 2)."""

WRITTEN_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""The size in bytes of one write of `LeadingWrites`, by type of device. It exceeds the caches, which in a run hold other
layers' data when a layer starts.
"""

LEAD_FACTOR = 1.5  # the ratio of the time of leading writes to the time to launch work; the margin covers slower launches


def measure_device(device: Device) -> dict[str, Any]:
    """Returns the `[device]` table of a machine file. Takes some seconds, and three times `MOVED_BYTES` of device memory."""
    device_type = "cuda" if device.type == "cuda" else "cpu"

    def product_s(size: int, dtype: torch.dtype) -> float:
        square = torch.ones(size, size, dtype=dtype, device=device.torch_device)
        addend = torch.ones_like(square)
        return _min_seconds(device, lambda: torch.mm(square, addend))

    small = torch.ones(1 << 10, device=device.torch_device)
    table: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device.torch_device) if device_type == "cuda" else platform.processor() or "CPU",
        "kind": device_type,
        "memory_bandwidth": measure_bandwidth(device, MOVED_BYTES[device_type]),
        "launch_s": _min_seconds(device, lambda: [small.add_(1.0) for _ in range(NUM_LAUNCHES)]) / NUM_LAUNCHES,
        "matmul": {
            name: fit_saturation([(2.0 * size**3, product_s(size, dtype)) for size in SIZES[device_type]])
            for name, dtype in DTYPES.items()
        },
    }
    if device_type == "cuda":
        table["memory"] = torch.cuda.get_device_properties(device.torch_device).total_memory
    return table


def fit_saturation(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Returns the `flops_per_s` and the non-negative `half_flops` of a `MatmulTable` that fit `times`, pairs of (FLOPs,
    seconds), by least squares of the relative errors.
    """
    flops, seconds = np.array(times).T
    per_flop, constant = flops / seconds, flops.mean() / seconds  # solves 1 = per_flop / rate + constant x half / (rate x mean)
    slope, offset = np.linalg.lstsq(np.stack([per_flop, constant], axis=1), np.ones(len(times)))[0]
    if offset < 0 or slope <= 0:
        slope, offset = per_flop.sum() / (per_flop**2).sum(), 0.0
    return {"flops_per_s": float(1 / slope), "half_flops": float(offset * flops.mean() / slope)}


def measure_bandwidth(device: Device, num_bytes: int) -> float:
    """Returns the bytes per second of an fp32 addition, which reads two tensors of `num_bytes` and writes one."""
    term = torch.ones(num_bytes // 4, device=device.torch_device)
    addend, result = torch.ones_like(term), torch.empty_like(term)
    return 3 * num_bytes / _min_seconds(device, lambda: torch.add(term, addend, out=result))


def _min_seconds(device: Device, work: Callable[[], object]) -> float:
    """Returns the time in seconds of the fastest of several calls of `work` after one warm-up call, but at least 1 ns."""
    work()
    times: list[float] = []
    while len(times) < REPETITIONS and (sum(times) < MAX_FIGURE_S or not times):
        start = device.moment()
        work()
        times.append(device.seconds_between(start, device.moment()))
    return max(min(times), 1e-9)


class LeadingWrites:
    """Writes to unused memory of `device` before a measurement. The writes remove other data from the caches. On a device with
    a queue, they also keep the device busy while the host launches the measured work, as in a run whose host is ahead.

        host     launch writes | launch the layer |
        device   write write write write write    | the layer, without a wait for a launch |
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        if device.torch_device.type == "cpu":  # memory that torch does not reuse for a run's tensors
            self._memory = HostMemory(WRITTEN_BYTES["cpu"], lock=False).data
        else:
            self._memory = torch.empty(WRITTEN_BYTES["cuda"], dtype=torch.uint8, device=device.torch_device)
        self._write_s = 0.0
        if device.is_async:
            self._memory.zero_()
            start = device.moment()
            for _ in range(20):
                self._memory.zero_()
            self._write_s = device.seconds_between(start, device.moment()) / 20

    def __call__(self, host_s: float = 0.0) -> None:
        """Launches at least one write. On a device with a queue, the writes take longer than `host_s` seconds."""
        for _ in range(1 + (ceil(LEAD_FACTOR * host_s / self._write_s) if self._write_s else 0)):
            self._memory.zero_()


def measure_host(device: Device) -> dict[str, float]:
    """Returns the `[host]` table of a machine file: the bandwidth and latency of offload copies and, with a CUDA device, the
    memory bandwidth of an optimizer on the host. As in an offload, the memory of the copied tensor is freed after the copy to
    the host, and allocated again for the copy back.
    """
    num_bytes = MOVED_BYTES["cuda" if device.is_async else "cpu"] // 4
    memory, stream = device.host_memory(num_bytes), device.copy_stream()
    tensor = torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)
    times = [_time_round_trip(device, memory, stream, tensor)]
    while len(times) <= REPETITIONS and sum(map(sum, times)) < MAX_FIGURE_S:
        times.append(_time_round_trip(device, memory, stream, tensor))
    directions = zip(*(times[1:] or times), strict=True)  # leaves out the first copies, which touch new pages
    to_host, to_device = (max(median(times_s), 1e-9) for times_s in directions)
    table = {"to_host": num_bytes / to_host, "to_device": num_bytes / to_device, "latency_s": _measure_copy_latency(device)}
    if device.is_async:
        table["memory_bandwidth"] = measure_host_bandwidth(device)
    return table


def measure_host_bandwidth(device: Device) -> float:
    """Returns the bytes per second that a fused AdamW on the host moves while gradients arrive and weights return."""
    stepping = HostOptimizerBench(device)
    stepping.step()  # creates the states
    return NUM_BUCKETS * BUCKET_NUMEL * STEP_BYTES / median(stepping.step() for _ in range(REPETITIONS))


class HostOptimizerBench:
    """Times an AdamW on the host, which updates one fp32 parameter per bucket while gradients arrive from `device` and bf16
    weights return. device_weights: the bf16 weights that were copied to `device` last.
    """

    def __init__(self, device: Device) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(BUCKET_NUMEL)) for _ in range(NUM_BUCKETS)]
        self._optimizer = torch.optim.AdamW(self.parameters, fused=True)
        # The host memory holds RING buckets of fp32 gradients and of bf16 weights. It is page-locked if the device has a queue.
        self._memory = [device.host_memory(size * BUCKET_NUMEL) for size in RING * (4, 2)]
        views = [memory.data[: BUCKET_NUMEL * size] for memory, size in zip(self._memory, RING * (4, 2), strict=True)]
        self._gradients_on_host = [view.view(torch.float32).fill_(1.0) for view in views[::2]]
        self._rounded_weights = [view.view(torch.bfloat16) for view in views[1::2]]
        for index, parameter in enumerate(self.parameters):
            parameter.grad = self._gradients_on_host[index % RING]
        self._gradient = torch.ones(BUCKET_NUMEL, device=device.torch_device)
        self.device_weights = torch.ones(BUCKET_NUMEL, dtype=torch.bfloat16, device=device.torch_device)
        self._from_device, self._to_device = device.copy_stream(), device.copy_stream()
        for stream in (self._from_device, self._to_device):
            stream.wait_for_device()

    def step(self) -> float:
        """Updates all buckets once. Returns the time from the arrival of the first RING gradients to the last rounding."""
        gradient_copies = [self._copy_gradient(index) for index in range(RING)]
        for event in gradient_copies:
            event.wait()
        weight_copies: list[CopyEvent] = []
        start = time.perf_counter()
        for index, parameter in enumerate(self.parameters):
            gradient_copies[index].wait()
            self._optimizer.param_groups[0]["params"] = [parameter]
            self._optimizer.step()
            if index >= RING:
                weight_copies[index - RING].wait()
            torch._foreach_copy_([self._rounded_weights[index % RING]], [parameter.detach()])
            end = time.perf_counter()
            self._to_device.copy(self.device_weights, self._rounded_weights[index % RING])
            weight_copies.append(self._to_device.record())
            if index + RING < NUM_BUCKETS:
                gradient_copies.append(self._copy_gradient(index + RING))
        for event in weight_copies:
            event.wait()
        return end - start

    def _copy_gradient(self, index: int) -> CopyEvent:
        """Starts to copy the gradients of bucket number `index` to the host. Returns the event at the end of the copy."""
        self._from_device.copy(self._gradients_on_host[index % RING], self._gradient)
        return self._from_device.record()


def _measure_copy_latency(device: Device) -> float:
    """Returns the mean time in seconds per copy of many consecutive tiny copies, in the faster direction."""
    memory, stream = device.host_memory(SMALL_BYTES), device.copy_stream()
    tensor = torch.ones(SMALL_BYTES, dtype=torch.uint8, device=device.torch_device)
    lead = LeadingWrites(device)
    times = []
    for target, source in ((memory.data, tensor), (tensor, memory.data)):
        stream.copy(target, source)
        host_s = 0.0
        for _ in range(2):  # the first round shows how long the host needs to launch the copies
            lead(host_s)
            start, start_s = device.moment(), time.perf_counter()
            stream.wait_for_device()
            for _ in range(NUM_SMALL):
                stream.copy(target, source)
            stream.record().make_device_wait()
            host_s = time.perf_counter() - start_s
            seconds = device.seconds_between(start, device.moment())
        times.append(seconds / NUM_SMALL)
    return min(times)


def _time_round_trip(device: Device, memory: HostMemory, stream: CopyStream, tensor: torch.Tensor) -> tuple[float, float]:
    """Returns the times in seconds to copy the uint8 `tensor` to the host and free it, and to allocate it and copy it back."""
    moments = [device.moment()]
    stream.wait_for_device()
    stream.copy(memory.data, tensor)
    stream.record().make_device_wait()
    num_bytes = free(tensor)
    moments.append(device.moment())
    reallocate(tensor, num_bytes)
    stream.wait_for_device()
    stream.copy(tensor, memory.data)
    stream.record().make_device_wait()
    moments.append(device.moment())
    return device.seconds_between(*moments[:2]), device.seconds_between(*moments[1:])


WEIGHT_COUNTS = 8, 128  # the numbers of one-element weights in the runs that measure the engine
MICROBATCH_COUNTS = 1, 5  # the numbers of microbatches per step in the runs that measure the engine

# Each turn times this number of steps of each run. The figures are medians over turns, since other work may slow a host.
STEPS_PER_TURN, NUM_TURNS = 4, 7

WARMUP_STEPS = 3  # the number of steps before the timed steps, in which optimizer states are created


class IndexDataset:
    """A dataset in which sample i consists of the `index` field with the value i."""

    info = DataInfo({"index": Field("int64")})

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index)}


class ScalarWeights(nn.Module):
    """A layer with `num_weights` one-element weights, which computes nothing but gives each weight a gradient."""

    def __init__(self, num_weights: int) -> None:
        super().__init__()
        for index in range(num_weights):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.ones(1)))

    def forward(self, index: Tensor) -> Tensor:
        """Returns a zero whose graph contains all parameters. index: not used, but a first layer must read a field."""
        zero: Tensor = _ZeroLoss.apply(*self._parameters.values())  # type: ignore[no-untyped-call]
        return zero


def build_weights(num_weights: int) -> list[nn.Module]:
    """Returns the only layer of a model with `num_weights` one-element weights, in a list."""
    return [ScalarWeights(num_weights)]


class _ZeroLoss(torch.autograd.Function):
    """An autograd function that returns a zero. Its backward gives each weight a gradient."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.count, ctx.dtype = len(weights), weights[0].dtype
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        # Each weight gets a tensor of its own, since autograd would copy a tensor that is returned twice.
        return torch.unbind(gradients[0].to(ctx.dtype).expand(ctx.count, 1).contiguous())


class IdentityLoss:
    """A loss that returns the output of the model. Its weight is the number of samples."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(len(batch["index"]))

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return output


def measure_engine(device: Device, plan: Plan | None = None) -> dict[str, float]:
    """Returns the `[engine]` table after about two seconds. plan: sets the dtypes; if it is None, weights are bf16."""
    precision = {"compute": plan.precision.compute, "gradients": plan.precision.gradients} if plan else {"compute": "bf16"}
    turns = []
    with ExitStack() as stack, device.preserve_random_state():
        world = stack.enter_context(World.alone(device))
        counts = product(WEIGHT_COUNTS, MICROBATCH_COUNTS)
        runs = {pair: stack.enter_context(assemble(_engine_plan(device, precision, *pair), world)) for pair in counts}
        for run in runs.values():
            for _ in range(WARMUP_STEPS):
                run.step()
        for _ in range(NUM_TURNS):
            turns.append(solve_engine_table({pair: mean_step_s(run, STEPS_PER_TURN) for pair, run in runs.items()}))
    return {name: median(getattr(turn, name) for turn in turns) for name in EngineTable.model_fields}


def solve_engine_table(seconds: Mapping[tuple[int, int], float]) -> EngineTable:
    """Returns the four figures of `[engine]`; negative figures become 0. seconds: a step's time by (weights, microbatches)."""
    min_count, max_count = MICROBATCH_COUNTS
    micro_s, gradient_s = _fit_line(
        {n: (seconds[n, max_count] - seconds[n, min_count]) / (max_count - min_count) for n in WEIGHT_COUNTS}
    )
    step_s, parameter_s = _fit_line({n: seconds[n, min_count] - min_count * (micro_s + n * gradient_s) for n in WEIGHT_COUNTS})
    return EngineTable(step_s=step_s, parameter_s=parameter_s, micro_s=micro_s, gradient_s=gradient_s)


def _fit_line(values: Mapping[int, float]) -> tuple[float, float]:
    """Returns the intercept and the slope of the line through two points; a negative value becomes 0. values: y by x."""
    (first_x, first_y), (second_x, second_y) = values.items()
    slope = max(0.0, (second_y - first_y) / (second_x - first_x))
    return max(0.0, first_y - first_x * slope), slope


def _engine_plan(device: Device, precision: Mapping[str, str], num_weights: int, num_microbatches: int) -> Plan:
    """Returns a plan whose model has `num_weights` one-element weights. Its steps have `num_microbatches` microbatches."""
    tables = {
        "run": {"name": "engine", "steps": 1 << 20, "device": device.type},
        "model": {"factory": f"{__name__}:build_weights", "options": {"num_weights": num_weights}},
        "data": {"factory": f"{__name__}:IndexDataset"},
        "loss": {"factory": f"{__name__}:IdentityLoss"},
        "batch": {"global_size": num_microbatches, "micro_size": 1},
        "optimizer": {"use": "core.adamw", "lr": 1e-4, "clip_norm": 1.0},
        "precision": dict(precision),
    }
    return plan_from_dict(tables)


def mean_step_s(run: Run, num_steps: int) -> float:
    """Returns the mean time of `num_steps` steps in seconds. Each step starts before the previous step's totals are read."""
    device = run.world.device
    current = run.launch(None)
    device.wait_until(device.moment())
    start_s = time.perf_counter()
    for _ in range(num_steps):
        previous, current = current, run.launch(None)
        assert previous.totals.read().is_finite, f"step {previous.step}"
    device.wait_until(device.moment())
    elapsed_s = time.perf_counter() - start_s
    assert current.totals.read().is_finite, f"step {current.step}"
    run.parts.weights.settle()
    return elapsed_s / num_steps
