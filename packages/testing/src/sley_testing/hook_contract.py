"""Defines the tests that every scheduler hook must pass, for a plugin's tests to inherit.

    class TestWatch(SchedulerHookContract):
        hook = {"use": "watch.outputs"}

Two ranks train a small decoder in several microbatches, recompute half of its layers, and evaluate it, with and without the
hook.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sley_core.comm.world import World
from sley_core.engine.parts import MicroStep, Phase
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import assert_same_sequence, assert_untouched, record_built_models
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import RunRecord, assert_same_runs, fail_once, read_counts, record
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

NUM_STEPS = 3
FAILING_STEP = 1  # the index of the step that a failing step precedes

PLAN = small_plan(
    run__steps=NUM_STEPS,
    parallel={"dp": 2},
    evaluation={"every": 2, "steps": 1},
    activations={"use": "core.recompute", "fraction": 0.5},
)


@dataclass
class Observation:
    """Holds one rank's results. recorded: the record of the run. graph_tensors: descriptions of the live tensors with a
    graph, after each step but the last. counts: the hook's counts after each step but the last.
    """

    recorded: RunRecord = field(default_factory=RunRecord)
    graph_tensors: list[list[str]] = field(default_factory=list)
    counts: list[dict[str, float]] = field(default_factory=list)


def observe(hooks: Sequence[Tables], folder: Path, *, fails: bool = False) -> Observation:
    """Takes NUM_STEPS steps on this rank. Raises AssertionError if the closed run has changed a module or parameter. fails:
    whether a step that raises in its first backward precedes step FAILING_STEP.
    """
    observation = Observation()

    def inspect(run: Run, num_steps_done: int) -> None:
        if num_steps_done > 0:
            gc.collect()
            tensors = [tensor for tensor in gc.get_objects() if type(tensor) is Tensor and tensor.grad_fn is not None]
            observation.graph_tensors.append(
                [f"{tuple(tensor.shape)} of {type(tensor.grad_fn).__name__}" for tensor in tensors]
            )
            observation.counts += [read_counts(hook) for hook in run.stepper.executor.hooks]
        if fails and num_steps_done == FAILING_STEP:
            fail_once(run)

    tables = changed(PLAN, scheduler_hooks=list(hooks))
    with record_built_models() as built_models:
        observation.recorded = record(tables, NUM_STEPS, folder=folder, before_step=inspect, records_calls=True)
    for model, initial_traces in built_models:
        assert_untouched(initial_traces, model.layers)
    return observation


def call_errors(hooks: Sequence[Tables], folder: Path) -> Iterator[str]:
    """Calls each method of the hook with the values that actions may have, such as None. Yields a line for each error."""
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
        including those of the hook. The hook must detach the tensors that it keeps, so that saved activations can be freed. Its
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
