"""`train-cli estimate`: the bytes that every stage of a run needs, and the seconds of a step, before a device is touched."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sley_core.actions.action import in_words
from sley_core.errors import UsageError
from sley_core.plan.load import load_plan
from sley_estimate.commands.seconds import machine_of, seconds_data, seconds_lines
from sley_estimate.draw_memory import memory_elements
from sley_estimate.machine.on_machine import on_machine
from train_cli.options import (
    FormatOption,
    NodesOption,
    OutputFormat,
    PerNodeOption,
    PlanArgument,
    SetOption,
    WorldOption,
    given_world,
)
from train_cli.surroundings import num_cores
from train_cli.timeline_svg import picture, timeline_elements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sley_core.plan.plan import Plan
    from sley_estimate.bytes.rank import RankBytes
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.seconds_of_plan import PlanSeconds

GIB = 1 << 30
COUNTED = "counted are a rank's tensors; its process needs more: libraries, CUDA's context, what allocators keep free"
SVG_WIDTH = 1200
"""Pixels."""

UNITS = {
    "TiB": 1 << 40,
    "GiB": GIB,
    "MiB": 1 << 20,
    "KiB": 1 << 10,
    "TB": 10**12,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
    "B": 1,
}
"""Bytes of the units that a size may have; `B` comes last, since all end so."""


def estimate(
    plan: PlanArgument,
    overrides: SetOption = None,
    world: WorldOption = None,
    nodes: NodesOption = None,
    per_node: PerNodeOption = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="What a device has, such as 80GiB: exit code 1 if a stage needs more."),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="Say the seconds of a step on this machine too, as calibrate wrote it."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", metavar="FILE", help="Draw the memory over one step, stage by stage; with --machine its timeline too."
        ),
    ] = None,
    form: FormatOption = OutputFormat.text,
) -> None:
    """Say how many bytes each stage of a run holds at most, when, and what of; no device is needed."""
    limit = None if memory is None else num_bytes(memory)
    resolved = load_plan(plan, overrides or [])
    given = given_world(world, nodes, per_node)
    size = resolved.world(None) if given is None else given
    known = None if machine is None else machine_of(machine, per_node)
    if known is not None:
        resolved = on_machine(resolved, known)
    found, timed = bytes_and_seconds(resolved, size, known)
    if limit is None and known is not None:
        limit = known.device.memory
    if svg is not None:
        svg.write_text(drawn(found, timed, limit), "utf-8")
    if form is OutputFormat.json:
        told = {"world": size, "memory": limit, "stages": [asdict(one) for one in found]}
        typer.echo(json.dumps(told | ({} if timed is None else {"seconds": seconds_data(timed)}), indent=2))
    else:
        typer.echo("\n".join(lines(found, size, limit)))
        if timed is not None and known is not None:
            typer.echo("\n".join(seconds_lines(timed, known)))
    if limit is not None and max(one.peak for one in found) > limit:
        raise typer.Exit(1)


def stages(plan: Plan, size: int) -> Sequence[RankBytes]:
    """Returns the bytes of each stage by rank. Raises as `bytes_and_seconds`."""
    return bytes_and_seconds(plan, size, None)[0]


def bytes_and_seconds(plan: Plan, size: int, machine: MachineFile | None) -> tuple[Sequence[RankBytes], PlanSeconds | None]:
    """Returns the bytes of each stage by rank, and the seconds of a step on `machine`, if there is one. Raises SleyError, with
    its place in the plan, as `stage_bytes` and `estimate_both` do.
    """
    from sley_core.errors import SleyError
    from sley_estimate.bytes.stages import stage_bytes
    from sley_estimate.seconds_of_plan import estimate_both

    try:
        if machine is None:
            return list(stage_bytes(plan, size, cores=num_cores())), None
        return estimate_both(plan, size, machine, num_cores())
    except SleyError as error:
        raise plan.located(error) from error.__cause__


def drawn(found: Sequence[RankBytes], timed: PlanSeconds | None, limit: int | None) -> str:
    """Returns an SVG picture of the memory over one step, and below it of the step's timeline if its seconds are known."""
    curves = {f"stage {one.stage}": [(moment.entry, moment.num_bytes) for moment in one.curve] for one in found}
    body, height = memory_elements(curves, 0, SVG_WIDTH, limit)
    if timed is not None:
        more, height = timeline_elements({"estimated": timed.step.timeline}, height, SVG_WIDTH)
        body += more
    return picture(body, SVG_WIDTH, height)


def num_bytes(text: str) -> int:
    """Returns the bytes of a size such as 80GiB or 512 MB. Raises UsageError `memory-size` for anything else."""
    for unit, factor in UNITS.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal() and float(number) > 0:
            return int(float(number) * factor)
    raise UsageError(
        "memory-size", f"`--memory {text}` is no size", hint="write 80GiB, or a number of TiB, MiB, KiB, TB, GB, MB, KB or B"
    )


def lines(found: Sequence[RankBytes], size: int, limit: int | None) -> Iterator[str]:
    """Yields the estimate as lines of text."""
    per_stage = size // len(found)
    for one in found:
        last = one.rank + per_stage - 1
        ranks = f"rank {one.rank}" if per_stage == 1 else f"ranks {one.rank} to {last}"
        layer = f", layer {one.place.layer}" if one.place.layer else ""
        first = " of the first step" if one.place.step == 1 else ""
        yield f"stage {one.stage} ({ranks}): peak {shown(one.peak)} in {in_words(one.place.entry)}{first}{layer}"
        for owner, count in one.alive.items():
            yield f"    {owner.replace('_', ' '):18} {shown(count):>12}"
        if one.cycles is not None:
            yield (
                f"    note: from layer {one.cycles.layer} on, {shown(one.cycles.num_bytes)} stay in reference cycles, and are "
                "counted to the step's end; a run holds them until Python's collector comes, sooner or later than that"
            )
    most = max(found, key=lambda one: one.peak)
    verdict = f"the most is {shown(most.peak)}, on stage {most.stage}"
    if limit is not None:
        left = limit - most.peak
        verdict += f": fits into {shown(limit)}, {shown(left)} are left" if left >= 0 else ""
        verdict += f": does not fit into {shown(limit)}, {shown(-left)} are missing" if left < 0 else ""
    yield verdict
    yield COUNTED


def shown(count: int) -> str:
    """Returns bytes as text, in the unit that fits."""
    unit, size = unit_of(count)
    return f"{count / size:.2f} {unit}" if size > 1 else f"{count} B"


def unit_of(count: int) -> tuple[str, int]:
    """Returns the largest unit of which `count` bytes are one or more, and its bytes."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return unit, size
    return "B", 1
