"""Compares the estimate of a plan of one process with its run: bytes at the peak, and seconds of a step.

    def measured(device: Device) -> MachineFile:      # as `calibrate` measures it
        return machine_for(device, plan, known)

    compared = compare("wide", plan, measured)        # on a CPU, or on the CUDA device of the plan

On CUDA the allocator tells the most bytes; what cuBLAS works in comes from it too, and is told apart. On a CPU its events tell.

Layers are timed and steps are taken in turn: a host that others use is faster at one time than at another, by half within ten
seconds, and what is timed at one time would be compared with what runs at another.

Since core 0.2.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.records import steps_on_host
from sley_estimate.bytes.rank import STEPS, rank_bytes
from sley_estimate.calibrate.device import measure_device
from sley_estimate.calibrate.engine import measure_engine, seconds_of_steps
from sley_estimate.calibrate.host import host_bandwidth, measure_host
from sley_estimate.calibrate.layers import measure_layers
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.machine.tables import MACHINE_FORMAT
from sley_estimate.seconds_of_plan import estimate_seconds
from sley_testing.live_bytes import memory_profile, peak_bytes

if TYPE_CHECKING:
    from types import TracebackType

    from sley_core.comm.device import Device
    from sley_core.plan.plan import Plan
    from sley_estimate.machine.tables import MachineFile


@dataclass(frozen=True)
class Peak:
    """The most bytes at once within a block, above what was there before. requested: the same without what an allocator rounds
    up, 0 where nobody tells. workspaces: of cuBLAS, which `num_bytes` and `requested` leave out.
    """

    num_bytes: int
    requested: int = 0
    workspaces: int = 0


class Meter(Protocol):
    """Measures the peak of a `with`. peak: behind its end."""

    peak: Peak

    def __enter__(self) -> object: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class HostMeter:
    """Hears the allocator of the host. The thread that reads samples is not heard."""

    def __init__(self) -> None:
        self.peak = Peak(0)
        self._profile = memory_profile()

    def __enter__(self) -> None:
        self._profile.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._profile.__exit__(kind, error, trace)
        if kind is None:
            self.peak = Peak(peak_bytes(self._profile))


class CudaMeter:
    """Asks the allocator of the current CUDA device, which only this process's threads use."""

    def __init__(self) -> None:
        self.peak = Peak(0)
        self._before = self._requested = 0

    def __enter__(self) -> None:
        gc.collect()
        _clear_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        self._requested = _requested("current")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            return
        torch.cuda.synchronize()
        allocated = torch.cuda.max_memory_allocated() - self._before
        requested = _requested("peak") - self._requested
        before = torch.cuda.memory_allocated()
        _clear_workspaces()
        workspaces = before - torch.cuda.memory_allocated()
        self.peak = Peak(allocated - workspaces, requested - workspaces, workspaces)


def _requested(when: str) -> int:
    """Returns the bytes that were asked for, before the allocator rounds them up: "current" or "peak"."""
    return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{when}", 0))


def _clear_workspaces() -> None:
    """Gives back what cuBLAS works in: up to 32 MiB for each thread that multiplies, forward and backward."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


@dataclass(frozen=True)
class Compared:
    """What a plan was estimated to take, and took. states, real_states: bytes by part between two steps. estimates: seconds of
    a step, as they were foreseen before each of some rounds. rounds: mean seconds of a step in each of them.
    """

    name: str
    num_bytes: int
    peak: Peak
    states: dict[str, int]
    real_states: dict[str, int]
    estimates: Sequence[float]
    rounds: Sequence[float]

    @property
    def real_seconds(self) -> float:
        """Returns the median of the rounds: what disturbs the machine for a while leaves it as it is."""
        return median(self.rounds)

    @property
    def bytes_error(self) -> float:
        """Returns how much more was estimated than there was at the peak, relative to that."""
        return self.num_bytes / self.peak.num_bytes - 1

    @property
    def seconds_errors(self) -> list[float]:
        """Returns how much longer the estimated step is than the real one, relative to that, in each turn."""
        return [seconds / real_s - 1 for seconds, real_s in zip(self.estimates, self.rounds, strict=True)]

    @property
    def seconds_error(self) -> float:
        """Returns how much longer the median estimate is than the median step, relative to that."""
        return median(self.estimates) / self.real_seconds - 1

    def __str__(self) -> str:
        mib, peak = 2**20, self.peak
        told = f"{self.name}: estimated {self.num_bytes / mib:.1f} MiB of {peak.num_bytes / mib:.1f} ({self.bytes_error:+.2%})"
        if peak.requested:
            told += f", {peak.requested / mib:.1f} asked for, beside {peak.workspaces / mib:.0f} of cuBLAS"
        turns = ", ".join(
            f"{error:+.1%} of {real_s:.4f}" for error, real_s in zip(self.seconds_errors, self.rounds, strict=True)
        )
        return f"{told}; a step of {self.real_seconds:.4f} s ({self.seconds_error:+.1%}), in turn {turns}"


def measured_tables(device: Device) -> dict[str, Any]:
    """Measures the machine that `device` is part of; returns the tables of its file, without engine and layers."""
    return {"format": MACHINE_FORMAT, "device": measure_device(device), "host": measure_host(device)}


def machine_for(device: Device, plan: Plan, known: dict[str, Any]) -> MachineFile:
    """Returns the machine that `device` is part of, with the layers of `plan` as `calibrate` measures them now, and so what the
    engine takes of a host that runs ahead, and that host's bandwidth where the plan's optimizer steps there. known: what
    `measured_tables` told, of all else.
    """
    now: dict[str, Any] = {"layers": measure_layers(plan, device)}
    if device.is_async:
        now["engine"] = measure_engine(device, plan)
        if any(steps_on_host(manager.record) for manager in plan.offload):
            now["host"] = known["host"] | {"memory_bandwidth": host_bandwidth(device)}
    return machine_from_dict(known | now)


def compare(
    name: str, plan: Plan, measured: Callable[[Device], MachineFile], num_steps: int = 5, num_rounds: int = 3
) -> Compared:
    """Estimates a plan of one process, and takes steps of it: as many as show its peak, then rounds of `num_steps` that are
    timed, with a machine file that `measured` returns before each.
    """
    estimated = rank_bytes(plan, 0, 1)
    estimates, rounds = list[float](), list[float]()
    with World.alone(plan.run.device) as world, ExitStack() as stack:
        meter: Meter = CudaMeter() if world.device.type == "cuda" else HostMeter()
        with meter:
            run = stack.enter_context(assemble(plan, world))
            for _ in range(STEPS):
                run.step()
            states = dict(run.memory.bytes)
        for _ in range(num_rounds):
            estimates.append(estimate_seconds(plan, 1, measured(world.device)).step.seconds)
            rounds.append(seconds_of_steps(run, num_steps))
    num_bytes = estimated.peak - estimated.batch
    return Compared(name, num_bytes, meter.peak, dict(estimated.states), states, estimates, rounds)
