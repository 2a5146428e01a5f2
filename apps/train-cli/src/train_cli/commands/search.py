"""`train-cli search`: the fastest layouts of a plan that fit, before a device is touched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sley_core.errors import SleyError, UsageError
from sley_core.estimate.machine.read import load_machine
from sley_core.plan.load import load_plan
from sley_core.search.layouts import AXES, Axis
from train_cli.commands.estimate import num_bytes, shown
from train_cli.options import PlanArgument, SetOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sley_core.plan.plan import Plan
    from sley_core.search.best_first import Fastest, Seen

TOLD_OF = ("sp", "wp", "offload")
"""Axes of which only a layout's own steps tell: they stay as the plan has them."""


def search(
    plan: PlanArgument,
    world: Annotated[int, typer.Option("--world", min=1, metavar="RANKS", help="How many ranks there are.")],
    machine: Annotated[Path, typer.Option("--machine", metavar="FILE", help="The machine, as `calibrate` wrote it.")],
    overrides: SetOption = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="What a device has, such as 80GiB; else no limit.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="How many layouts to show.")] = 5,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="AXIS", help=f"Stays as the plan has it; may be repeated: {', '.join(AXES)}."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the plan in the fastest layout here.")
    ] = None,
) -> None:
    """Find the fastest layouts of a plan that fit, from what is installed; no device is needed."""
    limit = None if memory is None else num_bytes(memory)
    resolved = load_plan(plan, overrides or [])
    found, skipped = looked(resolved, world, machine, limit, top, [_axis(name) for name in keep or ()])
    typer.echo("\n".join(lines(found, skipped, limit)))
    if not found.fastest:
        raise typer.Exit(1)
    if write is not None:
        write.write_text(found.fastest[0].layout.plan(resolved, world).to_toml(), "utf-8")
        typer.echo(f"written to {write}; `train-cli estimate {write}` tells its bytes from its own steps")


def looked(
    plan: Plan, world: int, file: Path, limit: int | None, top: int, keep: Sequence[Axis]
) -> tuple[Fastest, Sequence[str]]:
    """Returns what a search saw, and the plugins that it could not load. Raises SleyError with its place in the plan."""
    from sley_core.search.best_first import search as fastest
    from sley_core.search.choices import choices_of
    from sley_core.search.layouts import layouts
    from sley_core.search.quick import Quick

    choices = choices_of(plan)
    fixed = {*keep, *TOLD_OF}
    try:
        estimator = Quick(plan, world, load_machine(file))
        return fastest(layouts(plan, world, choices, fixed), estimator, memory=limit, top=top), choices.skipped
    except SleyError as error:
        raise plan.located(error) from error.__cause__


def lines(found: Fastest, skipped: Sequence[str], limit: int | None) -> Iterator[str]:
    """Yields what is printed."""
    yield f"{found.num_layouts:,} layouts; {found.num_seen:,} simulated, {found.too_large:,} do not fit"
    yield from (f"  {count:,} cannot be assembled: {code}" for code, count in found.refused.most_common())
    yield from (f"  left out: {name}" for name in skipped)
    if not found.fastest:
        yield _none(found, limit)
        return
    yield "fastest"
    yield from (_told(seen) for seen in found.fastest)
    yield "less memory for more time"
    yield from (_told(seen) for seen in found.front if seen not in found.fastest)


def _told(seen: Seen) -> str:
    return f"  {seen.estimate.seconds:10.4g} s  {shown(seen.estimate.num_bytes):>12}  {seen.layout}"


def _none(found: Fastest, limit: int | None) -> str:
    if found.smallest is None or limit is None:
        return "no layout of this plan can be assembled in this world"
    need = shown(found.smallest.estimate.num_bytes)
    return f"nothing fits into {shown(limit)}: the smallest layout needs {need}, {found.smallest.layout}"


def _axis(name: str) -> Axis:
    for axis in AXES:
        if axis == name:
            return axis
    raise UsageError("no-axis", f"there is no axis `{name}`", hint=f"the axes are {', '.join(AXES)}")
