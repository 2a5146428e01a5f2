"""`train-cli show`: what a plan resolves to and where each value came from; ranks, groups, order of collectives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sley_core.errors import KeyPath, PlanError, UsageError, dotted
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan
from sley_core.plan.write import leaves
from sley_core.records import GradientHandlerRecord
from sley_core.topology import GroupEntry, Topology
from train_cli.layout_text import group_lines, rank_lines, sizes
from train_cli.lazy import module_of
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

_COLUMN = 44
"""Where the origins begin."""


def show(
    plan: PlanArgument,
    overrides: SetOption = None,
    world: WorldOption = None,
    nodes: NodesOption = None,
    per_node: PerNodeOption = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Show one rank and its groups.")
    ] = None,
    form: FormatOption = OutputFormat.text,
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw the pipeline's step instead.")] = False,
    machine: Annotated[
        Path | None,
        typer.Option(
            "--machine", metavar="FILE", help="With --timeline: in seconds of this machine, as calibrate wrote it."
        ),
    ] = None,
) -> None:
    """Show the resolved plan with the origin of each value, and who talks to whom."""
    if machine is not None and not timeline:
        raise UsageError("machine-timeline", "`--machine` gives the drawing its seconds", hint="add `--timeline`")
    world = given_world(world, nodes, per_node)
    resolved = load_plan(plan, overrides or [])
    topology = resolved.topology(resolved.world(world) if world is None else world)
    if rank is not None and rank >= topology.world:
        raise PlanError("layout", f"there is no rank {rank}: the ranks are 0 to {topology.world - 1}")
    if timeline and machine is not None:
        seconds = module_of("estimate", "sley_estimate.commands.seconds", "`show --timeline --machine`")
        known = seconds.machine_of(machine, per_node)
        typer.echo("\n".join(seconds.estimated(resolved, topology.world, known)))
    elif timeline:
        from train_cli.timeline import timeline as drawn

        typer.echo("\n".join(drawn(resolved, topology)))
    elif form is OutputFormat.json:
        typer.echo(json.dumps(_data(resolved, topology, rank), indent=2))
    else:
        typer.echo("\n".join(_text(resolved, topology, rank)))


def _data(plan: Plan, topology: Topology, rank: int | None) -> dict[str, Any]:
    """Returns everything that `show` prints, for JSON."""
    return {
        "plan": [
            {"path": dotted(path), "value": value, "origin": _origin_data(plan, path)}
            for path, value in leaves(plan.tables)
        ],
        "digest": plan.digest,
        "world": topology.world,
        "ranks": [asdict(topology.coordinates(each)) for each in _ranks(topology, rank)],
        "groups": [
            {"axis": each.axis, "lane": each.lane, "backend": each.backend, "ranks": list(each.ranks)}
            for each in _groups(topology, rank)
        ],
        "gradient_handlers": list(_handlers(plan)),
        "canonical_sums": _canonical(plan, topology),
    }


def _canonical(plan: Plan, topology: Topology) -> str | None:
    """Returns as text what canonical sums cost, found by making the model without memory; None for a plan without them."""
    if plan.parallel.reduction != "canonical":
        return None
    from train_cli.model_check import canonical_cost

    return canonical_cost(plan, topology.world)


def _handlers(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yields the gradient handlers. tolerance: relative error allowed to the exact sum; 0 for exact ones."""
    for each in plan.gradient_handlers:
        assert isinstance(each.record, GradientHandlerRecord), each
        tolerance = each.record.tolerance_with(each.config)
        yield {"name": each.name, "role": each.record.role, "tolerance": tolerance}


def _origin_data(plan: Plan, path: KeyPath) -> dict[str, Any]:
    """Returns kind and place of the origin of one value."""
    origin = plan.origins[path]
    place = origin.place
    return {
        "kind": origin.kind,
        "file": place.file if place else None,
        "line": place.line or None if place else None,
        "column": place.column or None if place else None,
        "named_by": origin.named_by,
    }


def _ranks(topology: Topology, rank: int | None) -> Iterable[int]:
    return range(topology.world) if rank is None else (rank,)


def _groups(topology: Topology, rank: int | None) -> Iterator[GroupEntry]:
    return (each for each in topology.groups() if rank is None or rank in each.ranks)


def _text(plan: Plan, topology: Topology, rank: int | None) -> Iterator[str]:
    """Yields the lines of `show`."""
    yield from _values(plan)
    yield ""
    yield f"# world of {topology.world}: {sizes(topology)}"
    yield from rank_lines(topology, rank)
    yield ""
    yield "# groups, in the order in which all ranks make them"
    yield from group_lines(list(_groups(topology, rank)))
    yield ""
    yield "# gradient handlers: this is the order of their collectives on every rank"
    for number, handler in enumerate(_handlers(plan), start=1):
        how = (
            f"{handler['role']}, not exact: within {handler['tolerance']:g}"
            if handler["tolerance"]
            else handler["role"]
        )
        yield f"{number:4}  {handler['name']}  ({how})"
    if not plan.gradient_handlers:
        yield "  none"
    if (cost := _canonical(plan, topology)) is not None:
        yield ""
        yield f"# {cost}"


def _values(plan: Plan) -> Iterator[str]:
    """Yields the plan as TOML that can be run, with the origin of each value as a comment."""
    table: KeyPath = ()
    # Keys of the plan itself come first: after a table's header they would be that table's.
    for path, value in sorted(leaves(plan.tables), key=lambda leaf: len(leaf[0]) > 1):
        if path[:-1] != table:
            table = path[:-1]
            yield ""
            yield _header(table)
        yield f"{f'{path[-1]} = {_toml(value)}':{_COLUMN}}  # {plan.origins[path]}"


def _toml(value: Any) -> str:
    """Returns a value as TOML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    import tomli_w

    return tomli_w.dumps({"value": value}).partition("=")[2].strip() if value != {} else "{}"


def _header(path: KeyPath) -> str:
    name = ".".join(str(part) for part in path if isinstance(part, str))
    return f"[[{name}]]" if isinstance(path[-1], int) else f"[{name}]"
