"""Estimates a run before it begins and puts the estimate beside what the run measured: in `summary.json`, and in words.

    run --estimate ──> bytes of rank 0, seconds of a step ──> the run ──> summary.json: "estimated" beside what was measured

An estimate takes seconds before the run begins, so it is made on request only. It is made in the process that starts the ranks,
where it does not disturb what they measure; under torchrun there is no such process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.json_text import write_json
from sley_estimate.machine.read import load_machine
from train_cli.progress import SUMMARY

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


@dataclass(frozen=True)
class Foresight:
    """Holds the estimate of rank 0: bytes by part between two steps, the peak in bytes, and seconds of a step if a machine is
    known.
    """

    states: Mapping[str, int]
    peak: int
    seconds: float | None


def foreseen(plan: Plan, size: int, machine: Path | None) -> Foresight:
    """Returns the estimate of rank 0 of `size` ranks. Raises SleyError as `train-cli estimate` does."""
    from sley_estimate.commands.estimate import bytes_and_seconds

    found, timed = bytes_and_seconds(plan, size, load_machine(machine) if machine else None)
    return Foresight(found[0].states, found[0].peak, timed.step.seconds if timed else None)


def put_beside(found: Foresight, folder: Path) -> list[str]:
    """Writes the estimate into the run's `summary.json`, and returns lines that compare it with what was measured.

    On a CPU the peak of a run's tensors is not measured: the parts are compared there, and of the peak only the estimate is
    given. Does nothing if the run left no summary.
    """
    path = folder / SUMMARY
    if not path.exists():
        return []
    summary = json.loads(path.read_text("utf-8"))
    summary["estimated"] = {"memory_bytes": dict(found.states), "peak_bytes": found.peak, "step_seconds": found.seconds}
    write_json(path, summary)
    return list(_lines(found, summary))


def _lines(found: Foresight, summary: Mapping[str, Any]) -> list[str]:
    """Returns the lines that compare the estimated memory and seconds with those of the run."""
    from sley_estimate.commands.estimate import shown

    held = sum(summary["memory_bytes"].values())
    lines = [f"  memory         {shown(held)} between steps; {shown(sum(found.states.values()))} were estimated"]
    if summary["device"].startswith("cuda"):
        peak = summary["memory_mb"] * 2**20
        lines.append(f"                 {shown(int(peak))} at most; {shown(found.peak)} were estimated{_off(found.peak, peak)}")
    else:
        lines.append(f"                 {shown(found.peak)} at most, as estimated; a CPU does not measure the peak of tensors")
    if found.seconds is not None:
        step = summary["seconds"] / summary["steps"]
        lines.append(f"  a step         {step:.4g} s; {found.seconds:.4g} s were estimated{_off(found.seconds, step)}")
    return lines


def _off(estimated: float, measured: float) -> str:
    return f" ({(estimated - measured) / measured:+.1%})" if measured else ""
