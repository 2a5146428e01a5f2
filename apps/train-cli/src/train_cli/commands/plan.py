"""`train-cli check` reports the mistakes of plans, without torch unless `--model` is set. `train-cli show` prints a resolved
plan with the origin of each value, and its ranks, groups, order of collectives and timeline.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sley_core.actions.action import Kind
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, Timeline, simulate
from sley_core.errors import KeyPath, PlanError, SleyError, UsageError
from sley_core.plan.check import has_tie_handler, require_valid
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan, format_value, iterate_values
from sley_core.records import GradientHandlerRecord
from sley_core.topology import GroupEntry, Topology
from train_cli import console
from train_cli.console import format_count, print_line
from train_cli.main import import_optional


def check(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN_FILE...", help="Plans, TOML files.")],
    overrides: console.SetOption = None,
    world_size: console.WorldOption = None,
    nodes: console.NodesOption = None,
    per_node: console.PerNodeOption = None,
    model: Annotated[
        bool,
        typer.Option(
            "--model",
            help="Also build the model and the optimizer, and call the layers, on meta. Imports torch and runs code that "
            "the plan names. Compares a small copy of `hf.decoder` with transformers.",
        ),
    ] = False,
) -> None:
    """Check the tables, files, sizes and layout of plans. Starts no run and writes no files."""
    world_size = console.resolve_world_size(world_size, nodes, per_node)
    errors: list[SleyError] = []
    for path in plans:
        try:
            for note in _check_plan(path, overrides or [], world_size, calls_model=model):
                print_line(f"{path}: {note}")
        except SleyError as error:
            errors.append(error)
    if errors:
        worst = max(errors, key=lambda error: error.exit_code)
        raise type(worst).from_diagnostics(diagnostic for error in errors for diagnostic in error.diagnostics)
    result = "1 plan is valid" if len(plans) == 1 else f"{len(plans)} plans are valid"
    print_line(result if model else f"{result}; no model was built (use --model)")


def _check_plan(path: Path, overrides: list[str], world_size: int | None, *, calls_model: bool) -> list[str]:
    """Checks a plan, and returns notes. world_size: None for the number in the plan. Raises SleyError with all problems."""
    plan = load_plan(path, overrides)
    world_size = plan.world_size(world_size) if world_size is None else world_size
    require_valid(plan, world_size)
    if calls_model:
        from train_cli.meta_model import check_model

        return check_model(plan, world_size, calls_layers=True)
    if plan.parallel.pp > 1 and not has_tie_handler(plan):
        return ["no gradient handler sums the gradients of weights that stages share; use --model to find such weights"]
    return []


def show(
    plan: console.PlanArgument,
    overrides: console.SetOption = None,
    world_size: console.WorldOption = None,
    nodes: console.NodesOption = None,
    per_node: console.PerNodeOption = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Show one rank and its groups.")] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw the pipeline's step.")] = False,
    machine: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="With --timeline: use times of the machine in FILE, from calibrate."),
    ] = None,
) -> None:
    """Show the resolved plan with the origin of each value, and the groups of ranks."""
    if machine is not None and not timeline:
        raise UsageError("machine-timeline", "`--machine` needs `--timeline`", hint="add `--timeline`")
    world_size = console.resolve_world_size(world_size, nodes, per_node)
    resolved = load_plan(plan, overrides or [])
    topology = resolved.topology(resolved.world_size(world_size) if world_size is None else world_size)
    if rank is not None and rank >= topology.world_size:
        raise PlanError("layout", f"the rank must be from 0 to {topology.world_size - 1}, but is {rank}")
    if machine is not None:
        estimates = import_optional("estimate", "sley_estimate.commands", "`show --timeline --machine`")
        machine_file = estimates.load_machine_with_ranks(machine, per_node)
        lines = estimates.draw_step(resolved, topology.world_size, machine_file)
    elif timeline:
        lines = _format_timeline(resolved, topology)
    else:
        lines = _format_plan(resolved, topology, rank)
    typer.echo("\n".join(lines))


_MAX_RANKS, _MAX_GROUPS = 32, 4  # the maximum numbers of ranks, and of groups of one axis, that `show` lists completely


def _format_plan(plan: Plan, topology: Topology, rank: int | None) -> Iterator[str]:
    """Yields the lines of `show`: the plan with the origin of each value, ranks (or only `rank`), groups and handlers."""
    table: KeyPath = ()
    # Top-level keys come first, since after the header of a table they would belong to that table.
    for path, value in sorted(iterate_values(plan.tables), key=lambda item: len(item[0]) > 1):
        if path[:-1] != table:
            table = path[:-1]
            name = ".".join(part for part in table if isinstance(part, str))
            yield f"\n[[{name}]]" if isinstance(table[-1], int) else f"\n[{name}]"
        yield f"{f'{path[-1]} = {format_value(value)}':44}  # {plan.origin(path)}"
    sizes = ", ".join(f"{name} {getattr(topology, name)}" for name in ("pp", "dp", "sp", "wdp", "wp"))
    yield f"\n# world of {topology.world_size}: {sizes}"
    yield from format_ranks(topology, rank)
    yield "\n# groups, in the order in which all ranks create them"
    yield from format_groups([group for group in topology.groups() if rank is None or rank in group.ranks])
    yield "\n# gradient handlers: this is the order of their collectives on every rank"
    for number, handler in enumerate(plan.gradient_handlers, start=1):
        assert isinstance(handler.record, GradientHandlerRecord), handler
        tolerance = handler.record.tolerance_for(handler.config)
        suffix = f", not exact: within {tolerance:g}" if tolerance else ""
        yield f"{number:4}  {handler.name}  ({handler.record.role}{suffix})"
    if not plan.gradient_handlers:
        yield "  none"


def format_ranks(topology: Topology, rank: int | None) -> Iterator[str]:
    """Yields the lines of a table of the coordinates of `rank` or, if it is None, of all ranks (the first 32 and the last if
    there are more).
    """
    yield "  rank  stage    dp    sp   wdp    wp"
    ranks: Sequence[int] = range(topology.world_size) if rank is None else [rank]
    is_large = len(ranks) > _MAX_RANKS
    for number in (*ranks[:_MAX_RANKS], ranks[-1]) if is_large else ranks:
        place = topology.coordinates(number)
        yield "".join(f"{index:6}" for index in (place.rank, place.stage, place.dp, place.sp, place.wdp, place.wp))
    if is_large:
        yield f"  of {topology.world_size} ranks; --rank N shows another rank"


def format_groups(entries: Sequence[GroupEntry]) -> Iterator[str]:
    """Yields a line for each axis and channel with its groups. If there are more than 4, shows the first two and the last."""
    groups_by_channel: dict[tuple[str, str], list[GroupEntry]] = {}
    for entry in entries:
        groups_by_channel.setdefault((entry.axis, entry.channel), []).append(entry)
    for (axis, channel), groups in groups_by_channel.items():
        name = axis if channel == "main" else f"{axis}.{channel}"
        labels = [group.label for group in groups]
        if len(groups) > _MAX_GROUPS:
            labels = [f"{len(groups)} groups of {len(groups[0].ranks)}: {labels[0]}", labels[1], "...", labels[-1]]
        yield f"  {name:14} {groups[0].backend:7} {'  '.join(labels)}"


def _format_timeline(plan: Plan, topology: Topology) -> Iterator[str]:
    """Yields a title, a drawing of the schedule, in which a backward takes as long as two forwards, and a line for each stage:
    its idle share, and the maximum number of microbatches that it holds. Raises PlanError "no-pipeline" if the plan has no
    pipeline, and the errors of its schedule.
    """
    if plan.pipeline is None:
        hint = 'add [pipeline] with `use = "pp.one_f_one_b"` of sley-pp, and `pp = 2` to [parallel]'
        raise PlanError("no-pipeline", "the plan has no [pipeline], so there is no timeline to draw", hint=hint)
    schedule = plan.pipeline.build()
    num_microbatches = plan.num_microbatches(topology)
    with plan.document.locate_errors():
        placement = schedule.placement(topology.pp)
        lists = lower(schedule.lists(topology.pp, num_microbatches), placement, num_microbatches)
    simulation = simulate(lists, placement, Costs.uniform(placement.num_positions))
    sizes = f"{format_count(topology.pp, 'stage')}, {format_count(num_microbatches, 'microbatch', 'es')}"
    yield f"# {plan.pipeline.name}: {sizes}; F, I and W take one unit of time each, B two"
    yield draw_timeline(simulation.timeline)
    for stage, peak in enumerate(simulation.peaks):
        idle = simulation.timeline.idle_share(stage)
        yield f"  stage {stage}: idle {idle:.1%}, holds at most {format_count(peak.pairs, 'microbatch', 'es')} of a chunk"


# The character that fills the time of an action in a drawing, and the action's name in the legend.
_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.INPUT_GRADIENT: "=", Kind.WEIGHT_GRADIENT: "~", Kind.CHUNK_DONE: " "}
_NAMES = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT_GRADIENT: "I input gradients",
    Kind.WEIGHT_GRADIENT: "W weight gradients",
}
_COLUMNS_PER_ACTION = 3
"""The number of columns of the shortest action, if the width allows it: a label of two characters, and the fill."""

_OMISSION = " / "  # the text that replaces the middle of a step that is longer than the width


def draw_timeline(timeline: Timeline, num_columns: int | None = None) -> str:
    """Returns a drawing of `timeline` with a legend. num_columns: the width; None uses the terminal's width, or else 110.

        stage 0  F0-F1-F2-F3-.........B0====B1====B2====B3====
        stage 1  ...F0-F1-F2-......B0====F3-B1====B2====B3====...

    The text of an action begins with its letter and its microbatch, if both fit. Dots mark idle time. Lowercase letters stand
    for all chunks except the first. If the step is longer than the width, its middle is omitted.
    """
    num_columns = shutil.get_terminal_size((110, 24)).columns if num_columns is None else num_columns
    stages = range(timeline.stages)
    notes = [f"  {timeline.idle_share(stage):4.0%} idle" for stage in stages]
    indent = len(f"stage {timeline.stages - 1}  ")
    max_columns = max(16, num_columns - indent - max(map(len, notes)))
    scale = _columns_per_second(timeline, max_columns)
    lines = [f"{f'stage {stage}':{indent}}{_draw_row(timeline, stage, scale, max_columns)}{notes[stage]}" for stage in stages]
    kinds = {span.action.kind for span in timeline.spans}
    legend = [name for kind, name in _NAMES.items() if kind in kinds]
    if last_chunk := max((span.action.chunk for span in timeline.spans), default=0):
        legend.append("lowercase letters are chunk 1" if last_chunk == 1 else f"lowercase letters are chunks 1 to {last_chunk}")
    lines += [", ".join(legend)] if legend else []
    if (columns := round(timeline.makespan_s * scale)) > max_columns:
        num_hidden = columns - max_columns + len(_OMISSION)
        lines.append(f"/: {num_hidden} of {columns} columns are hidden; use a wider terminal to see more")
    return "\n".join(lines) + "\n"


def _columns_per_second(timeline: Timeline, max_columns: int) -> float:
    """Returns the number of columns that a drawing needs per second of `timeline`; 0 if all actions take no time. With this
    scale, the drawing may be wider than `max_columns`. The shortest action gets an integer number of columns if it gets at
    least one, so that actions of the same length have the same width.
    """
    lengths = [span.end_s - span.start_s for span in timeline.spans if span.end_s > span.start_s]
    if not lengths:
        return 0.0
    columns = min(_COLUMNS_PER_ACTION, max_columns * min(lengths) / timeline.makespan_s)
    if columns < 1 and min(lengths) >= max(lengths) / 10:
        columns = 1
    return (int(columns) if columns >= 1 else columns) / min(lengths)


def _draw_row(timeline: Timeline, stage: int, scale: float, max_columns: int) -> str:
    """Returns the drawing of one stage, with its middle omitted if it exceeds `max_columns`. scale: columns per second."""
    cells = ["."] * round(timeline.makespan_s * scale)
    for span in timeline.stage_spans(stage):
        first, end = round(span.start_s * scale), round(span.end_s * scale)
        letter = span.action.kind.value if span.action.chunk == 0 else span.action.kind.value.lower()
        text, length = f"{letter}{span.action.micro}", end - first
        cells[first:end] = letter * length if length < len(text) else text.ljust(length, _FILL[span.action.kind])
    if (num_hidden := len(cells) - max_columns) > 0:
        start = (max_columns - len(_OMISSION) + 1) // 2
        cells[start : start + num_hidden + len(_OMISSION)] = _OMISSION
    return "".join(cells)
