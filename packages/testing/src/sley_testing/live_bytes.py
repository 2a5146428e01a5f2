"""Counts the most tensor bytes that were alive at once on the host, as torch's profiler hears of the allocator.

    with memory_profile() as profile:
        run.step()
    peak_bytes(profile)

The profiler hears of memory alone, and of no operators. That is faster, and an exchange of gloo that it hears of keeps the
modes of the thread that began it, and by them what a layer had kept for its second run, until the exchange is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from torch._C import _autograd, _profiler  # torch's: nothing public tells each allocation, or leaves operators out
from torch.autograd.profiler import profile

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import KeyPath
from sley_core.plan.load import plan_from_dict


class Allocation(NamedTuple):
    """Memory that came or went. at_ns: when. address: where it lies. num_bytes: how much; below zero where it went."""

    at_ns: int
    address: int
    num_bytes: int


class MemoryProfile:
    """Hears what the threads of a `with` allocate and free on the host. results: torch's, behind its end."""

    def __init__(self) -> None:
        self.results: Any = None

    def __enter__(self) -> MemoryProfile:
        torchs: Any = profile(profile_memory=True)
        enable: Any = _autograd._enable_profiler  # its stub lacks the scopes
        _autograd._prepare_profiler(torchs.config(create_trace_id=True), torchs.kineto_activities)
        enable(torchs.config(), torchs.kineto_activities, {_profiler.RecordScope.LITE_INTERPRETER})  # which no run has
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.results = _autograd._disable_profiler()


def memory_profile() -> MemoryProfile:
    """Returns a profile of what is allocated and freed on the host within a `with`."""
    return MemoryProfile()


def allocations(ended: MemoryProfile) -> list[Allocation]:
    """Returns what was allocated and freed within an ended profile, by its threads, in the order of time."""
    assert ended.results is not None, "the profile has not ended"
    found = []
    for event in ended.results.experimental_event_tree():
        fields = event.typed[1]
        assert isinstance(fields, _profiler._ExtraFields_Allocation), fields
        found.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(found)


def peak_bytes(ended: MemoryProfile) -> int:
    """Returns the most bytes that were there at once within an ended profile, above what was there before, by address.

    The profiler's own sum does not see what gloo's threads free; by address, the next user of a place takes it over.
    """
    live: dict[int, int] = {}
    total = peak = 0
    for event in allocations(ended):
        total -= live.pop(event.address, 0)
        if event.num_bytes > 0:
            live[event.address] = event.num_bytes
            total += event.num_bytes
        peak = max(peak, total)
    return peak


@dataclass(frozen=True)
class RealBytes:
    """states: what the run's parts hold after the last step. peak: the most at once, above what was there before assembly, and
    without the samples: the thread that reads them is not heard by torch's profiler (`RankBytes.batch` says what they take).
    found: values of the plan that only the run could determine, as the seconds of layers by which it cut the model.
    """

    states: dict[str, int]
    peak: int
    found: Mapping[KeyPath, Any]


def real_bytes(tables: Mapping[str, Any], num_steps: int = 3, *, folder: Path | None = None) -> RealBytes:
    """Takes `num_steps` steps of the plan in `tables` on this rank of the world that the environment describes."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, memory_profile() as profile, assemble(plan, world) as run:
        for _ in range(num_steps):
            run.step()
        states = dict(run.memory.bytes)
        found = dict(run.facts.plan_values)
    return RealBytes(states, peak_bytes(profile), found)
