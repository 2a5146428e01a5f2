"""`train-cli check` reports mistakes in plans, without torch unless `--model` is set. `train-cli env` describes the machine."""

from pathlib import Path
from typing import Annotated

import typer

from sley_core.errors import PlanError, SleyError
from sley_core.plan.check import check_plan, has_tie_handler
from sley_core.plan.load import load_plan
from train_cli.console import NodesOption, PerNodeOption, SetOption, WorldOption, print_line, world_size


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
            help="Also build the model and the optimizer, and call the layers, on meta. Imports torch and runs code that "
            "the plan names. Compares a small copy of `hf.decoder` with transformers.",
        ),
    ] = False,
) -> None:
    """Check the tables, files, sizes and layout of plans. Starts no run and writes no files."""
    world = world_size(world, nodes, per_node)
    errors: list[SleyError] = []
    for path in plans:
        try:
            _check_plan(path, overrides or [], world, model)
        except SleyError as error:
            errors.append(error)
    if errors:
        worst = max(errors, key=lambda error: error.exit_code)
        raise type(worst).from_diagnostics(diagnostic for error in errors for diagnostic in error.diagnostics)
    result = "1 plan is fine" if len(plans) == 1 else f"{len(plans)} plans are fine"
    print_line(result if model else f"{result}; no model was built (use --model)")


def _check_plan(path: Path, overrides: list[str], world: int | None, model: bool) -> None:
    """Prints notes on the plan at `path`. Raises SleyError with its problems. model: whether to build and call the model."""
    plan = load_plan(path, overrides)
    size = plan.world_size(world) if world is None else world
    if problems := check_plan(plan, size):
        raise PlanError.from_diagnostics(problems)
    if model:
        from train_cli.meta_model import check_model

        for note in check_model(plan, size, calls_layers=True):
            print_line(f"{path}: {note}")
    elif plan.parallel.pp > 1 and not has_tie_handler(plan):
        print_line(
            f"{path}: no gradient handler sums weights that stages share; use --model to check whether there are such weights"
        )


def env() -> None:
    """Print versions and devices for a bug report."""
    from train_cli.environment import machine_info

    info = machine_info()
    typer.echo("\n".join(f"{name:{max(map(len, info))}}  {value}" for name, value in info.items()))
