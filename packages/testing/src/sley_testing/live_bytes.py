"""Measures the peak memory of live host tensors in a run, and records figures with their targets.

    with memory_profile() as profile:
        run.step()
    peak_bytes(profile)

torch's profiler records no operators here. The record of a gloo exchange would keep the dispatch modes of a thread alive, and
with them the tensors of a recomputation.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch._C import _autograd, _profiler  # private, since no public API reports each allocation or omits operators
from torch.autograd.profiler import profile

from sley_core.comm.world import World
from sley_core.errors import KeyPath
from sley_core.plan.load import plan_from_dict
from sley_trainer.assemble import assemble, build_draft


class Allocation(NamedTuple):
    """Describes an allocation or a free of host memory at `address`. num_bytes: the size, which is negative for a free."""

    time_ns: int
    address: int
    num_bytes: int


@contextmanager
def memory_profile() -> Iterator[list[Allocation]]:
    """Yields a list that receives the host allocations and frees of the block, in order of time, when the block ends."""
    events: list[Allocation] = []
    profiler: Any = profile(profile_memory=True)
    enable: Any = _autograd._enable_profiler  # the type stub of this function lacks the parameter `scopes`
    _autograd._prepare_profiler(profiler.config(create_trace_id=True), profiler.kineto_activities)
    enable(profiler.config(), profiler.kineto_activities, {_profiler.RecordScope.LITE_INTERPRETER})  # a scope that no run uses
    try:
        yield events
    finally:
        for event in _autograd._disable_profiler().experimental_event_tree():
            fields: Any = event.typed[1]
            events.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
        events.sort()


def peak_bytes(events: list[Allocation]) -> int:
    """Returns the maximum number of bytes that were live at a time. Only memory allocated within the profile counts."""
    live: dict[int, int] = {}  # by address, since the profiler's own total misses memory that gloo's threads free
    total = peak = 0
    for _, address, num_bytes in events:
        total -= live.pop(address, 0)
        if num_bytes > 0:
            live[address] = num_bytes
            total += num_bytes
        peak = max(peak, total)
    return peak


@dataclass(frozen=True)
class MeasuredBytes:
    """Holds the measured memory of a rank in bytes. states: the memory of each part of the run after the last step. peak: the
    peak of live memory that the run allocated, without samples, since the profiler does not record the thread that loads
    samples. plan_values: values of the plan that only the run could determine, such as a partition.
    """

    states: dict[str, int]
    peak: int
    plan_values: Mapping[KeyPath, Any]


def measure_bytes(tables: Mapping[str, Any], num_steps: int = 3, *, folder: Path | None = None) -> MeasuredBytes:
    """Takes `num_steps` steps of the plan `tables` in `folder` on this rank of the environment's world. Returns the memory."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, memory_profile() as events:
        draft = build_draft(plan, world)
        with assemble(plan, world, draft=draft) as run:
            for _ in range(num_steps):
                run.step()
            states = dict(run.memory.bytes)
    return MeasuredBytes(states, peak_bytes(events), draft.plan_values)


class Figure(NamedTuple):
    """Holds a line of the table of `nox -s gpu`. target: "" if the figure has no target; then `is_met` is None."""

    name: str
    figure: str
    target: str = ""
    is_met: bool | None = None

    def __str__(self) -> str:
        verdict = {True: "met", False: "NOT MET", None: ""}[self.is_met]
        return f"{self.name:<56} {self.figure:<56} {self.target:<24} {verdict}".rstrip()


def note_figure(figure: Figure) -> None:
    """If the environment variable SLEY_FIGURES is set, appends a line to the file that it names, which `nox -s gpu` prints."""
    if path := os.environ.get("SLEY_FIGURES"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{figure}\n")
