"""`train-cli check`: every mistake of one or more plans at once, without torch unless the model is to be checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import check_plan, sums_ties
from sley_core.plan.load import load_plan
from train_cli.console import say
from train_cli.options import NodesOption, PerNodeOption, SetOption, WorldOption, given_world


def check(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN...", help="Plans, TOML files.")],
    overrides: SetOption = None,
    world: WorldOption = None,
    nodes: NodesOption = None,
    per_node: PerNodeOption = None,
    model: Annotated[
        bool,
        typer.Option(
            "--model",
            help="Build the model and the optimizer too, and call the layers, without memory: imports torch and whatever code "
            "the plan names, and runs it.",
        ),
    ] = False,
) -> None:
    """Check plans: tables, files, sizes, layout; nothing is started or written."""
    world = given_world(world, nodes, per_node)
    errors: list[SleyError] = []
    for path in plans:
        try:
            _check(path, overrides or [], world, model)
        except SleyError as error:
            errors.append(error)
    if errors:
        worst = max(errors, key=lambda error: error.exit_code)
        raise type(worst).many(found for error in errors for found in error.diagnostics)
    fine = "1 plan is fine" if len(plans) == 1 else f"{len(plans)} plans are fine"
    say(fine if model else f"{fine}; no model was built (--model builds it)")


def _check(path: Path, overrides: list[str], world: int | None, model: bool) -> None:
    """Raises SleyError for the problems of one plan, and prints notes. model: builds and calls the model too."""
    plan = load_plan(path, overrides)
    size = plan.world(world) if world is None else world
    if problems := check_plan(plan, size):
        raise PlanError.many(problems)
    if model:
        from train_cli.model_check import check_model

        for note in check_model(plan, size, calls_layers=True):
            say(f"{path}: {note}")
    elif plan.parallel.pp > 1 and not sums_ties(plan):
        say(f"{path}: no gradient handler sums weights that stages share; only --model sees whether there are any")
