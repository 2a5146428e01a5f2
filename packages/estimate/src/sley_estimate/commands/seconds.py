"""Formats the estimated seconds of a step on a machine, stage by stage, with what each waits for."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.actions.draw import draw_text
from sley_core.actions.simulate import Delivery
from sley_core.errors import SleyError
from sley_estimate.machine.read import load_machine
from train_cli.commands.show import WIDTH
from train_cli.surroundings import num_cores

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_estimate.layers.nearest import Source
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.seconds.lanes import Exposed
    from sley_estimate.seconds.result import StepSeconds
    from sley_estimate.seconds_of_plan import PlanSeconds


SOURCES: dict[Source, str] = {
    "measured": "timed on this machine",
    "in proportion": "computed in proportion to variants of them that were timed on this machine",
    "counted": "computed from their operators",
}
"""What is said of layers by where their seconds come from."""

WAITS = {
    "sum": "sums of gradients",
    "reduce": "reductions of gradients",
    "gather": "gathers of weights",
    "swap": "exchanges of attention",
    "all": "the norm and loss of all ranks",
    "to_host": "copies to the host",
    "to_device": "copies from the host",
}
"""What is said of waits, by the first word of an exchange's lane."""


def machine_of(file: Path, per_node: int | None) -> MachineFile:
    """Returns the machine in `file`, with `per_node` ranks on each host if that is given. Raises as `load_machine`."""
    machine = load_machine(file)
    if per_node is None:
        return machine
    links = machine.links.model_copy(update={"ranks_per_host": per_node})
    return machine.model_copy(update={"links": links})


def estimated(plan: Plan, size: int, machine: MachineFile) -> Iterator[str]:
    """Yields the drawing of the step of `plan` on `size` ranks of `machine`, and what each stage does meanwhile. Raises as
    `seconds_of`.
    """
    found = seconds_of(plan, size, machine)
    yield f"# {plan.pipeline.name if plan.pipeline else 'no pipeline'} on {size} x {machine.device.name}, estimated"
    yield draw_text(found.step.timeline, shutil.get_terminal_size((WIDTH, 24)).columns)
    yield from seconds_lines(found, machine)


def seconds_of(plan: Plan, size: int, machine: MachineFile) -> PlanSeconds:
    """Returns the estimate. Raises SleyError as `estimate_seconds`, with its place in the plan."""
    from sley_estimate.seconds_of_plan import estimate_seconds

    try:
        return estimate_seconds(plan, size, machine, num_cores())
    except SleyError as error:
        raise plan.located(error) from error.__cause__


def seconds_lines(found: PlanSeconds, machine: MachineFile) -> Iterator[str]:
    """Yields the seconds of a step, what each stage does meanwhile, and where the layers' seconds come from."""
    step = found.step
    behind_s = step.seconds - step.devices_s
    yield f"a step takes {step.seconds:.4g} s" + (f", of which devices wait {behind_s:.4g} s for a host" if behind_s else "")
    for stage, computing_s in enumerate(step.computing_s):
        waits = ", ".join(f"{_ms(seconds)} waiting for {what}" for what, seconds in _waits(step, stage))
        idle = f"idle {step.idle(stage):.1%}" + (f": {waits}" if waits else "")
        started = f"; its host starts all of it in {step.host_s[stage]:.4g} s" if step.host_s[stage] else ""
        yield f"  stage {stage}: computes {computing_s:.4g} s, {idle}{started}"
    yield f"  {_sources(found)} ({machine.device.name})"
    yield from (f"  {note}" for note in found.notes)


def _waits(step: StepSeconds, stage: int) -> list[tuple[str, float]]:
    """Returns what a stage waits for, in words, and the seconds of it, the longest first."""
    found: dict[str, float] = defaultdict(float)
    for span in step.exposed:
        if span.rank == stage:
            found[_awaited(span)] += span.end_s - span.start_s
    return sorted(found.items(), key=lambda one: -one[1])


def _awaited(span: Exposed) -> str:
    if isinstance(span.key, Delivery):
        what = "activations" if span.key.flow == "forward" else "gradients"
        return f"{what} from stage {span.lane.split(' ')[1].split('>')[0]}"
    kind = span.lane.split(" ")[0]
    return WAITS.get(kind, f"`{kind}`")


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _sources(found: PlanSeconds) -> str:
    """Returns where the seconds of the layers come from."""
    if not found.layers:
        return "slices of sequences are computed from their operators"
    counts = Counter(layer.source for layer in found.layers)
    words = [(counts[source], said) for source, said in SOURCES.items() if counts[source]]
    if len(words) == 1:
        count = len(found.layers)
        return f"all {count} layers were {words[0][1]}" if count > 1 else f"its layer was {words[0][1]}"
    return f"of {len(found.layers)} layers, {', '.join(f'{count} were {said}' for count, said in words)}"


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
