"""Defines the tests that every scheduler hook and every metrics writer must pass, for a plugin's tests to inherit.

    class TestWatch(SchedulerHookContract):
        hook = {"use": "watch.outputs"}

    class TestCsv(MetricsWriterContract):
        writer = {"use": "csv.writer"}

        def read(self, folder):
            return [(step, name, value), ...]

For a hook, two ranks train a small decoder in several microbatches, recompute half of its layers, and evaluate it, with and
without the hook. The tests of a writer run in this process.
"""

import gc
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sley_core.comm.world import World
from sley_core.engine.parts import MicroStep, Phase
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import MetricsWriter, RewindableWriter
from sley_testing.collectives import assert_same_sequence, assert_untouched, record_built_models
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import RunRecord, assert_same_runs, fail_once, read_counts, record
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

NUM_STEPS = 3  # optimizer steps per run
FAILING_STEP = 1  # the index, counted from 0, of the step before which an extra step fails

PLAN = small_plan(  # the plan of the runs with and without the hook
    run__steps=NUM_STEPS,
    parallel={"dp": 2},
    evaluation={"every": 2, "steps": 1},
    activations={"use": "core.recompute", "fraction": 0.5},
)


@dataclass
class RankObservation:
    """Holds one rank's results. recorded: the record of the run. graph_tensors: descriptions of the live tensors with an
    autograd graph, after each step except the last. counts: the hook's counts after each step except the last.
    """

    recorded: RunRecord = field(default_factory=RunRecord)
    graph_tensors: list[list[str]] = field(default_factory=list)
    counts: list[dict[str, float]] = field(default_factory=list)


def observe(hooks: Sequence[Tables], folder: Path, *, fails: bool = False) -> RankObservation:
    """Takes NUM_STEPS steps on this rank and returns the results. Raises AssertionError if the closed run has changed a module
    or parameter. fails: whether a step that raises in its first backward precedes step FAILING_STEP.
    """
    observation = RankObservation()

    def inspect(run: Run, num_steps_done: int) -> None:
        if num_steps_done > 0:
            gc.collect()
            tensors = [tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor and tensor.grad_fn is not None]
            observation.graph_tensors.append(
                [f"{tuple(tensor.shape)} of {type(tensor.grad_fn).__name__}" for tensor in tensors]
            )
            observation.counts += [read_counts(hook) for hook in run.stepper.executor.hooks]
        if fails and num_steps_done == FAILING_STEP:
            fail_once(run)

    tables = changed(PLAN, scheduler_hooks=list(hooks))
    with record_built_models() as built_models:
        compares_calls = bool(hooks) and not fails
        observation.recorded = record(tables, NUM_STEPS, folder=folder, before_step=inspect, records_calls=compares_calls)
    for model, initial_traces in built_models:
        assert_untouched(initial_traces, model.layers)
    return observation


def call_errors(hooks: Sequence[Tables], folder: Path) -> Iterator[str]:
    """Calls each method of the only hook in `hooks` with values of actions, such as None. Yields a line for each error."""
    with assemble(plan_from_dict(changed(PLAN, scheduler_hooks=list(hooks), parallel={}), folder), World.alone("cpu")) as run:
        run.step()
        (hook,) = run.stepper.executor.hooks
        forward_step = MicroStep(chunk=0, micro=0, phase=Phase.TRAIN, step=1, global_micro=0)
        weights_step = replace(forward_step, phase=Phase.WEIGHTS)
        recomputed = replace(forward_step, phase=Phase.RECOMPUTE, layer="blocks.0")
        calls: list[tuple[Callable[[MicroStep, Any], None], MicroStep, Any]] = [
            (hook.before_forward, forward_step, None),
            (hook.before_forward, recomputed, (torch.zeros(2, 3),)),
            (hook.after_forward, forward_step, {"stream": torch.zeros(2, 3), "rest": (torch.zeros(1),)}),
            (hook.before_backward, weights_step, None),
            (hook.after_backward, weights_step, None),
        ]
        for method, context, value in calls:
            try:
                method(context, value)
            except Exception as error:
                label = "None" if value is None else f"a {type(value).__name__}"
                yield f"{method.__name__} in phase {context.phase}, called with {label}: {type(error).__name__}: {error}"


class SchedulerHookContract:
    """Tests a scheduler hook. Subclass it, and set `hook` to a table of `[[scheduler_hooks]]`."""

    hook: ClassVar[Tables]

    def test_hook_changes_nothing(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """Compares losses, norms, gradients and weights with a run without the hook. Ranks must issue the same collectives,
        including the hook's own. The hook must detach the tensors that it keeps, so that saved activations can be freed. Its
        counts must be finite and have the same names after every step.
        """
        baselines, observations = ranks(2).once(observe, [], texts), ranks(2).once(observe, [self.hook], texts)
        assert_same_sequence([[call for calls in rank.recorded.calls for call in calls] for rank in observations])
        for baseline, observation in zip(baselines, observations, strict=True):
            steps = zip(baseline.graph_tensors, observation.graph_tensors, strict=True)
            for step, (expected, actual) in enumerate(steps, start=1):
                extra = [name for name in actual if name not in expected]
                assert not extra, f"after step {step} the hook keeps tensors with their graph: {extra[:3]}"
            assert len({tuple(counts) for counts in observation.counts}) <= 1, "the names of the counts differ between steps"
        assert_same_runs([rank.recorded for rank in baselines], [rank.recorded for rank in observations])

    def test_failed_step_leaves_no_state(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        failed = ranks(2)(observe, [self.hook], texts, fails=True)
        baselines = ranks(2).once(observe, [], texts)
        assert_same_runs([rank.recorded for rank in baselines], [rank.recorded for rank in failed])

    def test_hook_accepts_actions_without_tensors(self, texts: Path) -> None:
        """Calls the hook without tensors, as in the first stage and in the phase `weights`, and with nested containers."""
        errors = "\n".join(call_errors([self.hook], texts))
        assert not errors, errors


Point = tuple[int, str, float | None]
"""The step, name and value of a number. A value of None stands for a non-finite value that the format cannot represent."""

MAX_FILE_BYTES = 4096  # the maximum size in bytes of a file in the test of a full disk; the rows of the test need more


class MetricsWriterContract:
    """Tests a metrics writer. Subclass it, set `writer` to a table of `[[metrics]]`, and implement `read`. writes_at_once:
    whether a row is on disk when `write` returns, so that a killed run keeps it. can_resume: whether the writer can drop the
    rows of steps after a checkpoint (`rewind`). writes_files: whether the writer writes into its folder.
    """

    writer: ClassVar[Tables]
    writes_at_once: ClassVar[bool] = True
    can_resume: ClassVar[bool] = True
    writes_files: ClassVar[bool] = True

    def read(self, folder: Path) -> Iterable[Point]:
        """Returns all numbers that the writer has written into `folder`."""
        raise NotImplementedError("implement `read`, which returns the written numbers")

    def test_run_writes_every_number_once(self, texts: Path, tmp_path: Path) -> None:
        with assemble(plan_from_dict(small_plan(metrics=[self.writer]), texts), World.alone("cpu"), folder=tmp_path) as run:
            rows = [run.step() for _ in range(3)]
        self._assert_rows(tmp_path, rows)

    def test_rows_with_different_names(self, tmp_path: Path) -> None:
        """Writes numbers that occur only in some steps, and values that are large, negative or tiny."""
        rows: list[dict[str, float | int]] = [
            {"step": 1, "loss": 2.5},
            {"step": 2, "loss": -1e-30, "held_out_loss": 3.0, "tokens": 10**9},
            {"step": 3, "norms/layer.0": 0.0, "loss/code": 1.5, "held_out/web text/loss": 2.5},
        ]
        self._write_rows(tmp_path, rows)
        self._assert_rows(tmp_path, rows)

    def test_non_finite_numbers_hide_no_others(self, tmp_path: Path) -> None:
        rows = [{"step": 1, "loss": math.nan, "lr": 0.5}, {"step": 2, "loss": math.inf}, {"step": 3, "loss": 1.0}]
        self._write_rows(tmp_path, rows)
        values = {(step, name): value for step, name, value in self.read(tmp_path)}
        for key, expected in {(1, "lr"): 0.5, (3, "loss"): 1.0}.items():
            assert values.get(key) == expected, f"{key} is {values.get(key)}, next to a number that is not finite"
        nan_value = values.get((1, "loss"))
        assert nan_value is None or not math.isfinite(nan_value), f"a loss of NaN is written as {nan_value}"

    def test_reopened_folder_keeps_rows(self, tmp_path: Path) -> None:
        """Writes with one writer, then with a second one in the same folder, as a resumed run does."""
        rows = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3, 4)]
        self._write_rows(tmp_path, rows[:2])
        self._write_rows(tmp_path, rows[2:])
        self._assert_rows(tmp_path, rows)

    def test_repeated_steps_are_written_once(self, tmp_path: Path) -> None:
        """Calls `rewind`, as a resumed run does, on the same writer and on a new one."""
        if not self.can_resume:
            pytest.skip("the writer cannot resume (`can_resume`)")
        for reopens in (False, True):
            folder = tmp_path / str(reopens)
            folder.mkdir()
            writer = self._build_writer(folder)
            for step in (1, 2, 3):
                writer.write({"step": step, "loss": 1.0 / step})
            if reopens:
                writer.close()
                writer = self._build_writer(folder)
            assert isinstance(writer, RewindableWriter), "the writer has no `rewind`: repeated steps would be written twice"
            writer.rewind(1)
            writer.write({"step": 2, "loss": 7.0})
            writer.close()
            self._assert_rows(folder, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 7.0}])

    def test_rows_are_on_disk_after_write_and_close(self, tmp_path: Path) -> None:
        """Reads the folder directly after `write`, as after a kill, and after two closes. The second close must do nothing."""
        writer = self._build_writer(tmp_path)
        writer.write({"step": 1, "loss": 1.0})
        points = self._read_points(tmp_path) if self.writes_at_once else [(1, "loss", 1.0)]
        writer.close()
        assert points == [(1, "loss", 1.0)], f"a run that is killed after `write` would leave {points} (`writes_at_once`)"
        try:
            writer.close()
        except Exception as error:
            raise AssertionError(f"a second close raises {type(error).__name__}: {error}") from error
        points = self._read_points(tmp_path)
        assert points == [(1, "loss", 1.0)], f"after two closes the folder has {points}"

    def test_full_disk_is_an_error(self, tmp_path: Path) -> None:
        """Expects `write` or `close` to raise an error, so that no row is lost silently."""
        if not self.writes_files:
            pytest.skip("the writer does not write into its folder (`writes_files`)")
        writer, num_rows = self._build_writer(tmp_path), MAX_FILE_BYTES // 8
        is_refused = False
        with _limit_file_size(MAX_FILE_BYTES):
            try:
                for step in range(1, num_rows + 1):
                    writer.write({"step": step, "loss": 1.0 / step})
                writer.close()
            except Exception:  # RunError, or an error of the library
                is_refused = True
        with suppress(Exception):
            writer.close()
        num_written = len(self._read_points(tmp_path))
        label = f"the disk is full after {MAX_FILE_BYTES} bytes, and {num_written} of {num_rows} rows are written"
        assert is_refused, f"{label}, but neither write nor close raises an error"

    def _build_writer(self, folder: Path) -> MetricsWriter:
        writer: MetricsWriter = plan_from_dict(small_plan(metrics=[self.writer])).metrics[0].build(folder)
        return writer

    def _write_rows(self, folder: Path, rows: Iterable[Mapping[str, float | int]]) -> None:
        writer = self._build_writer(folder)
        for row in rows:
            writer.write(row)
        writer.close()

    def _read_points(self, folder: Path) -> list[Point]:
        return sorted((step, name, value) for step, name, value in self.read(folder) if name != "step")

    def _assert_rows(self, folder: Path, rows: Iterable[Mapping[str, float | int]]) -> None:
        """Asserts that `folder` has every number of `rows` once, and no other numbers."""
        expected = {(int(row["step"]), name): value for row in rows for name, value in row.items() if name != "step"}
        values: dict[tuple[int, str], float | None] = {}
        for step, name, value in self._read_points(folder):
            assert (step, name) not in values, f"{name} of step {step} is written more than once"
            values[step, name] = value
        missing, extra = expected.keys() - values.keys(), values.keys() - expected.keys()
        assert not missing, f"{len(missing)} numbers are missing: {sorted(missing)[:3]}"
        assert not extra, f"these numbers are in no row: {sorted(extra)[:3]}"
        for key, value in expected.items():
            assert values[key] == pytest.approx(value, rel=1e-5), f"{key} is {values[key]}, not {value}"


@contextmanager
def _limit_file_size(num_bytes: int) -> Iterator[None]:
    """Limits the size of files that this process writes to `num_bytes`, so that writes fail as on a full disk."""
    resource = pytest.importorskip("resource", reason="the system has no file size limits")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
