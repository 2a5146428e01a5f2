"""Formats the estimated seconds of a step on a machine, stage by stage, with what each waits for."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.actions.draw import draw_text
from sley_core.errors import SleyError
from sley_core.estimate.machine.read import load_machine
from train_cli.surroundings import num_cores
from train_cli.timeline import WIDTH

if TYPE_CHECKING:
    from sley_core.estimate.layers.nearest import Source
    from sley_core.estimate.machine.tables import MachineFile
    from sley_core.estimate.seconds_of_plan import PlanSeconds
    from sley_core.plan.plan import Plan


SOURCES: dict[Source, str] = {
    "measured": "measured on it",
    "in proportion": "computed in proportion to others of their variants, measured on it",
    "counted": "computed from their operators",
}
"""What is said of layers by where their seconds come from."""


def estimated(plan: Plan, size: int, file: Path) -> Iterator[str]:
    """Yields the drawing of the step of `plan` on `size` ranks of the machine in `file`, and what each stage does meanwhile.

    Raises PlanError for a machine file that is wrong, and as `seconds_of`.
    """
    machine = load_machine(file)
    found = seconds_of(plan, size, machine)
    yield f"# {plan.pipeline.name if plan.pipeline else 'no pipeline'} on {size} x {machine.device.name}, estimated"
    yield draw_text(found.step.timeline, shutil.get_terminal_size((WIDTH, 24)).columns)
    yield from seconds_lines(found, machine)


def seconds_of(plan: Plan, size: int, machine: MachineFile) -> PlanSeconds:
    """Returns the estimate. Raises SleyError as `estimate_seconds`, with its place in the plan."""
    from sley_core.estimate.seconds_of_plan import estimate_seconds

    try:
        return estimate_seconds(plan, size, machine, num_cores())
    except SleyError as error:
        raise plan.located(error) from error.__cause__


def seconds_lines(found: PlanSeconds, machine: MachineFile) -> Iterator[str]:
    """Yields the seconds of a step, what each stage does meanwhile, and where the layers' seconds come from."""
    step = found.step
    behind_s = step.seconds - step.devices_s
    yield f"a step takes {step.seconds:.4g} s" + (
        f", of which devices wait {behind_s:.4g} s for a host" if behind_s else ""
    )
    for stage, computing_s in enumerate(step.computing_s):
        waits = ", ".join(f"{seconds:.4g} s for {lane}" for lane, seconds in sorted(step.exposed_s(stage).items()))
        idle = f"idle {step.idle(stage):.1%}" + (f" (waits {waits})" if waits else "")
        started = f"; its host starts all of it in {step.host_s[stage]:.4g} s" if step.host_s[stage] else ""
        yield f"  stage {stage}: computes {computing_s:.4g} s, {idle}{started}"
    yield f"  {_sources(found)}; {machine.device.name} of the machine file"
    yield from (f"  {note}" for note in found.notes)


def _sources(found: PlanSeconds) -> str:
    """Returns where the seconds of the layers come from."""
    if not found.layers:
        return "operators of slices of sequences, computed"
    counts = Counter(layer.source for layer in found.layers)
    words = [f"{counts[source]} {said}" for source, said in SOURCES.items() if counts[source]]
    if len(words) == 1:
        return f"{len(found.layers)} layers, {words[0].split(' ', 1)[1]}"
    return f"{len(found.layers)} layers, of them {', '.join(words)}"


def seconds_data(found: PlanSeconds) -> dict[str, Any]:
    """Returns the estimate for JSON: seconds of the step, and of each stage."""
    step = found.step
    return {
        "step": step.seconds,
        "stages": [
            {"computes": computing_s, "idle": step.idle(stage), "waits": step.exposed_s(stage), "host": host_s}
            for stage, (computing_s, host_s) in enumerate(zip(step.computing_s, step.host_s, strict=True))
        ],
        "layers": [
            {"name": layer.name, "measured": layer.is_measured, "source": layer.source, **asdict(layer.seconds)}
            for layer in found.layers
        ],
        "notes": list(found.notes),
    }
