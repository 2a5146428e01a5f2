"""Implements `train-cli search`, which finds the fastest layouts of a plan that fit in memory, without a device."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from sley_core.errors import PlanError, SleyError, UsageError
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan, plan_sections
from sley_estimate.commands.estimate import parse_size
from sley_estimate.machine import load_machine
from sley_estimate.search.layouts import AXES
from train_cli.console import PlanArgument, SetOption, can_redraw, format_bytes
from train_cli.environment import num_cores

if TYPE_CHECKING:
    from sley_estimate.search.find import SearchResult, VerifiedLayout


def search(
    plan: PlanArgument,
    world: Annotated[int, typer.Option("--world", min=1, metavar="RANKS", help="The number of ranks.")],
    machine: Annotated[
        Path | None, typer.Option("--machine", metavar="FILE", help="The machine file of `calibrate` (required).")
    ] = None,
    overrides: SetOption = None,
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
    """Find the fastest layouts of a plan that fit, with the installed plugins. Needs no device."""
    if machine is None:
        hint = "use `train-cli calibrate --out machine.toml --plan PLAN`, then pass `--machine machine.toml`"
        raise UsageError("search-machine", "a search needs a machine file", hint=hint)
    from sley_core.plan.check import check_data
    from sley_estimate.search.find import search_layouts
    from sley_estimate.search.layouts import Layouts, list_choices

    limit = None if memory is None else parse_size(memory)
    resolved = load_plan(plan, overrides or [])
    machine_file = load_machine(machine)
    try:
        # Reports faults such as missing files first, since they would exclude every layout.
        problems = check_data(resolved.data, resolved.model, evaluates=resolved.evaluation is not None)
        if located := [resolved.diagnostic(problem.code, problem.message, problem.path, problem.hint) for problem in problems]:
            raise PlanError.from_diagnostics(located)
        choices = list_choices(resolved)
        space = Layouts(resolved, world, choices, keep_axes or ())
        with Progress(console=Console(stderr=True), transient=True, disable=not can_redraw(sys.stderr)) as progress:
            task = progress.add_task("ranking all layouts", total=None)

            def report_progress(done: int, total: int) -> None:
                progress.update(task, description="running the steps of the best", completed=done, total=total)

            cores = num_cores()
            result = search_layouts(space, machine_file, max_bytes=limit, top=top, cores=cores, report_progress=report_progress)
    except SleyError as error:
        raise resolved.add_places(error) from error.__cause__
    typer.echo("\n".join(result_lines(result, choices.skip_reasons, limit)))
    if not result.fastest_layouts:
        raise typer.Exit(1)
    if write is not None:
        write.write_text(plan_text(resolved, world, result.fastest_layouts[0]), "utf-8")
        typer.echo(f"written to {write}")


def result_lines(result: "SearchResult", skip_reasons: Sequence[str], limit: int | None) -> Iterator[str]:
    """Yields the lines about the result of a search. skip_reasons: as in `Choices`. limit: the bytes of a device, or None."""
    too_large = "" if limit is None else f"; {result.num_too_large:,} exceed {format_bytes(limit)}"
    yield f"{result.num_layouts:,} layouts considered; the best {result.num_verified:,} of the formula were verified{too_large}"
    yield from (f"  {count:,} excluded: {reason}" for reason, count in result.refusals.most_common())
    yield from (f"  excluded: {name}" for name in skip_reasons)
    if result.num_dropped:
        yield f"  {result.num_dropped:,} fit by the formula, but not by `estimate`"
    if not result.fastest_layouts:
        if result.smallest_layout is None or limit is None:
            yield "no layout of this plan is possible in this world, for the reasons above"
        else:
            smallest = f"the smallest layout needs at least {format_bytes(result.min_bytes)}: {result.smallest_layout}"
            yield f"no layout fits in {format_bytes(limit)}: {smallest}"
        return
    yield "fastest (verified by estimate)"
    for fast in result.fastest_layouts:
        yield f"  {fast.seconds:10.4g} s  {format_bytes(fast.num_bytes):>12}  {fast.layout}"
    sources = {source for fast in result.fastest_layouts for source in fast.sources}
    if "counted" in sources and len(sources) > 1:
        yield "  Some layers were measured, others are computed from their operators: their seconds may not be comparable."
        yield "  Use `calibrate --plan` to measure the layers of the plan."


def plan_text(plan: Plan, world_size: int, best: "VerifiedLayout") -> str:
    """Returns a plan file with the layout `best` of `plan`, whose first comment describes the layout and its estimate."""
    size = format_bytes(best.num_bytes)
    head = f"# {world_size} ranks: {best.seconds:.4g} s per step, {size} at the peak of a rank, verified by estimate\n"
    return f"{head}# {best.layout}\n" + "\n".join(plan_sections(best.layout.apply(plan, world_size).tables))
