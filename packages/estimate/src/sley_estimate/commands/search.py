"""`train-cli search`: the fastest layouts of a plan that fit, before a device is touched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from sley_core.errors import PlanError, SleyError, UsageError
from sley_core.plan.load import load_plan
from sley_estimate.commands.estimate import num_bytes
from sley_estimate.machine.notes import notes_on
from sley_estimate.machine.read import load_machine
from sley_estimate.search.layouts import AXES, Axis
from train_cli.options import PlanArgument, SetOption
from train_cli.progress import draws_line
from train_cli.surroundings import num_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sley_core.plan.plan import Plan
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.search.find import ExactEstimate, SearchFound

BUDGET_S = 150.0
"""Seconds after the ranking in which layouts begin the steps that verify them, unless the user says otherwise."""


def search(
    plan: PlanArgument,
    world: Annotated[int, typer.Option("--world", min=1, metavar="RANKS", help="How many ranks there are.")],
    machine: Annotated[
        Path | None, typer.Option("--machine", metavar="FILE", help="The machine, as `calibrate` wrote it; needed.")
    ] = None,
    overrides: SetOption = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="What a device has, such as 80GiB; else no limit.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="How many layouts to show.")] = 5,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="AXIS", help=f"Stays as the plan has it; may be repeated: {', '.join(AXES)}."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--rough", help="Whether `estimate` verifies the layouts that are shown.")
    ] = True,
    budget: Annotated[
        float, typer.Option("--budget", min=0, metavar="SECONDS", help="How long `estimate` may begin to verify layouts.")
    ] = BUDGET_S,
    explain: Annotated[
        bool, typer.Option("--explain", help="Compare the fastest with the plan as it is, part by part.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the plan in the fastest layout here.")
    ] = None,
) -> None:
    """Find the fastest layouts of a plan that fit, from what is installed; no device is needed."""
    if machine is None:
        hint = "`train-cli calibrate --out machine.toml --plan PLAN` measures one; then `--machine machine.toml`"
        raise UsageError("search-machine", "a search needs to know what the machine's devices and links reach", hint=hint)
    if explain and not verify:
        raise UsageError("explain-needs-steps", "`--explain` compares what `estimate` says, which `--rough` leaves out")
    from sley_estimate.commands.found import compared, lines, written
    from sley_estimate.search.roofline import Rough

    limit = None if memory is None else num_bytes(memory)
    resolved = load_plan(plan, overrides or [])
    known = load_machine(machine)
    # Before the search: a plan that fits no such world as it is ends this at once, and nothing that was found is lost.
    own = _as_it_is(resolved, world, known) if explain else None
    kept = [_axis(name) for name in keep or ()]
    found, skipped = _found(resolved, world, known, limit, top, kept, budget, verify=verify)
    typer.echo("\n".join(lines(found, skipped, limit, notes_on(known, world))))
    if not found.fastest:
        raise typer.Exit(1)
    best = found.fastest[0]
    if own is not None and not isinstance(best.takes, Rough):
        typer.echo("\n".join(compared(own, best.takes)))
    if write is not None:
        write.write_text(written(resolved, world, best), "utf-8")
        typer.echo(f"written to {write}")


def _found(
    plan: Plan,
    world: int,
    machine: MachineFile,
    limit: int | None,
    top: int,
    keep: Sequence[Axis],
    budget_s: float,
    *,
    verify: bool,
) -> tuple[SearchFound, Sequence[str]]:
    """Returns what a search found, and the plugins that it could not load. Raises SleyError with its place in the plan."""
    from sley_core.plan.check import check_data
    from sley_estimate.search.choices import choices_of
    from sley_estimate.search.find import find
    from sley_estimate.search.layouts import Layouts

    # Such as files that are not there, which every layout would be left out for.
    wrong = check_data(plan.data, plan.model, evaluates=plan.evaluation is not None)
    if problems := [plan.diagnostic(one.code, one.message, one.path, one.hint) for one in wrong]:
        raise PlanError.many(problems)
    choices = choices_of(plan)
    try:
        space = Layouts(plan, world, choices, keep)
        with Progress(console=Console(stderr=True), transient=True, disable=not draws_line(sys.stderr)) as progress:
            task = progress.add_task("ranking all layouts", total=None)

            def tell(done: int, total: int) -> None:
                progress.update(task, description="taking the steps of the best", completed=done, total=total)

            found = find(space, machine, memory=limit, top=top, verify=verify, cores=num_cores(), budget_s=budget_s, tell=tell)
        return found, choices.skipped
    except SleyError as error:
        raise plan.located(error) from error.__cause__


def _as_it_is(plan: Plan, world: int, machine: MachineFile) -> ExactEstimate:
    """Returns the estimate of the plan as it is. Raises SleyError with its place in the plan, as `estimate` does."""
    from sley_estimate.search.find import exact_apart

    try:
        return exact_apart(plan, world, machine)
    except SleyError as error:
        raise plan.located(error) from error.__cause__


def _axis(name: str) -> Axis:
    """Returns the axis called `name`; raises UsageError "no-axis" if there is none."""
    for axis in AXES:
        if axis == name:
            return axis
    raise UsageError("no-axis", f"there is no axis `{name}`", hint=f"the axes are {', '.join(AXES)}")
