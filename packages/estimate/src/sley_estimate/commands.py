"""Implements `train-cli estimate`, `search` and `calibrate`, and `show --timeline --machine` (`draw_step`).

Only `calibrate` needs a device: it measures this machine, in its own process or on local ranks that it starts.
"""

import json
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import Progress

from sley_core.actions.action import Delivery, describe_action
from sley_core.errors import EXIT_OK, PlanError, UsageError
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan, plan_sections
from sley_estimate.machine import MachineFile, load_machine, machine_text
from sley_estimate.search.layouts import AXES
from train_cli import console
from train_cli.commands.plan import draw_timeline
from train_cli.environment import num_cores
from train_cli.faults import Fault, write_error_file

if TYPE_CHECKING:
    from sley_estimate.bytes.rank import RankBytes
    from sley_estimate.search.find import SearchResult, VerifiedLayout
    from sley_estimate.step.estimate import PlanEstimate

UNCOMPILED_NOTE = "the layers are estimated as if they were not compiled"  # printed if the plan compiles the model
TENSORS_NOTE = (  # printed after the memory of the stages
    "the figures count only tensors; a process also needs memory for libraries, the CUDA context and free blocks of allocators"
)

SOURCES = {  # the source of the layers' times (`times.Source`), in words that follow "3 layers were"
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
"""Descriptions of the exchanges for which a stage waits, by the first word of the exchange's channel."""


def estimate(
    plan: console.PlanArgument,
    overrides: console.SetOption = None,
    world: console.WorldOption = None,
    nodes: console.NodesOption = None,
    per_node: console.PerNodeOption = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="The memory of a device, such as 80GiB. The exit code is 1 if a stage needs more."
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="The machine file from `calibrate`, to also estimate the step time."),
    ] = None,
    form: console.FormatOption = console.OutputFormat.text,
) -> None:
    """Show the peak memory of each stage of a run, when it occurs, and its parts. Needs no device."""

    limit = None if memory is None else parse_size(memory)
    resolved = load_plan(plan, overrides or [])
    requested_size = console.resolve_world_size(world, nodes, per_node)
    size = resolved.world_size(None) if requested_size is None else requested_size
    machine_file = None if machine is None else load_machine_with_ranks(machine, per_node)
    from sley_estimate.bytes.rank import stage_bytes
    from sley_estimate.step.estimate import estimate_plan

    estimate = None
    with resolved.document.locate_errors():
        if machine_file is None:
            stages: Sequence[RankBytes] = stage_bytes(resolved, size, num_cores())
        else:
            estimate = estimate_plan(resolved, size, machine_file, num_cores(), all_stages=True)
            stages = estimate.stage_bytes
    if limit is None and machine_file is not None:
        limit = machine_file.device.memory
    if form is console.OutputFormat.json:
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
    """Returns the machine in `file`, with `per_node` ranks per host if it is given. Raises the errors of `load_machine`."""
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
        hint = "use a size such as 80GiB; units are TiB, GiB, MiB, KiB, TB, GB, MB, KB and B"
        raise UsageError("memory-size", f"`--memory {text}` is not a size", hint=hint) from None


def memory_lines(stages: Sequence["RankBytes"], world_size: int, limit: int | None) -> Iterator[str]:
    """Yields the lines that describe the memory of `stages`. limit: the memory of a device in bytes; None means no limit."""
    per_stage = world_size // len(stages)
    for stage in stages:
        ranks = f"rank {stage.rank}" if per_stage == 1 else f"ranks {stage.rank} to {stage.rank + per_stage - 1}"
        layer = f", layer {stage.position.layer}" if stage.position.layer else ""
        first = " of the first step" if stage.position.step == 1 else ""
        entry = describe_action(stage.position.entry)
        yield f"stage {stage.stage} ({ranks}): peak {console.format_bytes(stage.peak)} in {entry}{first}{layer}"
        for owner, count in stage.alive.items():
            yield f"    {owner.replace('_', ' '):18} {console.format_bytes(count):>12}"
    largest = max(stages, key=lambda stage: stage.peak)
    verdict = ""
    if limit is not None:
        size, difference = console.format_bytes(limit), console.format_bytes(abs(limit - largest.peak))
        fits = f"fits in {size} with {difference} to spare"
        verdict = f", which {fits if largest.peak <= limit else f'exceeds {size} by {difference}'}"
    yield f"the maximum is {console.format_bytes(largest.peak)}, on stage {largest.stage}{verdict}"
    yield TENSORS_NOTE


def draw_step(plan: Plan, world_size: int, machine: MachineFile) -> Iterator[str]:
    """Yields a drawing of the estimated step, then `seconds_lines`. Adds locations in the plan to errors of `estimate_plan`."""
    from sley_estimate.step.estimate import estimate_plan

    with plan.document.locate_errors():
        estimate = estimate_plan(plan, world_size, machine, num_cores())
    yield f"# {plan.pipeline.name if plan.pipeline else 'no pipeline'} on {world_size} x {machine.device.name}, estimated"
    yield draw_timeline(estimate.step.timeline)
    yield from seconds_lines(estimate, machine)


def seconds_lines(estimate: "PlanEstimate", machine: MachineFile) -> Iterator[str]:
    """Yields lines about the time of a step, the work and waits of each stage, and the sources of the layers' times."""
    step = estimate.step
    host_wait_s = step.seconds - step.devices_s
    waiting = f", of which devices wait {host_wait_s:.4g} s for a host" if host_wait_s else ""
    yield f"a step takes {step.seconds:.4g} s{waiting}"
    for stage, computing_s in enumerate(step.timeline.computing_s):
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
        started = f"; its host launches this work in {step.host_s[stage]:.4g} s" if step.host_s[stage] else ""
        yield f"  stage {stage}: computes {computing_s:.4g} s, {idle}{started}"
    yield f"  {_describe_sources(estimate)} ({machine.device.name})"


def _describe_sources(estimate: "PlanEstimate") -> str:
    """Returns a text that says how many layers got their times from each source."""
    counts: Counter[str] = Counter(layer.source for layer in estimate.layers)
    texts = [(counts[source], text) for source, text in SOURCES.items() if counts[source]]
    if len(texts) == 1:
        count = len(estimate.layers)
        return f"all {count} layers were {texts[0][1]}" if count > 1 else f"the only layer was {texts[0][1]}"
    return f"of {len(estimate.layers)} layers, {', '.join(f'{count} were {text}' for count, text in texts)}"


def seconds_data(estimate: "PlanEstimate") -> dict[str, Any]:
    """Returns the estimated times of a step, of its stages and of its layers in seconds, as data for JSON."""
    step = estimate.step
    return {
        "step": step.seconds,
        "stages": [
            {"computes": computing_s, "idle": step.timeline.idle_share(stage), "waits": step.exposed_s(stage), "host": host_s}
            for stage, (computing_s, host_s) in enumerate(zip(step.timeline.computing_s, step.host_s, strict=True))
        ],
        "layers": [
            {"name": layer.name, "source": layer.source, **(asdict(layer.seconds) if layer.seconds else {})}
            for layer in estimate.layers
        ],
    }


def search(
    plan: console.PlanArgument,
    world: Annotated[int, typer.Option("--world", min=1, metavar="RANKS", help="The number of ranks.")],
    machine: Annotated[
        Path | None, typer.Option("--machine", metavar="FILE", help="The machine file from `calibrate` (required).")
    ] = None,
    overrides: console.SetOption = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="The memory of a device, such as 80GiB; no limit by default.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="The number of layouts to show.")] = 5,
    keep_axes: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="AXIS", help=f"An axis to keep as in the plan; can be repeated: {', '.join(AXES)}."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the fastest layout as a plan to this file.")
    ] = None,
) -> None:
    """Find the fastest layouts of a plan that fit in memory, with the installed plugins. Needs no device."""
    if machine is None:
        hint = "use `train-cli calibrate --out machine.toml --plan PLAN`, then pass `--machine machine.toml`"
        raise UsageError("search-machine", "a search needs a machine file", hint=hint)
    from sley_core.plan.check import check_data
    from sley_estimate.search.find import search_layouts
    from sley_estimate.search.layouts import Layouts, list_choices

    limit = None if memory is None else parse_size(memory)
    resolved = load_plan(plan, overrides or [])
    machine_file = load_machine(machine)
    with resolved.document.locate_errors():
        # Reports faults such as missing files first, since they would exclude every layout.
        problems = check_data(resolved.data, resolved.model, evaluates=resolved.evaluation is not None)
        if located := [resolved.diagnostic(problem.code, problem.message, problem.path, problem.hint) for problem in problems]:
            raise PlanError.from_diagnostics(located)
        choices = list_choices(resolved)
        space = Layouts(resolved, world, choices, keep_axes or ())
        with Progress(console=Console(stderr=True), transient=True, disable=not console.can_redraw(sys.stderr)) as progress:
            task = progress.add_task("ranking all layouts", total=None)

            def report_progress(done: int, total: int) -> None:
                progress.update(task, description="verifying the best layouts", completed=done, total=total)

            cores, max_bytes = num_cores(), math.inf if limit is None else limit
            result = search_layouts(
                space, machine_file, max_bytes=max_bytes, top=top, cores=cores, report_progress=report_progress
            )
    typer.echo("\n".join(result_lines(result, choices.skip_reasons, limit)))
    if not result.fastest_layouts:
        raise typer.Exit(1)
    if write is not None:
        write.write_text(plan_text(resolved, world, result.fastest_layouts[0]), "utf-8")
        typer.echo(f"written to {write}")


def result_lines(result: "SearchResult", skip_reasons: Sequence[str], limit: int | None) -> Iterator[str]:
    """Yields lines about the result of a search. skip_reasons: texts to print. limit: a device's memory in bytes; None means no
    limit.
    """
    too_large = "" if limit is None else f"; {result.num_too_large:,} exceed {console.format_bytes(limit)}"
    yield f"{result.num_layouts:,} layouts considered; the {result.num_verified:,} best by the formula were verified{too_large}"
    yield from (f"  {count:,} excluded: {reason}" for reason, count in result.refusals.most_common())
    yield from (f"  excluded: {name}" for name in skip_reasons)
    if result.num_dropped:
        yield f"  {result.num_dropped:,} fit by the formula, but not by `estimate`"
    if not result.fastest_layouts:
        if result.smallest_layout is None or limit is None:
            yield "no layout of this plan is possible in this world, for the reasons above"
        else:
            smallest = f"the smallest layout needs at least {console.format_bytes(result.min_bytes)}: {result.smallest_layout}"
            yield f"no layout fits in {console.format_bytes(limit)}: {smallest}"
        return
    yield "fastest (verified by estimate)"
    for fast in result.fastest_layouts:
        yield f"  {fast.seconds:10.4g} s  {console.format_bytes(fast.num_bytes):>12}  {fast.layout}"
    sources = {source for fast in result.fastest_layouts for source in fast.sources}
    if "counted" in sources and len(sources) > 1:
        yield "  Some layers were measured, and others were computed from their operators. Their times may not be comparable."
        yield "  Use `calibrate --plan` to measure the layers of the plan."


def plan_text(plan: Plan, world_size: int, best: "VerifiedLayout") -> str:
    """Returns the text of a plan file: comments that describe the layout `best` and its estimate, and `plan` in this layout."""
    size = console.format_bytes(best.num_bytes)
    head = f"# {world_size} ranks: {best.seconds:.4g} s per step, {size} at the peak of a rank, verified by estimate\n"
    return f"{head}# {best.layout}\n" + "\n".join(plan_sections(best.layout.apply(plan, world_size).tables))


TIMEOUT_S = 60.0  # the maximum time in seconds that a rank of `calibrate` waits for other ranks


def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The machine file to write, in TOML.")],
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="Also measure each distinct layer of this plan's model.")
    ] = None,
    overrides: console.SetOption = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", min=2, help="Start N local ranks and measure their communication.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Measure the device of this machine, the exchanges of ranks and the layers of a plan, and write a machine file."""
    if overrides and plan is None:
        raise UsageError("calibrate-plan", "`--set` changes a plan, but `--plan` is missing")
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not is_rank:
        if out.exists() and not force:
            raise UsageError("machine-exists", f"the file `{out}` exists already", hint="use `--force` to replace it")
        if not out.absolute().parent.is_dir():
            raise UsageError("machine-folder", f"the folder `{out.absolute().parent}` does not exist")
    if ranks is not None and not is_rank:
        if plan is not None:
            load_plan(plan, overrides or [])  # reports a mistake once instead of on each rank
        from train_cli.local_launch import launch

        arguments = {"out": str(out), "plan": str(plan) if plan else None, "overrides": overrides or []}
        target = "sley_estimate.commands:measure_on_rank"
        fault = launch(target, arguments, ranks, out.absolute().parent, sigterm_timeout_s=TIMEOUT_S)
        console.print_fault(fault, context.ensure_object(console.Settings))
        raise typer.Exit(fault.exit_code)
    measure_on_rank(str(out), str(plan) if plan else None, overrides or [])


def measure_on_rank(out: str, plan: str | None, overrides: list[str]) -> int:
    """Measures this machine, alone or as a rank of a launch. Rank 0 writes the file `out`. Returns the exit code."""
    from sley_core.comm.world import World
    from sley_estimate.calibrate.links import measure_machine

    try:
        resolved = load_plan(Path(plan), overrides) if plan else None
        device = resolved.run.device if resolved else "auto"
        with World.join(device, timeout_s=TIMEOUT_S) as world:
            machine = measure_machine(world, resolved, TIMEOUT_S)
    except Exception as error:
        write_error_file(Fault.from_error(error))
        raise
    if machine is not None:
        Path(out).write_text(machine_text(machine), "utf-8")
        console.print_line(f"{machine.device.name}: {out} has {_describe_contents(machine)}")
    return EXIT_OK


def _describe_contents(machine: MachineFile) -> str:
    """Returns a text that lists the parts of a machine that were measured."""
    text = "the device"
    if machine.links.same_host is not None:
        text += ", links between ranks of this host"
    for layer in machine.layers[:1]:
        text += f", {len(machine.layers)} layers under {layer.activations} with microbatches of {layer.micro_size}"
    return text
