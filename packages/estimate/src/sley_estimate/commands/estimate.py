"""Implements `train-cli estimate`, and `train-cli show --timeline --machine` (`draw_step`). Neither needs a device."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from sley_core.actions.action import Delivery, describe_action
from sley_core.errors import SleyError, UsageError
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan
from sley_estimate.machine import MachineFile, load_machine
from train_cli.commands.plan import draw_timeline
from train_cli.console import (
    FormatOption,
    NodesOption,
    OutputFormat,
    PerNodeOption,
    PlanArgument,
    SetOption,
    WorldOption,
    format_bytes,
    resolve_world_size,
)
from train_cli.environment import num_cores

if TYPE_CHECKING:
    from sley_estimate.bytes.rank import RankBytes
    from sley_estimate.step.estimate import PlanEstimate

UNCOMPILED_NOTE = "the layers are estimated as if they were not compiled"
TENSORS_NOTE = (
    "these are only tensors; a process also needs memory for libraries, the CUDA context and free blocks of allocators"
)

SOURCES = {
    "measured": "measured on this machine",
    "in proportion": "scaled from variants of them that were measured on this machine",
    "counted": "computed from their operators",
}

WAITS = {
    "sum": "sums of gradients",
    "reduce": "reductions of gradients",
    "gather": "gathers of weights",
    "swap": "exchanges of attention",
    "all": "the norm and loss of all ranks",
    "to_host": "copies to the host",
    "to_device": "copies from the host",
}
"""Descriptions of what a stage waits for, by the first word of the channel of the exchange."""


def estimate(
    plan: PlanArgument,
    overrides: SetOption = None,
    world: WorldOption = None,
    nodes: NodesOption = None,
    per_node: PerNodeOption = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="The memory of a device, such as 80GiB. The exit code is 1 if a stage needs more."
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="The machine file of `calibrate`, to also estimate the step time."),
    ] = None,
    form: FormatOption = OutputFormat.text,
) -> None:
    """Show the peak memory of each stage of a run, when it occurs, and its parts. Needs no device."""

    limit = None if memory is None else parse_size(memory)
    resolved = load_plan(plan, overrides or [])
    requested_size = resolve_world_size(world, nodes, per_node)
    size = resolved.world_size(None) if requested_size is None else requested_size
    machine_file = None if machine is None else load_machine_with_ranks(machine, per_node)
    from sley_estimate.bytes.rank import stage_bytes
    from sley_estimate.step.estimate import estimate_plan

    estimate = None
    try:
        if machine_file is None:
            stages: Sequence[RankBytes] = stage_bytes(resolved, size, num_cores())
        else:
            estimate = estimate_plan(resolved, size, machine_file, num_cores(), all_stages=True)
            stages = estimate.stage_bytes
    except SleyError as error:
        raise resolved.add_places(error) from error.__cause__
    if limit is None and machine_file is not None:
        limit = machine_file.device.memory
    if form is OutputFormat.json:
        data = {"world": size, "memory": limit, "stages": [asdict(stage) for stage in stages]}
        typer.echo(json.dumps(data | ({} if estimate is None else {"seconds": seconds_data(estimate)}), indent=2))
    else:
        typer.echo("\n".join(memory_lines(stages, size, limit)))
        if estimate is not None and machine_file is not None:
            typer.echo("\n".join(seconds_lines(estimate, machine_file)))
        if resolved.model.config.compile:
            typer.echo(UNCOMPILED_NOTE)
    if limit is not None and max(stage.peak for stage in stages) > limit:
        raise typer.Exit(1)


def load_machine_with_ranks(file: Path, per_node: int | None) -> MachineFile:
    """Returns the machine in `file`, with `per_node` ranks on each host unless it is None. Raises as `load_machine` does."""
    machine = load_machine(file)
    if per_node is None:
        return machine
    links = machine.links.model_copy(update={"ranks_per_host": per_node})
    return machine.model_copy(update={"links": links})


def parse_size(text: str) -> int:
    """Returns the number of bytes in a size such as "80GiB" or "512 MB". Raises UsageError `memory-size` for any other text."""
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        hint = "use 80GiB, or another number with TiB, MiB, KiB, TB, GB, MB, KB or B"
        raise UsageError("memory-size", f"`--memory {text}` is not a size", hint=hint) from None


def memory_lines(stages: Sequence["RankBytes"], world_size: int, limit: int | None) -> Iterator[str]:
    """Yields the lines about the memory of each stage. limit: the bytes of a device, or None."""
    per_stage = world_size // len(stages)
    for stage in stages:
        ranks = f"rank {stage.rank}" if per_stage == 1 else f"ranks {stage.rank} to {stage.rank + per_stage - 1}"
        layer = f", layer {stage.position.layer}" if stage.position.layer else ""
        first = " of the first step" if stage.position.step == 1 else ""
        entry = describe_action(stage.position.entry)
        yield f"stage {stage.stage} ({ranks}): peak {format_bytes(stage.peak)} in {entry}{first}{layer}"
        for owner, count in stage.alive.items():
            yield f"    {owner.replace('_', ' '):18} {format_bytes(count):>12}"
    largest = max(stages, key=lambda stage: stage.peak)
    verdict = ""
    if limit is not None:
        size, difference = format_bytes(limit), format_bytes(abs(limit - largest.peak))
        fits = f"fits in {size} with {difference} to spare"
        verdict = f", which {fits if largest.peak <= limit else f'exceeds {size} by {difference}'}"
    yield f"the maximum is {format_bytes(largest.peak)}, on stage {largest.stage}{verdict}"
    yield TENSORS_NOTE


def draw_step(plan: Plan, world_size: int, machine: MachineFile) -> Iterator[str]:
    """Yields a drawing of an estimated step, then `seconds_lines`. Raises the errors of `estimate_plan`, with their places."""
    from sley_estimate.step.estimate import estimate_plan

    try:
        estimate = estimate_plan(plan, world_size, machine, num_cores())
    except SleyError as error:
        raise plan.add_places(error) from error.__cause__
    yield f"# {plan.pipeline.name if plan.pipeline else 'no pipeline'} on {world_size} x {machine.device.name}, estimated"
    yield draw_timeline(estimate.step.timeline)
    yield from seconds_lines(estimate, machine)


def seconds_lines(estimate: "PlanEstimate", machine: MachineFile) -> Iterator[str]:
    """Yields lines about the seconds of a step, the work and waits of each stage, and the source of the layers' seconds."""
    step = estimate.step
    host_wait_s = step.seconds - step.devices_s
    waiting = f", of which devices wait {host_wait_s:.4g} s for a host" if host_wait_s else ""
    yield f"a step takes {step.seconds:.4g} s{waiting}"
    for stage, computing_s in enumerate(step.computing_s):
        waits_s: dict[str, float] = defaultdict(float)
        for span in step.exposed_waits:
            if span.rank == stage:
                first_word, _, direction = span.channel.partition(" ")
                description = WAITS.get(first_word, f"`{first_word}`")
                if isinstance(span.key, Delivery):
                    source = "activations" if span.key.flow == "forward" else "gradients"
                    description = f"{source} from stage {direction.split('>')[0]}"
                waits_s[description] += span.end_s - span.start_s
        waits = ", ".join(
            f"{f'{value:.3g} s' if value >= 1 else f'{value * 1e3:.3g} ms'} waiting for {description}"
            for description, value in sorted(waits_s.items(), key=lambda item: -item[1])
        )
        idle = f"idle {step.timeline.idle_share(stage):.1%}" + (f": {waits}" if waits else "")
        started = f"; its host starts all of it in {step.host_s[stage]:.4g} s" if step.host_s[stage] else ""
        yield f"  stage {stage}: computes {computing_s:.4g} s, {idle}{started}"
    yield f"  {_describe_sources(estimate)} ({machine.device.name})"


def _describe_sources(estimate: "PlanEstimate") -> str:
    counts: Counter[str] = Counter(layer.source for layer in estimate.layers)
    texts = [(counts[source], text) for source, text in SOURCES.items() if counts[source]]
    if len(texts) == 1:
        count = len(estimate.layers)
        return f"all {count} layers were {texts[0][1]}" if count > 1 else f"its layer was {texts[0][1]}"
    return f"of {len(estimate.layers)} layers, {', '.join(f'{count} were {text}' for count, text in texts)}"


def seconds_data(estimate: "PlanEstimate") -> dict[str, Any]:
    """Returns the estimated seconds of a step, its stages and its layers, as data for JSON."""
    step = estimate.step
    return {
        "step": step.seconds,
        "stages": [
            {"computes": computing_s, "idle": step.timeline.idle_share(stage), "waits": step.exposed_s(stage), "host": host_s}
            for stage, (computing_s, host_s) in enumerate(zip(step.computing_s, step.host_s, strict=True))
        ],
        "layers": [
            {"name": layer.name, "source": layer.source, **(asdict(layer.seconds) if layer.seconds else {})}
            for layer in estimate.layers
        ],
    }
