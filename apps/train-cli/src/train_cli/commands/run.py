"""`train-cli run`: trains a plan. Starts local ranks if the plan needs several and no launcher has started them.

no launcher, one rank       trains in this process
no launcher, several ranks  checks everything, makes the run folder, starts the ranks and waits for them
torchrun, SLURM, ...        this process is a rank; rank 0 makes the run folder and reports errors
"""

import os
import sys
from contextlib import ExitStack
from typing import Annotated

import typer

from sley_core.errors import PlanError, UsageError
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan
from train_cli.console import PlanArgument, SetOption, Settings, format_count, print_fault, print_line
from train_cli.preflight import RankErrorReporter, check_launcher_variables
from train_cli.run_folder import FAULTS, check_run_folder, is_folder_of_restarted_run, locked_run_folder
from train_cli.saved import AUTO, RESTART, check_checkpoint_path, is_folder_continued, is_restarted, run_folder
from train_cli.stopping import sigterm_timeout_s

ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|PATH",
        help="Resume from a checkpoint: auto is the newest of this run, or none if it has taken no step; PATH is a checkpoint.",
    ),
]


def run(
    context: typer.Context,
    plan: PlanArgument,
    overrides: SetOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder of an earlier run.")] = False,
    resume: ResumeOption = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="The number of local ranks, if the plan does not set it.")
    ] = None,
) -> None:
    """Train: in this process, on several local ranks, or as one rank under torchrun."""
    settings = context.ensure_object(Settings)
    changes = overrides or []
    check_launcher_variables(os.environ)
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if is_rank and nproc is not None:
        raise UsageError("nproc", "`--nproc` cannot be used with a launcher, which has already started the ranks")
    with ExitStack() as stack:
        reporter = stack.enter_context(RankErrorReporter(int(os.environ["RANK"]), settings)) if is_rank else None
        if resume and overwrite:
            raise UsageError("resume", "`--resume` continues a run, but `--overwrite` deletes it", hint="remove one of them")
        start = resume or (RESTART if is_restarted() else None)
        resolved = load_plan(plan, changes)
        size = int(os.environ["WORLD_SIZE"]) if is_rank else nproc or resolved.world_size(num_devices(resolved))
        check_world_size(resolved, size)
        if start is not None and start != AUTO and not is_restarted():  # a restarted run resumes from its own checkpoints
            check_checkpoint_path(resolved, start)
        folder = run_folder(resolved)
        keeps_folder = is_folder_continued(resolved, resume) or is_folder_of_restarted_run(folder)
        if not is_rank:
            check_run_folder(resolved, overwrite=overwrite, resume=keeps_folder)
            if sys.stderr.isatty():
                # Importing torch takes seconds, in this process and in each rank.
                print_line(f"starting {resolved.run.name} on {format_count(size, 'rank')}")
            from train_cli.meta_model import check_model

            check_model(resolved, size)
        if not is_rank or os.environ["RANK"] == "0":
            stack.enter_context(locked_run_folder(resolved, overwrite=overwrite, resume=keeps_folder))
        if not is_rank and size > 1:
            from train_cli.local_launch import launch

            arguments = {"path": str(plan), "changes": changes, "resume": start}
            limit_s, signals = sigterm_timeout_s(resolved), resolved.run.stop_signals
            target = "train_cli.rank:train_plan"
            fault = launch(target, arguments, size, folder, sigterm_timeout_s=limit_s, stop_signals=signals)
            print_fault(fault, settings)
            codes_with_reports = {"rank-died", "rank-hung", "collective-failed", "ranks-differ", "stages-differ"}
            if (folder / FAULTS).exists() and any(problem.code in codes_with_reports for problem in fault.diagnostics):
                print_line(f"use `train-cli doctor {folder}` to see the state of each rank")
            code = fault.exit_code
        else:
            from train_cli.rank import train

            if reporter is not None:
                reporter.is_training = True
            code = train(resolved, folder, resume=start)
    raise typer.Exit(code)


def check_world_size(plan: Plan, world_size: int) -> int:
    """Returns `world_size` if `plan` can run on that many ranks, else raises PlanError with all problems."""
    if problems := check_plan(plan, world_size):
        raise PlanError.from_diagnostics(problems)
    return world_size


def num_devices(plan: Plan) -> int | None:
    """Returns the number of CUDA devices if it determines the number of ranks. Else, or if there are none, returns None."""
    if plan.parallel.dp != "auto" or plan.run.device == "cpu":
        return None
    import torch

    return torch.cuda.device_count() or None
