"""Tests what every scheduler hook must pass; the tests of a plugin inherit them.

    class TestWatch(SchedulerHookContract):
        hook = {"use": "watch.outputs"}

Two ranks train a small decoder in several micro-batches, with half of its layers recomputed, and evaluate it; everything is
compared with the same run without the hook.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import Collective, assert_same_sequence, assert_untouched, collectives, drafts_kept
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import counts_of, fail_once, weights

Table = dict[str, Any]

NUM_STEPS = 2
FAILING = 1  # the step before which another one fails, where one is to fail

PLAN = small_plan(
    run__steps=NUM_STEPS,
    parallel={"dp": 2},
    evaluation={"every": 2, "steps": 1},
    activations={"use": "core.recompute", "fraction": 0.5},
)


@dataclass
class Seen:
    """What one rank saw. rows: of the steps. weights: after the last. calls: the collectives of each step. graphs: the tensors
    with a graph that were alive after it. counts: those of the hook, after each step.
    """

    rows: list[dict[str, float | int]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    calls: list[list[Collective]] = field(default_factory=list)
    graphs: list[list[str]] = field(default_factory=list)
    counts: list[dict[str, float]] = field(default_factory=list)


def observe(hooks: Sequence[Table], folder: Path, *, fails: bool = False) -> Seen:
    """Takes the contract's steps on this rank. fails: whether one more, before step FAILING, ends within its first backward.
    Raises AssertionError if the run leaves anything in its layers.
    """
    seen = Seen()
    tables = changed(PLAN, scheduler_hooks=list(hooks))
    with drafts_kept() as kept, World.join("cpu") as world:
        with assemble(plan_from_dict(tables, folder), world) as run:
            for number in range(NUM_STEPS):
                if fails and number == FAILING:
                    fail_once(run)
                with collectives() as calls:
                    seen.rows.append(run.step())
                seen.calls.append(list(calls))
                gc.collect()
                tensors = (each for each in gc.get_objects() if type(each) is Tensor)
                graphs = ((each.shape, each.grad_fn) for each in tensors)
                seen.graphs.append([f"{tuple(shape)} of {graph.name()}" for shape, graph in graphs if graph is not None])
                if run.stepper.executor.hooks:
                    seen.counts.append(counts_of(run.stepper.executor.hooks[0]))
            seen.weights = weights(run)
        for model, before in kept:
            assert_untouched(before, model.layers)
    return seen


def call_bare(hooks: Sequence[Table], folder: Path) -> list[str]:
    """Calls each method as for the first stage's forward and for a W, which have no tensors; returns what failed."""
    failed = []
    with assemble(plan_from_dict(changed(PLAN, scheduler_hooks=list(hooks), parallel={}), folder), World.alone("cpu")) as run:
        run.step()
        (hook,) = run.stepper.executor.hooks
        micro = MicroStep(chunk=0, micro=0, phase=Phase.TRAIN, step=1, global_micro=0)
        weights_of = replace(micro, phase=Phase.WEIGHTS)
        again = replace(micro, phase=Phase.RECOMPUTE, layer="blocks.0")
        calls: list[tuple[Callable[[MicroStep, Any], None], MicroStep, Any]] = [
            (hook.before_forward, micro, None),
            (hook.before_forward, again, (torch.zeros(2, 3),)),
            (hook.after_forward, micro, {"stream": torch.zeros(2, 3), "rest": (torch.zeros(1),)}),
            (hook.before_backward, weights_of, None),
            (hook.after_backward, weights_of, None),
        ]
        for method, place, given in calls:
            try:
                method(place, given)
            except Exception as error:
                what = "None" if given is None else f"a {type(given).__name__}"
                failed.append(f"{method.__name__} in phase {place.phase}, given {what}: {type(error).__name__}: {error}")
    return failed


class SchedulerHookContract:
    """Tests a scheduler hook: inherit, set `hook` to a table of `[[scheduler_hooks]]`, and pytest does the rest."""

    hook: ClassVar[Table]

    def test_run_is_bit_identical_with_hook(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """Losses, norms, held-out losses and weights, bit for bit."""
        self._compare(ranks, texts, fails=False, when="with the hook")

    def test_failed_step_leaves_no_state(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """The next one has the same numbers as without the hook."""
        self._compare(ranks, texts, fails=True, when="with the hook, after a step that failed")

    def test_ranks_issue_same_collectives(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """Whatever the hook adds to it."""
        found = ranks(2).once(observe, [self.hook], texts)
        for calls in zip(*(seen.calls for seen in found), strict=True):
            assert_same_sequence(list(calls))

    def test_hook_keeps_no_graph(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """A tensor that it keeps is detached: else all that autograd saved for it stays in memory."""
        without, hooked = (ranks(2).once(observe, hooks, texts, fails=False) for hooks in ([], [self.hook]))
        for plain, seen in zip(without, hooked, strict=True):
            for number, (wanted, left) in enumerate(zip(plain.graphs, seen.graphs, strict=True), start=1):
                extra = [name for name in left if name not in wanted]
                assert not extra, f"after step {number} the hook keeps tensors with their graph: {extra[:3]}"

    def test_counts_are_numbers(self, ranks: Callable[..., Ranks], texts: Path) -> None:
        """Where it counts; under the same names in every step, and asking changes none."""
        for seen in ranks(2).once(observe, [self.hook], texts):
            assert len({tuple(counts) for counts in seen.counts}) <= 1, "counts have other names in other steps"

    def test_hook_accepts_actions_without_tensors(self, texts: Path) -> None:
        """No tensors where a first stage begins, and in phase `weights`; containers between stages."""
        failed = call_bare([self.hook], texts)
        assert not failed, "\n".join(failed)

    def _compare(self, ranks: Callable[..., Ranks], texts: Path, *, fails: bool, when: str) -> None:
        """Asserts that rows and weights of runs with and without the hook are bit for bit equal."""
        without, hooked = (ranks(2).once(observe, hooks, texts, fails=fails) for hooks in ([], [self.hook]))
        for rank, (plain, seen) in enumerate(zip(without, hooked, strict=True)):
            for wanted, found in zip(plain.rows, seen.rows, strict=True):
                for key in ("loss", "grad_norm", "held_out_loss"):
                    same = repr(wanted.get(key)) == repr(found.get(key))
                    assert same, f"{when}, rank {rank}, step {found['step']}: {key} is {found.get(key)}, not {wanted.get(key)}"
            assert_same_bits(plain.weights, seen.weights)
