"""`train-cli show`: prints the resolved plan with the origin of each value, the ranks, groups and order of collectives."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sley_core.actions.action import Kind
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, Timeline, simulate
from sley_core.errors import KeyPath, PlanError, UsageError
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan, format_value, iterate_values
from sley_core.records import GradientHandlerRecord
from sley_core.topology import GroupEntry, Topology
from train_cli.console import NodesOption, PerNodeOption, PlanArgument, SetOption, WorldOption, format_count, world_size
from train_cli.main import import_optional

WIDTH = 110
"""The number of columns of a timeline if stdout is not a terminal."""

_ORIGIN_COLUMN = 44
"""The column in which the origins of values begin."""

_MAX_RANKS = 32
"""The maximum number of ranks to list."""

_MAX_GROUPS = 4
"""The maximum number of groups of an axis to list."""


def show(
    plan: PlanArgument,
    overrides: SetOption = None,
    world: WorldOption = None,
    nodes: NodesOption = None,
    per_node: PerNodeOption = None,
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
    world = world_size(world, nodes, per_node)
    resolved = load_plan(plan, overrides or [])
    topology = resolved.topology(resolved.world_size(world) if world is None else world)
    if rank is not None and rank >= topology.world_size:
        raise PlanError("layout", f"the rank must be from 0 to {topology.world_size - 1}, but is {rank}")
    if timeline and machine is not None:
        estimates = import_optional("estimate", "sley_estimate.commands.estimate", "`show --timeline --machine`")
        machine_file = estimates.load_machine_with_ranks(machine, per_node)
        lines = estimates.draw_step(resolved, topology.world_size, machine_file)
    elif timeline:
        lines = _timeline_lines(resolved, topology)
    else:
        lines = _plan_lines(resolved, topology, rank)
    typer.echo("\n".join(lines))


def _plan_lines(plan: Plan, topology: Topology, rank: int | None) -> Iterator[str]:
    """Yields the plan as TOML with the origin of each value as a comment, the ranks, the groups and the gradient handlers."""
    table: KeyPath = ()
    # Top-level keys come first: after a header they would belong to that table.
    for path, value in sorted(iterate_values(plan.tables), key=lambda item: len(item[0]) > 1):
        if path[:-1] != table:
            table = path[:-1]
            name = ".".join(part for part in table if isinstance(part, str))
            yield f"\n[[{name}]]" if isinstance(table[-1], int) else f"\n[{name}]"
        yield f"{f'{path[-1]} = {format_value(value)}':{_ORIGIN_COLUMN}}  # {plan.origin(path)}"
    sizes = ", ".join(f"{name} {getattr(topology, name)}" for name in ("pp", "dp", "sp", "wdp", "wp"))
    yield f"\n# world of {topology.world_size}: {sizes}"
    yield from rank_lines(topology, rank)
    yield "\n# groups, in the order in which all ranks make them"
    yield from group_lines([group for group in topology.groups() if rank is None or rank in group.ranks])
    yield "\n# gradient handlers: this is the order of their collectives on every rank"
    for number, handler in enumerate(plan.gradient_handlers, start=1):
        assert isinstance(handler.record, GradientHandlerRecord), handler
        tolerance = handler.record.tolerance_for(handler.config)
        suffix = f", not exact: within {tolerance:g}" if tolerance else ""
        yield f"{number:4}  {handler.name}  ({handler.record.role}{suffix})"
    if not plan.gradient_handlers:
        yield "  none"


def rank_lines(topology: Topology, rank: int | None) -> Iterator[str]:
    """Yields a table of the coordinates of all ranks, or of `rank`. Of more than 32 ranks, lists the first 32 and the last."""
    yield "  rank  stage    dp    sp   wdp    wp"
    is_large = rank is None and topology.world_size > _MAX_RANKS
    last = topology.world_size - 1
    for number in (rank,) if rank is not None else (*range(_MAX_RANKS), last) if is_large else range(topology.world_size):
        place = topology.coordinates(number)
        yield "".join(f"{index:6}" for index in (place.rank, place.stage, place.dp, place.sp, place.wdp, place.wp))
    if is_large:
        yield f"  of {topology.world_size} ranks; --rank N shows another rank"


def group_lines(entries: Sequence[GroupEntry]) -> Iterator[str]:
    """Yields a line per axis and channel with its groups, in the order of `entries`. Of more than `_MAX_GROUPS` groups, lists
    the first two and the last.
    """
    groups_by_channel: dict[tuple[str, str], list[GroupEntry]] = {}
    for entry in entries:
        groups_by_channel.setdefault((entry.axis, entry.channel), []).append(entry)
    for (axis, channel), groups in groups_by_channel.items():
        name = axis if channel == "main" else f"{axis}.{channel}"
        text = "  ".join(group.label for group in groups[:_MAX_GROUPS])
        if len(groups) > _MAX_GROUPS:
            first, second, last = groups[0], groups[1], groups[-1]
            text = f"{len(groups)} groups of {len(first.ranks)}: {first.label}  {second.label}  ...  {last.label}"
        yield f"  {name:14} {groups[0].backend:7} {text}"


def _timeline_lines(plan: Plan, topology: Topology) -> Iterator[str]:
    """Yields a drawing of the schedule, and each stage's idle share and peak. A full backward takes as long as two forwards.

    Raises PlanError "no-pipeline" if the plan has no pipeline, and the errors of its schedule.
    """
    if plan.pipeline is None:
        hint = 'add [pipeline] with `use = "pp.one_f_one_b"` of sley-pp, and `pp = 2` to [parallel]'
        raise PlanError("no-pipeline", "the plan has no [pipeline], so there is no timeline to draw", hint=hint)
    schedule = plan.pipeline.build()
    num_microbatches = plan.num_microbatches(topology)
    try:
        placement = schedule.placement(topology.pp)
        lists = lower(schedule.lists(topology.pp, num_microbatches), placement, num_microbatches)
    except PlanError as error:
        raise plan.add_places(error) from None
    simulation = simulate(lists, placement, Costs.uniform(placement.num_positions))
    sizes = f"{format_count(topology.pp, 'stage')}, {format_count(num_microbatches, 'microbatch', 'es')}"
    yield f"# {plan.pipeline.name}: {sizes}; F, I and W take one unit of time each, B two"
    yield draw_text(simulation.timeline, shutil.get_terminal_size((WIDTH, 24)).columns)
    for stage, peak in enumerate(simulation.peaks):
        idle = simulation.timeline.idle_share(stage)
        yield f"  stage {stage}: idle {idle:.1%}, holds at most {format_count(peak.pairs, 'microbatch', 'es')} of a chunk"


_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.INPUT_GRADIENT: "=", Kind.WEIGHT_GRADIENT: "~", Kind.CHUNK_DONE: " "}
_NAMES = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT_GRADIENT: "I input gradients",
    Kind.WEIGHT_GRADIENT: "W weight gradients",
}
_COLUMNS_PER_ACTION = 3
"""The number of columns of the shortest action, if the width allows it: room for a label of two characters."""

_OMISSION = " / "
"""The text that replaces the middle of a step that is longer than the width."""


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """Returns a timeline as text for a terminal of `width` columns, with a legend.

        stage 0  F0-F1-F2-F3-.........B0====B1====B2====B3====
        stage 1  ...F0-F1-F2-......B0====F3-B1====B2====B3====...

    Every stage is a row, and time goes to the right. An action begins with its letter and its microbatch, if they fit, and
    fills its time. Dots are time in which no action runs. Small letters stand for all chunks but the first. The middle of a
    step that is longer than the width is omitted.
    """
    stages = range(timeline.stages)
    notes = [f"  {timeline.idle_share(stage):4.0%} idle" for stage in stages]
    indent = len(f"stage {timeline.stages - 1}  ")
    max_columns = max(16, width - indent - max(map(len, notes)))
    scale = _columns_per_second(timeline, max_columns)
    rows = [_draw_row(timeline, stage, scale, max_columns) for stage in stages]
    lines = [f"{f'stage {stage}':{indent}}{rows[stage]}{notes[stage]}" for stage in stages]
    kinds = {span.action.kind for span in timeline.spans}
    legend = [name for kind, name in _NAMES.items() if kind in kinds]
    if last_chunk := max((span.action.chunk for span in timeline.spans), default=0):
        legend.append("small letters are chunk 1" if last_chunk == 1 else f"small letters are chunks 1 to {last_chunk}")
    lines += [", ".join(legend)] if legend else []
    if (columns := round(timeline.makespan_s * scale)) > max_columns:
        num_hidden = columns - max_columns + len(_OMISSION)
        lines.append(f"/: {num_hidden} of {columns} columns are hidden; use a wider terminal to see more")
    return "\n".join(lines) + "\n"


def _columns_per_second(timeline: Timeline, max_columns: int) -> float:
    """Returns the number of columns per second. The drawing may be wider than `max_columns`.

    The shortest action gets an integer number of columns if it gets at least one, so that equal actions look equal.
    """
    lengths = [span.end_s - span.start_s for span in timeline.spans if span.end_s > span.start_s]
    if not lengths:
        return 0.0
    columns = min(_COLUMNS_PER_ACTION, max_columns * min(lengths) / timeline.makespan_s)
    if columns < 1 and min(lengths) >= max(lengths) / 10:
        columns = 1
    return (int(columns) if columns >= 1 else columns) / min(lengths)


def _draw_row(timeline: Timeline, stage: int, scale: float, max_columns: int) -> str:
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
