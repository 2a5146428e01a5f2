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
from sley_core.plan.write import sections
from sley_estimate.commands.estimate import num_bytes, shown, unit_of
from sley_estimate.machine import load_machine
from sley_estimate.search.layouts import AXES
from train_cli.options import PlanArgument, SetOption
from train_cli.progress import draws_line
from train_cli.surroundings import num_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sley_core.plan.plan import Plan
    from sley_estimate.search.find import ExactEstimate, Result, SearchResult

BUDGET_S = 140.0  # default seconds after the ranking in which layouts begin the steps that verify them


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
    from sley_core.plan.check import check_data
    from sley_estimate.search.find import exact_apart, find
    from sley_estimate.search.layouts import Layouts, choices_of
    from sley_estimate.search.roofline import Rough

    limit = None if memory is None else num_bytes(memory)
    resolved = load_plan(plan, overrides or [])
    known = load_machine(machine)
    try:
        # First: a plan that fits no such world ends this at once.
        own = exact_apart(resolved, world, known) if explain else None
        # Such as files that are missing, for which every layout would be left out.
        problems = check_data(resolved.data, resolved.model, evaluates=resolved.evaluation is not None)
        if located := [resolved.diagnostic(each.code, each.message, each.path, each.hint) for each in problems]:
            raise PlanError.many(located)
        choices = choices_of(resolved)
        space = Layouts(resolved, world, choices, keep or ())
        with Progress(console=Console(stderr=True), transient=True, disable=not draws_line(sys.stderr)) as progress:
            task = progress.add_task("ranking all layouts", total=None)

            def tell(done: int, total: int) -> None:
                progress.update(task, description="taking the steps of the best", completed=done, total=total)

            cores = num_cores()
            result = find(space, known, memory=limit, top=top, verify=verify, cores=cores, budget_s=budget, tell=tell)
    except SleyError as error:
        raise resolved.located(error) from error.__cause__
    typer.echo("\n".join(lines(result, choices.skipped, limit)))
    if not result.fastest:
        raise typer.Exit(1)
    best = result.fastest[0]
    if own is not None and not isinstance(best.takes, Rough):
        typer.echo("\n".join(compared(own, best.takes)))
    if write is not None:
        write.write_text(plan_text(resolved, world, best), "utf-8")
        typer.echo(f"written to {write}")


def lines(result: SearchResult, skipped: Sequence[str], limit: int | None) -> Iterator[str]:
    """Yields the result as lines of text. skipped: plugins that could not be loaded. limit: bytes of a device."""
    too_large = "" if limit is None else f"; {result.too_large:,} exceed {shown(limit)}"
    steps = f": the best {result.num_exact:,} by a formula took their own steps" if result.num_exact else ""
    yield f"{result.num_layouts:,} layouts considered{steps}{too_large}"
    if result.not_begun:
        yield f"  {result.not_begun:,} more did not, since the time for it was over: a larger `--budget` takes them too"
    yield from (f"  {count:,} left out: {reason}" for reason, count in result.refused.most_common())
    yield from (f"  left out: {name}" for name in skipped)
    if result.dropped:
        yield f"  {result.dropped:,} that seemed to fit do not, as `estimate` says"
    if not result.fastest:
        if result.smallest is None or limit is None:
            hints = (result.hints.get(reason) for reason, _ in result.refused.most_common())
            hint = next((f" (hint: {hint})" for hint in hints if hint), "")
            yield f"no layout of this plan is left in this world, for the reasons above{hint}"
        else:
            need, smallest = shown(int(result.smallest.takes.num_bytes)), result.smallest.layout
            yield f"nothing fits into {shown(limit)}: the smallest layout found needs {need} or more: {smallest}"
        return
    how = "verified by estimate" if result.num_exact else "rough"
    yield f"fastest ({how})"
    yield from map(_row, result.fastest)
    sources = {source for each in result.fastest for source in getattr(each.takes, "sources", ())}
    if "counted" in sources and len(sources) > 1:
        yield "  Some layers were measured, others are computed from their operators alone: their seconds may be far apart."
        yield "  `calibrate --plan` measures a plan's layers."
    if result.front:
        yield f"less memory for more time ({how})"
        yield from map(_row, result.front)


def _row(result: Result) -> str:
    return f"  {result.takes.seconds:10.4g} s  {shown(int(result.takes.num_bytes)):>12}  {result.layout}"


def compared(own: ExactEstimate, best: ExactEstimate) -> Iterator[str]:
    """Yields the parts of two estimates side by side. own: of the plan as it is."""

    def rows(title: str, one: float, other: float, parts: Mapping[str, float], others: Mapping[str, float]) -> Iterator[str]:
        values = {name: (parts.get(name, 0.0), others.get(name, 0.0)) for name in sorted({*parts, *others})}
        ordered = sorted(values.items(), key=lambda item: -max(item[1]))
        for name, (mine, its) in [(title, (one, other)), *((f"  {name.replace('_', ' ')}", pair) for name, pair in ordered)]:
            yield f"{name:34}{mine:14.4g}{its:14.4g}{its - mine:+14.4g}"

    yield f"{'':34}{'as it is':>14}{'fastest':>14}{'difference':>14}"
    yield from rows("a step, in seconds", own.seconds, best.seconds, own.seconds_parts, best.seconds_parts)
    unit, size = unit_of(max(own.num_bytes, best.num_bytes))
    mine, its = ({name: value / size for name, value in each.bytes_parts.items()} for each in (own, best))
    yield from rows(f"most bytes of a rank, in {unit}", own.num_bytes / size, best.num_bytes / size, mine, its)


def plan_text(plan: Plan, world: int, best: Result) -> str:
    """Returns the plan file of a layout of `plan`, with a comment on every table that the search filled."""
    takes = best.takes
    how = "rough" if not hasattr(takes, "sources") else "verified by estimate"
    head = f"# {world} ranks: {takes.seconds:.4g} s per step, {shown(int(takes.num_bytes))} on the fullest rank, {how}\n"
    layout = best.layout
    choices = {
        "[activations]": layout.activations,
        "[pipeline]": layout.schedule,
        "[weights]": layout.weights,
        "[sequence]": layout.attention,
        "[[gradient_handlers]]": layout.reducer,
        "[[offload]]": layout.offload,
    }
    comments = {header: f"search: {choice}" for header, choice in choices.items() if choice is not None}
    comments["[parallel]"] = f"search: pp = {layout.pp}, sp = {layout.sp}, wp = {layout.wp}; dp follows"
    comments["[batch]"] = f"search: micro_size = {layout.micro_size}"
    texts = []
    for text in sections(layout.plan(plan, world).tables):
        comment = comments.pop(text.split("\n", 1)[0], None)  # of several tables with one header the first gets it
        texts.append(f"# {comment}\n{text}" if comment else text)
    return head + "\n".join(texts)

    return {
        "[parallel]": f"search: pp = {layout.pp}, sp = {layout.sp}, wp = {layout.wp}; dp follows",
        "[batch]": f"search: micro_size = {layout.micro_size}",
        **{header: f"search: {choice}" for header, choice in choices.items() if choice is not None},
    }
