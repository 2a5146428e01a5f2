"""`train-cli run` trains a plan. `train-cli verify` trains it for a few steps, and compares its layout with one process.

`run` starts local ranks if the plan needs several ranks and no launcher has started them:

    no launcher, one rank       trains in this process
    no launcher, several ranks  checks everything, creates the run folder, starts the ranks and waits for them
    torchrun, SLURM, ...        this process is a rank; rank 0 creates the run folder and reports errors

`verify` compares the results with sley-testing:

    this process     trains the plan in one process ──> losses, gradients, weights of each step, in a temporary folder
    its ranks        train the plan's layout        ──> each rank compares its tensors ──> findings
    this process     prints the findings: agreement, or the first difference
"""

import gc
import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from sley_core.errors import EXIT_OK, EXIT_RUN_FAILED, UsageError
from sley_core.plan.check import require_valid
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan
from train_cli import console, saved_run
from train_cli.console import print_fault, print_line
from train_cli.faults import RankErrorReporter
from train_cli.main import import_optional
from train_cli.run_folder import FAULTS, check_run_folder, is_folder_of_restarted_run, locked_run_folder
from train_cli.stopping import sigterm_timeout_s

_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "task", "RANK=$SLURM_PROCID, LOCAL_RANK=$SLURM_LOCALID, WORLD_SIZE=$SLURM_NTASKS"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "process", "RANK=$OMPI_COMM_WORLD_RANK, ..., WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"),
    "PET_NNODES": ("the TrainJob", "pod", "nothing: its command must be `torchrun -m train_cli run PLAN`"),
}
"""The name of each launcher, the word that it uses for a process, and the variables that a process needs. The keys are the
environment variables in which the launchers set the number of processes.
"""

_CODES_WITH_REPORTS = {"rank-died", "rank-hung", "collective-failed", "ranks-differ", "stages-differ"}
"""The error codes of failures about which `train-cli doctor` prints details."""


def run(
    context: typer.Context,
    plan: console.PlanArgument,
    overrides: console.SetOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder of an earlier run.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="auto|PATH",
            help="Resume from a checkpoint: from the newest checkpoint of this run (auto; starts the run if it has taken no "
            "step), or from the checkpoint at PATH.",
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="The number of local ranks, if the plan does not set it.")
    ] = None,
) -> None:
    """Train: in this process, on several local ranks, or as one rank under torchrun."""
    settings = context.ensure_object(console.Settings)
    overrides = overrides or []
    check_launcher_variables(os.environ)
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if is_rank and nproc is not None:
        raise UsageError("nproc", "`--nproc` cannot be used with a launcher, which has already started the ranks")
    with ExitStack() as stack:
        if is_rank:
            reporter = RankErrorReporter(int(os.environ["RANK"]), lambda fault: print_fault(fault, settings))
            stack.enter_context(reporter)
        if resume and overwrite:
            raise UsageError("resume", "`--resume` continues a run, but `--overwrite` deletes it", hint="remove one of them")
        is_restarted = saved_run.is_restarted()
        start = resume or (saved_run.RESTART if is_restarted else None)
        resolved = load_plan(plan, overrides)
        size = int(os.environ["WORLD_SIZE"]) if is_rank else nproc or resolved.world_size(count_devices(resolved))
        require_valid(resolved, size)
        if start is not None and start != saved_run.AUTO and not is_restarted:  # else it resumes from its own checkpoints
            saved_run.check_checkpoint_path(resolved, start)
        folder = saved_run.run_folder(resolved)
        keeps_files = saved_run.is_folder_continued(resolved, resume) or is_folder_of_restarted_run(folder)
        if not is_rank:
            check_run_folder(resolved, overwrite=overwrite, resume=keeps_files)
            if sys.stderr.isatty():
                # Importing torch takes seconds, in this process and in each rank.
                print_line(f"starting {resolved.run.name} on {console.format_count(size, 'rank')}")
            from train_cli.meta_model import check_model

            check_model(resolved, size)
        if not is_rank or os.environ["RANK"] == "0":
            stack.enter_context(locked_run_folder(resolved, overwrite=overwrite, resume=keeps_files))
        if not is_rank and size > 1:
            from train_cli.local_launch import launch

            arguments = {"path": str(plan), "overrides": overrides, "resume": start}
            limit_s, signals = sigterm_timeout_s(resolved), resolved.run.stop_signals
            target = "train_cli.rank:train_plan"
            fault = launch(target, arguments, size, folder, sigterm_timeout_s=limit_s, stop_signals=signals)
            print_fault(fault, settings)
            if (folder / FAULTS).exists() and any(problem.code in _CODES_WITH_REPORTS for problem in fault.diagnostics):
                print_line(f"use `train-cli doctor {folder}` to see the state of each rank")
            code = fault.exit_code
        else:
            from train_cli.rank import train

            if is_rank:
                reporter.is_training = True
            code = train(resolved, folder, resume=start)
    raise typer.Exit(code)


def check_launcher_variables(environ: Mapping[str, str]) -> None:
    """Raises UsageError "no-ranks" if only one of RANK and WORLD_SIZE is set (except for WORLD_SIZE = 1), or if a launcher has
    started more processes than WORLD_SIZE. In the second case, each process would be a separate run, and only one process could
    use the run folder. environ: the environment variables of this process.
    """
    if ("RANK" in environ) != ("WORLD_SIZE" in environ) and environ.get("WORLD_SIZE") != "1":
        name, missing_name = ("RANK", "WORLD_SIZE") if "RANK" in environ else ("WORLD_SIZE", "RANK")
        hint = "set both, and LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as launchers do; if there is no launcher, unset both"
        raise UsageError("no-ranks", f"{name} is set, but {missing_name} is not", hint=hint)
    world_size = int(environ["WORLD_SIZE"]) if environ.get("WORLD_SIZE", "").isdecimal() else 0
    for variable, (launcher, process, required_variables) in _LAUNCHERS.items():
        num_started = environ.get(variable, "1").partition(":")[0]
        if num_started.isdecimal() and int(num_started) > max(1, world_size):
            problem = f"WORLD_SIZE is {world_size}" if world_size else "RANK and WORLD_SIZE are not set"
            processes = f"{num_started} {process}{'es' if process.endswith('s') else 's'}"
            raise UsageError(
                "no-ranks",
                f"{launcher} has started {processes}, but {problem}",
                hint=f"use a script like those in examples/launch; each {process} needs {required_variables}, and MASTER_ADDR "
                f"and MASTER_PORT; if each {process} is a separate run, unset {variable}",
            )


def count_devices(plan: Plan) -> int | None:
    """Returns the number of CUDA devices, or None if there are none or if the plan does not take one rank per device."""
    if plan.parallel.dp != "auto" or plan.run.device == "cpu":
        return None
    import torch

    return torch.cuda.device_count() or None


def verify(
    context: typer.Context,
    plan: console.PlanArgument,
    overrides: console.SetOption = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="The optimizer steps to compare.")] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="T",
            min=0.0,
            help="The allowed relative error; by default, it depends on the plan's precision and gradient handlers.",
        ),
    ] = None,
    world_size: console.WorldOption = None,
    output_format: console.FormatOption = console.OutputFormat.text,
) -> None:
    """Compare a plan's layout with a single-process run of the same plan: loss, gradient norm, every gradient and weight."""
    settings = context.ensure_object(console.Settings)
    if "RANK" in os.environ:
        raise UsageError("verify-ranks", "`verify` starts its own ranks", hint="run it without a launcher")
    import_optional("testing", "sley_testing", "`train-cli verify`")
    overrides = overrides or []
    resolved = load_plan(plan, overrides)
    world_size = world_size or resolved.world_size(count_devices(resolved))
    require_valid(resolved, world_size)
    if world_size == 1 and not saved_run.has_layout(resolved):
        hint = "use a layout such as `--set parallel.dp=2`, or `--world 2` if the plan does not set the number of ranks"
        raise UsageError("nothing-to-verify", "the plan has one process, so there is nothing to compare", hint=hint)
    if steps > resolved.run.steps:
        hint = "use fewer `--steps`, or `--set run.steps=N`"
        raise UsageError("verify-steps", f"the plan has {resolved.run.steps} steps, not {steps}", hint=hint)
    from train_cli.meta_model import check_model

    check_model(resolved, world_size)
    from sley_testing import verify as comparison

    arguments = {"path": str(plan), "overrides": overrides, "steps": steps}
    ranks_findings = _compare_with_one_process(resolved, world_size, arguments, settings)
    allowed = comparison.compute_limits(resolved, tolerance)
    if output_format is console.OutputFormat.json:
        typer.echo(json.dumps(comparison.findings_to_json(ranks_findings, allowed, steps), indent=2))
    else:
        typer.echo("\n".join(comparison.report_lines(ranks_findings, allowed, steps)))
    is_idle = comparison.is_every_step_skipped(ranks_findings, steps)
    if is_idle:
        print_line("no step updated the weights, so no weight was compared; use more `--steps`")
    raise typer.Exit(EXIT_RUN_FAILED if is_idle or comparison.find_differences(ranks_findings, allowed) else EXIT_OK)


def _compare_with_one_process(plan: Plan, world_size: int, arguments: dict[str, Any], settings: console.Settings) -> list[Any]:
    """Trains `plan` in one process and then on `world_size` ranks, and returns the findings of each rank's comparison.
    arguments: the arguments of `compare_on_rank` except the folder. Raises typer.Exit if one of the runs does not finish, and
    UsageError "verify-dropout" if the ranks would draw different random numbers from those of one process.
    """
    import torch

    from sley_testing.verify import check_all_compared, find_dropout_modules, read_findings, save_reference
    from train_cli.local_launch import launch
    from train_cli.rank import open_run

    with TemporaryDirectory(prefix="sley-verify-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with open_run(saved_run.one_process_plan(plan), folder) as (run, signal_handler):
            if plan.parallel.sp > 1 and (layers := find_dropout_modules(run)):
                reason = f"`{layers[0]}` draws different random numbers for each slice"
                message = f"with sp > 1, a model with dropout cannot be compared with one process, since {reason}"
                raise UsageError("verify-dropout", message, hint="remove the dropout or `sp` to verify the plan")
            signal_handler.call_on_signal(run.stop)
            save_reference(run, arguments["steps"], folder)
        if signal_handler.exit_code is not None:
            raise typer.Exit(signal_handler.exit_code)
        del run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the ranks need the memory that torch caches in this process
        target, limit_s = f"{__name__}:compare_on_rank", sigterm_timeout_s(plan)
        fault = launch(target, {**arguments, "folder": name}, world_size, folder, sigterm_timeout_s=limit_s)
        print_fault(fault, settings)
        if fault.exit_code != EXIT_OK:
            raise typer.Exit(fault.exit_code)
        ranks_findings = read_findings(folder, world_size)
        check_all_compared(ranks_findings, folder)
        return ranks_findings


def compare_on_rank(path: str, overrides: list[str], steps: int, folder: str) -> int:
    """Takes `steps` steps as one rank of a plan, compares them with the reference in `folder`, and returns the exit code."""
    from sley_testing.verify import compare_steps
    from train_cli.rank import open_run

    with open_run(saved_run.read_only_plan(load_plan(Path(path), overrides)), Path(folder)) as (run, signal_handler):
        signal_handler.call_on_signal(run.stop)
        compare_steps(run, steps, Path(folder))
    return signal_handler.exit_code or EXIT_OK
