"""Runs one rank: joins the world, trains, saves the final weights and writes the summary."""

import gc
import json
import math
import os
import platform
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from sley_core.comm.world import World
from sley_core.engine.call import count_graphs, recompile_reasons
from sley_core.errors import EXIT_OK, EXIT_RUN_FAILED, SleyError
from sley_core.files import WEIGHTS_FOLDER
from sley_core.json_text import write_json
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan
from sley_core.run_folder import read_rows
from sley_trainer.assemble import assemble
from sley_trainer.run import Outcome, Run
from train_cli import console
from train_cli.console import print_line
from train_cli.environment import num_cores, write_start_record
from train_cli.faults import Fault, RankErrorReporter, has_remote_peers, report_hang, write_error_file
from train_cli.main import run_to_exit_code
from train_cli.run_folder import load_recorder, write_plan
from train_cli.saved_run import AUTO, RESTART, SUMMARY, copy_run_files, is_finished, resume_run, run_folder
from train_cli.stopping import SignalHandler, has_launcher, sigterm_timeout_s


def main(target: str, arguments: str) -> int:
    """Calls `target` ("module:function") with `arguments`, a JSON object, as one local rank, and returns its exit code."""
    module, _, name = target.partition(":")

    def call_target() -> int:
        with RankErrorReporter(int(os.environ["RANK"])):
            code: int = getattr(import_module(module), name)(**json.loads(arguments))
            return code

    return run_to_exit_code(call_target)


def train_plan(path: str, overrides: Sequence[str], resume: str | None) -> int:
    """Trains the plan at `path` as a rank of a local launch. Returns the exit code. resume: the value of `--resume` or None."""
    plan = load_plan(Path(path), overrides)
    return train(plan, run_folder(plan), resume=resume)


def train(plan: Plan, folder: Path, *, resume: str | None = None) -> int:
    """Joins the world, trains until the run ends, and returns the exit code. All ranks must call it. folder: the run folder.
    resume: the path of the checkpoint from which to continue, `AUTO` or `RESTART`; None starts at step 1.
    """
    with open_run(plan, folder, writes=True) as (run, signal_handler):
        if resume in (AUTO, RESTART) and is_finished(run, folder):
            _print_finished(run, folder / WEIGHTS_FOLDER if (folder / WEIGHTS_FOLDER).is_dir() else None)
            return signal_handler.exit_code or EXIT_OK
        run.notes.extend(resume_run(run, folder, resume))
        with load_recorder().record_steps(run.parts, run.feed, folder, run.notes):
            if run.num_steps_done >= plan.run.steps or run.stopped_early:  # the same on all ranks, which loaded one checkpoint
                _print_finished(run, _save_final_weights(run, folder))
                return signal_handler.exit_code or EXIT_OK
            if plan.run.final_weights != "none":
                run.check_weights_folder(folder / WEIGHTS_FOLDER)  # fails now rather than after the last step
            totals = RunTotals()
            reporter = _start_reporter(run, folder, totals, resume) if run.world.rank == 0 else None
            try:
                with reporter or nullcontext():
                    signal_handler.call_on_signal(run.stop)
                    outcome: Outcome = run.train()
            except BaseException:
                if reporter is not None:
                    with suppress(OSError):  # the run's error matters more than that of its summary
                        _write_summary(run, folder, "failed", totals, reporter.new_notes)
                raise
            summary = _write_summary(run, folder, outcome, totals, reporter.new_notes) if reporter is not None else None
            weights = _save_final_weights(run, folder)  # after the summary, for which a full disk may still have room
            if summary is not None:
                print_line(console.format_summary(summary, folder, weights))
    return signal_handler.exit_code or EXIT_OK


@contextmanager
def open_run(plan: Plan, folder: Path, *, writes: bool = False) -> Iterator[tuple[Run, SignalHandler]]:
    """Joins the world, and assembles the run of `plan` for the block. All ranks must call it. Yields the run and the handler of
    signals. folder: the folder in which this rank reports a failure. writes: whether the run also writes its other files there.
    """
    gc.freeze()  # else each collection would search all modules, which takes half a second
    gc.enable()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > num_cores():
        torch.set_num_threads(num_cores())  # torch counts all cores of the machine, even if a container may use fewer
    worlds: list[World] = []

    def report_timeout() -> None:
        """Reports to the launcher, and in the run folder, where this rank hangs after a signal."""
        diagnostic = report_hang()
        for world in worlds:
            load_recorder().report_hang(folder, world, diagnostic)

    with ExitStack() as stack:
        print_function = None if has_launcher() else print_line  # a local launcher prints such lines itself
        handler = SignalHandler(print_function, report_timeout, sigterm_timeout_s(plan), plan.run.stop_signals)
        signal_handler = stack.enter_context(handler)
        try:
            rendezvous, timeout_s = None, plan.limits.start_timeout_s
            if has_remote_peers():
                from train_cli.rendezvous import open_rendezvous

                rendezvous = open_rendezvous(plan)
            world = World.join(plan.run.device, timeout_s=timeout_s, rendezvous=rendezvous)
            worlds.append(stack.enter_context(world))
            yield stack.enter_context(assemble(plan, world, folder=folder if writes else None)), signal_handler
        except Exception as error:
            if isinstance(error, SleyError):
                plan.add_locations(error)
            # The error is written before the cleanup, which may hang, since the launcher needs the first error.
            fault = Fault.from_error(error)
            write_error_file(fault)
            signal_handler.limit_cleanup(fault.exit_code)
            if worlds and fault.exit_code == EXIT_RUN_FAILED:  # a refused plan needs no report of ranks
                load_recorder().report_failure(folder, worlds[0], fault.diagnostics[0], error)
            raise
        if signal_handler.exit_code is not None:
            signal_handler.limit_cleanup(signal_handler.exit_code)


def _start_reporter(run: Run, folder: Path, totals: "RunTotals", resume: str | None) -> console.ProgressReporter:
    """Writes the plan and the start record, prints the header, adds `totals` and a new reporter to `run.readers`, and returns
    the reporter. If `resume` is not None, `totals` also includes the rows of earlier attempts.
    """
    (folder / SUMMARY).unlink(missing_ok=True)  # left by an earlier attempt
    resolved = run.resolved_plan  # also has the values that the data determine
    write_plan(resolved, folder)
    copy_run_files(resolved, folder)
    write_start_record(folder, resolved, include_gpus=run.world.device.torch_device.type == "cuda")
    if run.held_out is not None and (note := console.describe_repetition(run.held_out.num_samples, run.plan)):
        run.notes.append(note)
    for row in read_rows(folder) if resume else ():
        totals.add(row)
    gradients = sum(param.numel for param in run.registry.trainable) * run.store.dtype.itemsize  # allocated in the first step
    num_bytes = {**run.memory.bytes, "gradients": max(run.memory.bytes["gradients"], gradients)}
    reporter = console.ProgressReporter(run.plan.run.steps, run.plan.run.log_every, run.notes)
    print_line("\n".join((console.format_header(run, num_bytes), *run.notes)))
    if run.plan.model.config.compile:
        run.readers.append(make_compile_reader(run.notes))
    run.readers += [totals.add, reporter]
    return reporter


def make_compile_reader(notes: list[str]) -> Callable[[Mapping[str, float]], None]:
    """Returns a function to which each metrics row of a compiled run is passed. It adds notes to `notes`: on the number of
    graphs that the first step compiled, and on each step after the third that compiled again.
    """
    num_steps = 0
    known_ids: set[str] = set()

    def read_row(row: Mapping[str, float]) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 1:
            notes.append(f"the first step compiled {count_graphs()} graphs, in {console.format_duration(row['seconds'])}")
        reasons = recompile_reasons()
        new_reasons = [reason for compile_id, reason in reasons.items() if compile_id not in known_ids]
        known_ids.update(reasons)
        if num_steps > 3 and new_reasons:
            notes.append(f"step {row['step']:.0f} compiled again, since a guard failed: {'; '.join(new_reasons)}")

    return read_row


def _print_finished(run: Run, weights: Path | None) -> None:
    """Prints on rank 0 that the run has already finished. weights: the folder of its final weights, or None."""
    if run.world.rank == 0:
        location = f"; the weights are in {weights}" if weights else ""
        message, key = f"the run has finished all {run.plan.run.steps} steps", "run.steps"
        if run.stopped_early:
            message, key = f"the run has ended early: {run.stopped_early}", "evaluation.patience"
        print_line(f"{message}{location}; use `--set {key}=N` for more")


def _save_final_weights(run: Run, folder: Path) -> Path | None:
    """Saves the final weights, and returns their folder, or None if there are none to save. All ranks must call it."""
    precision = run.plan.run.final_weights
    if precision == "none" or run.num_steps_done == 0:
        return None
    run.save_weights(folder / WEIGHTS_FOLDER, precision=precision)
    return folder / WEIGHTS_FOLDER


def _write_summary(run: Run, folder: Path, outcome: str, totals: "RunTotals", notes: list[str]) -> dict[str, Any]:
    """Returns the summary of the run, and writes it to `summary.json` if the run has taken a step."""
    summary = summarize_run(run, outcome, totals, notes)
    if totals.num_steps:
        write_json(folder / SUMMARY, summary)
    return summary


@dataclass
class RunTotals:
    """The totals of a run's metrics rows. seconds: the sum of the step times. tflop, mfu_seconds: the sums of `tflops` and
    `mfu` times the step time. memory_mb: the peak in MiB. evaluation: the last finite metrics. losses: the last `NUM_AVERAGED`
    finite losses.
    """

    num_steps: int = 0
    num_skipped: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    tflop: float = 0.0
    mfu_seconds: float = 0.0
    first_step_s: float | None = None
    held_out_loss: float | None = None
    memory_mb: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=console.NUM_AVERAGED))

    def add(self, row: console.Row) -> None:
        """Adds the row of one step. Ignores values that are not finite, which are None in a row that was read from a file: for
        example the loss of a skipped step, or a metric to which no sample contributes.
        """
        row = {name: value for name, value in row.items() if value is not None and math.isfinite(value)}
        self.num_steps += 1
        self.num_skipped += int(row.get("skipped", 0))
        self.tokens += int(row.get("tokens", 0))  # absent for data without tokens
        self.trained_tokens += int(row.get("trained_tokens", 0))
        self.seconds += row["seconds"]
        self.tflop += row.get("tflops", 0.0) * row["seconds"]
        self.mfu_seconds += row.get("mfu", 0.0) * row["seconds"]
        self.first_step_s = row["seconds"] if self.first_step_s is None else self.first_step_s
        self.held_out_loss = row.get("held_out_loss", self.held_out_loss)
        self.memory_mb = row.get("memory_mb", self.memory_mb)
        if "loss" in row:
            self.losses.append(row["loss"])
        self.evaluation |= {name: value for name, value in row.items() if name.startswith(console.EVALUATION_PREFIX)}


def summarize_run(run: Run, outcome: str, totals: RunTotals, notes: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the content of `summary.json`.

    run: rank 0's run. outcome: `"finished"`, `"interrupted"` or `"failed"`. notes: problems that did not end the run.

    A loss is None if no step or evaluation has produced one. `evaluation` has the other metrics of evaluations, and `best` the
    best result by `keep_best`. `tokens_per_s`, `samples_per_s`, `tflops` (of one device) and `mfu` are means over all steps, or
    None if they are unknown. `memory_mb` is the peak in MiB, as in the rows.
    """
    plan, best, losses = run.plan, run.best, list(totals.losses)
    num_samples = totals.num_steps * plan.batch.global_size

    def per_second(amount: float) -> float | None:
        return amount / totals.seconds if amount and totals.seconds > 0 else None

    return {
        "name": plan.run.name,
        "outcome": outcome,
        "steps": totals.num_steps,
        "skipped_steps": totals.num_skipped,
        "final_loss": losses[-1] if losses else None,
        f"mean_loss_last_{console.NUM_AVERAGED}": sum(losses) / len(losses) if losses else None,
        "held_out_loss": totals.held_out_loss,
        "evaluation": dict(totals.evaluation),
        "best": None if best is None else {"metric": best.table.metric, "value": best.value, "step": best.step},
        "stopped_early": run.stopped_early or None,
        "tokens": totals.tokens,
        "trained_tokens": totals.trained_tokens,
        "seconds": totals.seconds,
        "first_step_s": totals.first_step_s,
        "tokens_per_s": per_second(totals.tokens),
        "samples": num_samples,
        "samples_per_s": per_second(num_samples),
        "tflops": per_second(totals.tflop),
        "mfu": per_second(totals.mfu_seconds),
        "epochs": console.count_epochs(run, totals.num_steps),
        "parameters": run.num_parameters,
        "trained_parameters": run.num_trained,
        "memory_bytes": dict(run.memory.bytes),
        "memory_mb": totals.memory_mb,
        "world": run.world.size,
        "device": str(run.world.device),
        "plugins": {name: f"{plugin.dist} {plugin.version}" for name, plugin in plan.plugins.items()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "counts": {name: dict(values) for name, values in run.counts.items()},
        "notes": list(notes),
    }
