"""`train-cli verify`: trains the plan's layout and one process of the same plan for a few steps, and compares them; with
`--plain` a plain loop takes the steps of the one process.

this process     one process of the plan ──> numbers, gradients, weights of each step, in a temporary folder
its ranks        the plan's layout       ──> each compares its parts ──> findings
this process     findings ──> what agrees, or what differs first

With `--league` it takes plans of its own (`sley_testing.league`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from sley_core.errors import UsageError
from sley_core.plan.load import load_plan
from train_cli.commands.run import check, num_devices
from train_cli.console import Settings
from train_cli.main import module_of
from train_cli.one_process import has_layout
from train_cli.options import FormatOption, OutputFormat, SetOption, WorldOption

STEPS = 3
"""How many steps are compared where `--steps` does not say so."""


def verify(
    context: typer.Context,
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="The plan, a TOML file; none with --league.")] = None,
    overrides: SetOption = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help=f"Optimizer steps to compare; left out, {STEPS}.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="T",
            min=0.0,
            help="The relative error that is allowed; left out, that of the plan's precision and of its handlers' records.",
        ),
    ] = None,
    world: WorldOption = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Compare with a plain PyTorch loop over the same layers, and name the model's habits that need care.",
        ),
    ] = False,
    league: Annotated[
        bool, typer.Option("--league", help="In place of a plan: the field's silent errors, a small plan each.")
    ] = False,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="NAME,...", help="The rows of the league to play; left out, all.")
    ] = None,
    form: FormatOption = OutputFormat.text,
) -> None:
    """Compare a plan's layout with one process of the same plan: loss, gradient norm, every gradient and weight."""
    settings = context.ensure_object(Settings)
    if "RANK" in os.environ:
        raise UsageError("verify-ranks", "`verify` starts its ranks itself", hint="call it without a launcher")
    of_plan = {"a plan": plan, "--set": overrides, "--steps": steps, "--tolerance": tolerance, "--world": world}
    of_plan["--plain"] = plain or None
    module_of("testing", "sley_testing", "`train-cli verify`")
    _check_what(league, [name for name, value in of_plan.items() if value is not None], rows)
    from train_cli import verify as work

    if plan is None:
        raise typer.Exit(work.play_league(rows, form, settings))
    changes, steps = overrides or [], steps or STEPS
    loaded = load_plan(plan, changes)
    size = check(loaded, world or loaded.world(num_devices(loaded)))
    if size == 1 and not has_layout(loaded) and not plain:
        hint = (
            "give `--plain` to compare with a plain loop, or a layout, such as `--set parallel.dp=2`, or `--world 2` where the "
            "plan leaves it open"
        )
        raise UsageError("nothing-to-verify", "the plan trains one process, so there is nothing to compare", hint=hint)
    if steps > loaded.run.steps:
        hint = "give fewer `--steps`, or `--set run.steps=...`"
        raise UsageError("verify-steps", f"the plan has {loaded.run.steps} steps, not {steps}", hint=hint)
    from train_cli.on_meta import check_model

    check_model(loaded, size)
    code = work.verify_plan(plan, changes, loaded, size, steps, tolerance, form, settings, is_plain=plain)
    raise typer.Exit(code)


def _check_what(league: bool, of_plan: list[str], rows: str | None) -> None:
    """Raises UsageError unless the arguments name either a plan or the league. of_plan: the given options that only a plan
    takes.
    """
    ways = "`train-cli verify plan.toml` compares a plan, `train-cli verify --league` the field's silent errors"
    if league and of_plan:
        raise UsageError("verify-what", f"the league has plans of its own: it does not take {of_plan[0]}", hint=ways)
    if not league and rows is not None:
        raise UsageError("verify-what", "`--rows` are those of the league", hint="give `--league` too")
    if not league and "a plan" not in of_plan:
        raise UsageError("verify-what", "there is nothing to verify", hint=ways)
