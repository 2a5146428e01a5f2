"""`train-cli run`: trains; starts local ranks where the plan asks for several and no launcher has done so.

no launcher, one rank       in this process
no launcher, several        this process checks everything, makes the run folder, starts the ranks and waits
torchrun, SLURM, ...        this process is a rank; rank 0 makes the run folder and says what is wrong
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from sley_core.errors import EXIT_OK, PlanError, UsageError
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan
from train_cli import console
from train_cli.console import Settings
from train_cli.main import module_of
from train_cli.options import MessageFormat, PlanArgument, SetOption, WorldOption
from train_cli.preflight import RankFaults, refuse_lone_worlds
from train_cli.progress import draws_line, ranks
from train_cli.run_folder import FAULTS, check_run_folder, held_run_folder, is_restart
from train_cli.saved import AUTO, check_given, goes_on, is_again, run_folder
from train_cli.stopping import terminated_s

_BETWEEN_RANKS = frozenset({"rank-died", "rank-hung", "collective-failed", "ranks-differ", "stages-differ"})
"""Codes of faults that the reports of all ranks tell more about."""

ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|PATH",
        help="Resume from a checkpoint: the newest that this run wrote (a run without steps begins), or the one at PATH.",
    ),
]


def run(
    context: typer.Context,
    plan: PlanArgument,
    overrides: SetOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder of an earlier run.")] = False,
    resume: ResumeOption = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="The number of local ranks, where the plan leaves it open."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Take the first steps of each stage on tensors without values, and start nothing: needs no device.",
        ),
    ] = False,
    world: WorldOption = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate first, and put that beside what the run measures, in summary.json too.")
    ] = False,
    machine: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="With --estimate: the seconds of a step on this machine too."),
    ] = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Print lines instead of redrawing one.")] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Show the launch and the counts; -vv: logs of elastic too.")
    ] = 0,
) -> None:
    """Train: in this process, on several local ranks, or as one rank under torchrun."""
    settings = context.ensure_object(Settings)
    changes = overrides or []
    if dry_run:
        _dry_run(load_plan(plan, changes), world or nproc)
        return
    if world is not None:
        raise UsageError("world", "`--world` belongs to `--dry-run`", hint="local ranks are started by `--nproc`")
    refuse_lone_worlds(os.environ)
    if machine is not None and not estimate:
        raise UsageError("machine", "`--machine` belongs to `--estimate`")
    line = draws_line(sys.stderr, wanted=not no_progress)
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if is_rank and nproc is not None:
        raise UsageError("nproc", "`--nproc` is given, but a launcher has started this process already")
    if is_rank and estimate:
        message = "a rank that a launcher has started cannot estimate"
        raise UsageError("estimate", message, hint="use `train-cli estimate`, before")
    if is_rank:
        rank = int(os.environ["RANK"])
        with RankFaults(rank, settings) as faults, ExitStack() as stack:
            start = _start_of(resume, overwrite=overwrite)
            resolved = load_plan(plan, changes)
            check(resolved, int(os.environ["WORLD_SIZE"]))
            _check_given(resolved, start)
            folder = run_folder(resolved)
            if rank == 0:
                stays = goes_on(resolved, resume) or is_restart(folder)
                stack.enter_context(held_run_folder(resolved, overwrite=overwrite, resume=stays))
            from train_cli.rank import train

            faults.has_begun = True
            code = train(resolved, folder, resume=start, line=line, verbose=verbose > 0)
        raise typer.Exit(code)
    resolved = load_plan(plan, changes)
    size = check(resolved, nproc or resolved.world(num_devices(resolved)))
    stays = goes_on(resolved, resume)
    start = _start_of(resume, overwrite=overwrite)
    _check_given(resolved, start)
    check_run_folder(resolved, overwrite=overwrite, resume=stays)
    if sys.stderr.isatty() and settings.message_format is not MessageFormat.json:
        # torch takes seconds to come, in this process and in each rank.
        console.say(f"starting {resolved.run.name} on {ranks(size)}")
    from train_cli.on_meta import check_model

    check_model(resolved, size)
    estimates = module_of("estimate", "sley_estimate.commands.estimate", "`run --estimate`") if estimate else None
    known = estimates.load_machine(machine) if estimates and machine else None
    estimated = estimates.bytes_and_seconds(resolved, size, known) if estimates else None
    with held_run_folder(resolved, overwrite=overwrite, resume=stays) as folder:
        if size > 1:
            arguments = {"path": str(plan), "changes": changes, "resume": start, "line": line, "verbose": verbose > 0}
            code = _launch(arguments, size, folder, settings, resolved, verbose)
        else:
            from train_cli.rank import train

            code = train(resolved, folder, resume=start, line=line, verbose=verbose > 0)
        if estimates and estimated and code == EXIT_OK:
            console.say("\n".join(estimates.compare_with_run(*estimated, folder)))
    raise typer.Exit(code)


def _dry_run(plan: Plan, world: int | None) -> None:
    """Runs every distinct rank up to its first steps, without values and without peers. Raises whatever these steps raise."""
    size = check(plan, plan.world(None) if world is None else world)
    from train_cli.on_meta import check_model

    estimates = module_of("estimate", "sley_estimate.commands.estimate", "`run --dry-run`")

    for note in check_model(plan, size):
        console.say(note)
    largest = max(estimates.bytes_and_seconds(plan, size)[0], key=lambda stage: stage.peak)
    peak = estimates.shown(largest.peak)
    console.say(f"dry run on {ranks(size)}: steps can be taken; the most is {peak}, on stage {largest.stage}")


def _start_of(resume: str | None, *, overwrite: bool) -> str | None:
    """Returns the checkpoint to resume from: as given, or "auto" where torchrun or SLURM has started this run again."""
    if resume and overwrite:
        raise UsageError("resume", "`--resume` goes on with a run and `--overwrite` deletes it")
    return resume or (AUTO if is_again() else None)


def _check_given(plan: Plan, start: str | None) -> None:
    """Raises UsageError "no-checkpoint" if the user has named a checkpoint that is not there. A run that was started again
    resumes from its own checkpoints, and does not need the one at which it began.
    """
    if start is not None and start != AUTO and not is_again():
        check_given(plan, start)


def _launch(arguments: dict[str, Any], size: int, folder: Path, settings: Settings, plan: Plan, verbose: int) -> int:
    """Starts the local ranks, waits for them and shows their failure; returns the exit code."""
    from train_cli.local_launch import launch

    if verbose > 1:
        logging.basicConfig(level=logging.INFO)
    if verbose:
        console.say(f"starting {size} ranks of {arguments['path']}")
    fault = launch(
        "train_cli.rank:train_plan",
        arguments,
        size,
        folder,
        say=console.say,
        terminated_s=terminated_s(plan),
        stop_signals=plan.run.stop_signals,
        verbose=verbose > 1,
    )
    console.show(fault, settings)
    if (folder / FAULTS).exists() and any(each.code in _BETWEEN_RANKS for each in fault.diagnostics):
        console.say(f"what each rank did: train-cli doctor {folder}")
    return fault.exit_code


def check(plan: Plan, size: int) -> int:
    """Returns `size` if `plan` can run on that number of ranks; raises PlanError with all problems."""
    if problems := check_plan(plan, size):
        raise PlanError.many(problems)
    return size


def num_devices(plan: Plan) -> int | None:
    """Returns the number of CUDA devices if the plan leaves the number of ranks to them; None without any."""
    if plan.parallel.dp != "auto" or plan.run.device == "cpu":
        return None
    import torch

    return torch.cuda.device_count() or None
