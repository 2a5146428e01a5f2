"""Runs one rank of a run, from joining the world to the last line, in every process, however it was started."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sley_core.assemble import assemble
from sley_core.attempt import WEIGHTS
from sley_core.comm.world import World
from sley_core.errors import EXIT_OK, EXIT_RUN_FAILED, SleyError
from sley_core.json_text import write_whole
from train_cli import failure_file, lifeline
from train_cli.console import say
from train_cli.faults import Fault
from train_cli.preflight import meet, thread_note
from train_cli.progress import Reporter, closing, opening, repeats
from train_cli.recorder import recorder
from train_cli.resume import AUTO, is_finished, load
from train_cli.resume import totals as done
from train_cli.run_files import keep_files
from train_cli.run_folder import write_plan
from train_cli.start_record import write_start
from train_cli.stopping import Stopping, terminated_s
from train_cli.summary import NAME as SUMMARY
from train_cli.summary import RunFacts, RunTotals, summary, write_summary
from train_cli.surroundings import num_cores
from train_cli.timeline_svg import PICTURE, draw_svg

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.run import Outcome, Run


def train(plan: Plan, folder: Path, *, resume: str | None = None, line: bool, verbose: bool = False) -> int:
    """Joins the world, trains and leaves; blocks until the run has ended. Returns the exit code, or raises the error.

    resume: from which checkpoint to go on; None begins at the first step. line: whether rank 0 redraws one line of progress.
    verbose: whether it prints the counts of the run's parts at the end.
    """

    def work(run: Run, stopping: Stopping) -> None:
        if resume == AUTO and is_finished(run, folder):
            _tell_done(run, folder, folder / WEIGHTS if (folder / WEIGHTS).is_dir() else None)
            return
        run.notes.extend(load(run, folder, resume))
        with recorder().working(run.parts, run.feed, folder, run.notes):
            _train(run, folder, stopping, resume=resume, line=line, verbose=verbose)

    return on_rank(plan, folder, work, writes=True)


def on_rank(plan: Plan, folder: Path, work: Callable[[Run, Stopping], None], *, writes: bool = False) -> int:
    """Joins the world, assembles the run, calls `work` and leaves. Returns the exit code, or raises the error.

    folder: gets the report of what this rank did, if it fails; and, if `writes`, all that the plan's run writes. work: tells
    `stopping` when signals are to stop the run.
    """
    gc.freeze()  # the modules: to look through them takes half a second, each time
    gc.enable()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > num_cores():
        torch.set_num_threads(num_cores())  # torch counts the machine's, though a container may have the time of fewer
    with ExitStack() as stack:
        # A launcher that is ours has told the user already, and asks why a rank does not end.
        joined: list[World] = []
        late = partial(_late, folder, joined)
        stopping = stack.enter_context(
            Stopping(None if lifeline.is_held() else say, late, terminated_s(plan), plan.run.stop_signals)
        )
        try:
            timeout_s = plan.limits.start_timeout_s
            world = stack.enter_context(World.join(plan.run.device, timeout_s=timeout_s, meeting=meet(plan)))
            joined.append(world)
            run = stack.enter_context(assemble(plan, world, folder=folder if writes else None))
            work(run, stopping)
        except Exception as error:
            if isinstance(error, SleyError):
                plan.located(error)
            # Before anything is torn down: that may hang, and the launcher needs the first reason.
            fault = Fault.of(error)
            failure_file.write(fault)
            stopping.tearing_down(fault.exit_code)
            if joined and fault.exit_code == EXIT_RUN_FAILED:  # a plan that is refused needs no report of what ranks did
                recorder().failed(folder, joined[0], fault.diagnostics[0], error)
            raise
        code = stopping.exit_code
        if code is not None:
            stopping.tearing_down(code)
    return EXIT_OK if code is None else code


def _late(folder: Path, joined: list[World]) -> None:
    """Reports, to the launcher and in the run's folder, that this rank was asked to end and cannot. joined: the world, once
    there is one.
    """
    found = failure_file.write_late()
    for world in joined:
        recorder().stuck(folder, world, found)


def _train(run: Run, folder: Path, stopping: Stopping, *, resume: str | None, line: bool, verbose: bool) -> None:
    """Runs the training; on rank 0 also writes plan and summary, and shows progress."""
    if run.num_steps_done >= run.plan.run.steps:  # all ranks have loaded one checkpoint
        _tell_done(run, folder, _keep_weights(run, folder))
        return
    if run.plan.run.final_weights != "none":
        run.check_weights_folder(folder / WEIGHTS)  # rather than when all steps are taken
    if run.world.rank != 0:
        stopping.working(run.stop)
        run.train()
        _keep_weights(run, folder)
        return
    (folder / SUMMARY).unlink(missing_ok=True)  # of an earlier end: the run has not finished now
    # The plan now has what only the data could tell.
    resolved = run.resolved_plan
    write_plan(resolved, folder)
    keep_files(resolved, folder)
    write_start(folder, resolved, names_gpus=run.world.device.torch_device.type == "cuda")
    if note := thread_note(os.environ, is_cpu=run.world.device.type == "cpu"):
        run.notes.append(note)
    tell: AbstractContextManager[list[Callable[[Any], None]]] = nullcontext([])
    if "KUBEFLOW_TRAINER_SERVER_URL" in os.environ:
        from train_cli.trainjob_status import refusal, status_server

        if note := refusal(os.environ):
            run.notes.append(note)
        tell = status_server(os.environ, run.plan.run.steps)
    if run.held_out is not None and (note := repeats(run.held_out.num_samples, run.plan)):
        run.notes.append(note)
    totals = done(run, folder, resume)
    run.readers.append(totals.add)
    outcome: Outcome = "failed"
    reporter = Reporter(run.plan.run.steps, run.plan.run.log_every, line=line, notes=run.notes)
    try:
        say("\n".join((opening(_facts(run), run.plan, _memory(run)), *run.notes)))
        with reporter, tell as readers:
            run.readers += [reporter, *readers]
            stopping.working(run.stop)
            outcome = run.train()
    except BaseException:
        with suppress(OSError):  # what ended the run is worth more than why its summary cannot be written
            _summarize(run, folder, outcome, totals, reporter)
        raise
    content = _summarize(run, folder, outcome, totals, reporter)
    weights = _keep_weights(run, folder)  # after the summary, which a full disk may still have room for
    say(closing(content, folder, weights, verbose=verbose))


def _tell_done(run: Run, folder: Path, weights: Path | None) -> None:
    """Shows where the results are of a run whose steps were all taken before."""
    if run.world.rank == 0:
        where = f"; its weights are in {weights}" if weights else ""
        say(f"nothing is left to do: all {run.plan.run.steps} steps are taken{where}; `--set run.steps=...` takes more")


def _keep_weights(run: Run, folder: Path) -> Path | None:
    """Saves the final weights in the run's folder, and returns where; None if the plan wants none, or no step was taken."""
    precision = run.plan.run.final_weights
    if precision == "none" or run.num_steps_done == 0:
        return None
    run.save_weights(folder / WEIGHTS, precision=precision)
    return folder / WEIGHTS


def _summarize(run: Run, folder: Path, outcome: Outcome, totals: RunTotals, reporter: Reporter) -> dict[str, Any]:
    """Writes `summary.json`, unless no step was done, and the picture of the recorded step; returns the summary's content."""
    notes = [*reporter.new_notes, *([reporter.lost] if reporter.lost else [])]
    content = summary(_facts(run), outcome, totals, run.counts, run.memory.bytes, notes)
    if totals.steps:
        write_summary(folder, content)
    if run.outputs.timeline is not None and run.outputs.timeline.drawn:
        write_whole(folder / PICTURE, draw_svg(run.outputs.timeline.drawn))
    return content


def _memory(run: Run) -> dict[str, int]:
    """Returns the bytes that this rank holds, with the gradients that the first step will allocate."""
    held = run.memory.bytes
    due = sum(param.numel for param in run.registry.trainable) * run.store.dtype.itemsize
    return {**held, "gradients": max(held["gradients"], due)}


def _facts(run: Run) -> RunFacts:
    """Returns the facts of the run for its summary."""
    plan = run.plan
    plugins = {name: f"{plugin.dist} {plugin.version}" for name, plugin in plan.plugins.items()}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    samples = run.feed.num_samples if run.feed is not None else None
    tokens = run.dataset.info.sequence if run.samples.meter.unit == "tokens" else None
    return RunFacts(
        plan.run.name,
        str(run.world.device),
        run.world.size,
        plugins,
        versions,
        run.facts.num_parameters,
        run.facts.num_trained,
        plan.batch.global_size,
        samples,
        tokens,
    )
