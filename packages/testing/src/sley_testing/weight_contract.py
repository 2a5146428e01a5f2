"""Tests what every weight communicator must pass; the tests of a plugin inherit them.

    class TestRing(WeightCommunicatorContract):
        weights = {"use": "ring.communicator"}

A small model in fp64 (`contract_model`) has an embedding tied to the head, linears that are used twice or never, a frozen
one, and sizes that are not divisible by the number of ranks. Its runs over `wp` are compared with one process that holds all
weights, in the first step and after several: whatever is gathered too early, kept too long, summed over the wrong ranks or not
at all changes the numbers.

The communicator decides which parameters are sharded (`shard_dim`); at least one of the model must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.shards import gather_full_tensors
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.collectives import Collective, assert_same_sequence, collectives
from sley_testing.contract_model import LENGTH, WIDTH, Fragile, model_plan
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.ranks import Ranks
from sley_testing.runs import Recorded, assert_parity, counts_of, gradients, same_on_all, weights

Table = dict[str, Any]
Change = Callable[[Run, int], None]

NUM_STEPS = 3
SAMPLES = 2  # of each micro-batch


@dataclass
class Seen:
    """Records what one rank saw. calls: its collectives, by step and then of an evaluation.

    counts: what the communicator counts, asked after each step. sharded: names of the sharded parameters. read, closed: the
    results of reading weights between two steps, and of calling layers after the run.
    """

    recorded: Recorded = field(default_factory=Recorded)
    calls: list[list[Collective]] = field(default_factory=list)
    counts: list[dict[str, float]] = field(default_factory=list)
    sharded: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)


def observe(plan: Table, change: Change | None = None) -> Seen:
    """Takes NUM_STEPS steps and an evaluation of `plan` on this rank. change: called before each step with its number."""
    seen = Seen()
    with World.join("cpu") as world:
        with assemble(plan_from_dict(plan), world) as run:
            seen.sharded = [param.name for param in run.registry if param.shard is not None]
            seen.recorded.first = weights(run)
            for number in range(NUM_STEPS):
                if change is not None:
                    change(run, number)
                with collectives() as calls:
                    seen.recorded.rows.append(run.step())
                seen.calls.append(list(calls))
                seen.recorded.gradients.append(gradients(run))
                with collectives() as calls:
                    seen.counts.append(counts_of(run.stepper.executor.weights))
                assert not calls, f"counting exchanges: {calls[0]}"
            seen.recorded.weights = weights(run)
            seen.read = _read(run)
            with collectives() as calls:
                seen.recorded.held_out = run.evaluate()
            seen.calls.append(list(calls))
        seen.closed = _called_after(run)
    return seen


def rewrite(run: Run, number: int) -> None:
    """Evaluates, writes to weights, freezes a trained one and unfreezes it, between steps."""
    if number == 1:
        run.evaluate()
        with torch.no_grad():
            for param in run.registry:
                param.parameter.mul_(1.25)
    if number in (1, 2):
        run.registry["second.wide.weight"].parameter.requires_grad_(number == 2)


def load(run: Run, number: int) -> None:
    """Loads other weights, unsharded, as from a checkpoint."""
    if number == 1:
        run.load_weights({name: value * 0.5 for name, value in weights(run).items()})


def late(run: Run, number: int) -> None:
    """Sets weights to zero when a step begins, until something waits for their layer."""
    if number == 0:
        return
    kept = {param: param.parameter.detach().clone() for param in run.registry}
    for layer in run.layers:
        names = [name for name, _ in layer.module.named_parameters(layer.name, remove_duplicate=False)]

        def bring(names: Sequence[str] = names) -> None:
            for param in [one for one in kept if {one.name, *one.aliases} & set(names)]:
                param.parameter.data.copy_(kept.pop(param))  # as a collective writes: no version tells of it

        run.parts.waits.before_layer(layer.name, bring)
    with torch.no_grad():
        for param in run.registry:
            param.parameter.zero_()


def fail(run: Run, number: int) -> None:
    """Fails the first step within a forward and the second within a backward, and gives their samples back."""
    if number in (0, 1):
        assert run.feed is not None
        before = run.feed.state()
        Fragile.breaks_in = "forward" if number == 0 else "backward"
        with pytest.raises(ValueError, match="the contract's failing step"):
            run.step()
        Fragile.breaks_in = None
        run.feed.restore(before)


class WeightCommunicatorContract:
    """Tests a weight communicator: inherit and set `weights` to its table. timeout_s: of each run on ranks."""

    weights: ClassVar[Table]
    timeout_s: ClassVar[float] = 120.0

    @pytest.mark.parametrize(
        ("world", "wp", "micros", "changes"),
        [
            (2, 2, 2, {}),
            (2, 2, 2, {"activations": {"use": "core.recompute", "fraction": 1.0}}),
            (4, 2, 1, {}),
            (4, 4, 1, {"activations": {"use": "core.recompute", "fraction": 0.5}}),
        ],
        ids=["shards", "micro-batches and recomputation", "copies of shards", "four shards"],
    )
    def test_layouts_match_unsharded_weights(
        self, ranks: Callable[..., Ranks], world: int, wp: int, micros: int, changes: Table
    ) -> None:
        """Loss, norm, gradients and weights after NUM_STEPS steps, and the held-out loss; replicas are equal bit for bit."""
        size = micros * SAMPLES * world
        found = self._seen(ranks, world, tables(self.weights, wp, size, SAMPLES, **changes))
        _assert_parity(_of_whole_weights(size), found)
        assert found[0].sharded, f"{self.weights} shards no parameter of the model"

    @pytest.mark.parametrize("change", [rewrite, load])
    def test_changes_between_steps_take_effect(self, ranks: Callable[..., Ranks], change: Change) -> None:
        """Nothing that was gathered before a write is used after it."""
        found = self._seen(ranks, 2, tables(self.weights, 2, 4 * SAMPLES, SAMPLES), change)
        _assert_parity(_of_whole_weights(4 * SAMPLES, change), found)

    def test_layer_calls_wait_for_weights(self, ranks: Callable[..., Ranks]) -> None:
        """The waits of a layer are called before any of its weights is read or gathered, prefetched or not."""
        plan = tables(self.weights, 2, 4 * SAMPLES, SAMPLES)
        _assert_same(self._seen(ranks, 2, plan), self._seen(ranks, 2, plan, late), "weights that come late")

    def test_failed_step_leaves_no_state(self, ranks: Callable[..., Ranks]) -> None:
        """`begin` discards everything in flight."""
        plan = tables(self.weights, 2, 4 * SAMPLES, SAMPLES)
        _assert_same(self._seen(ranks, 2, plan), self._seen(ranks, 2, plan, fail), "after a failed step")

    def test_exchanges_counts_reads_and_closed_run(self, ranks: Callable[..., Ranks]) -> None:
        """What else a run shows: its exchanges, its counts, reads of weights, and what is left when it has closed.

        Ranks must exchange in one order. Gradients in the store must have their shard's shape. Counts must be finite numbers. A
        weight that is read without its module must be refused by name, or be right, and so must a layer that is called after
        the run.
        """
        found = self._seen(ranks, 2, tables(self.weights, 2, 4 * SAMPLES, SAMPLES))
        for calls in zip(*(seen.calls for seen in found), strict=True):
            assert_same_sequence(list(calls))
        for seen in found:
            assert len({tuple(counts) for counts in seen.counts[1:]}) == 1, "counts keep their names"
            assert not seen.read, "\n".join(seen.read)
            assert not seen.closed, "\n".join(seen.closed)

    def _seen(self, ranks: Callable[..., Ranks], world: int, plan: Table, change: Change | None = None) -> list[Seen]:
        there = ranks(world, self.timeout_s)
        seen: list[Seen] = (there.once if change is None else there)(observe, plan, change)
        return seen


@cache
def _of_whole_weights(global_size: int, change: Change | None = None) -> Seen:
    """Returns what one process sees that holds all weights; must not be modified."""
    return observe(tables(None, 1, global_size, SAMPLES), change)


def _assert_parity(wanted: Seen, others: Sequence[Seen]) -> None:
    """Asserts that all ranks' recorded runs equal the reference: losses, gradients, weights, held-out loss."""
    recorded = [seen.recorded for seen in others]
    assert_parity(wanted.recorded, recorded, "fp64")
    same_on_all(recorded)
    for one in recorded:
        for wanted_step, step in zip(wanted.recorded.gradients, one.gradients, strict=True):
            assert_close_gradients(wanted_step, step, 1e-8, floor=1e-8)
        assert one.held_out == pytest.approx(wanted.recorded.held_out, rel=1e-10), "the held-out loss"


def _assert_same(wanted: Sequence[Seen], others: Sequence[Seen], when: str) -> None:
    for one, other in zip(wanted, others, strict=True):
        assert [row["loss"] for row in one.recorded.rows] == [row["loss"] for row in other.recorded.rows], when
        assert_same_bits(one.recorded.weights, other.recorded.weights)


def _read(run: Run) -> list[str]:
    """Returns the parameters whose module gives anything but the full weight instead of refusing to be read."""
    found = []
    parts = {param: param.parameter for param in run.registry if param.shard is not None}
    for param, whole in gather_full_tensors(parts, run.groups).items():
        assert run.store.gradient(param).shape == param.parameter.shape if param in run.store else True, param
        for holder in param.holders:
            try:
                value = getattr(holder.module, holder.attribute).detach().clone()
            except RunError as error:
                if param.name not in str(error):
                    found.append(f"the refusal of {param.name} does not name it: {error}")
                continue
            if value.shape != whole.shape or not torch.equal(value, whole):
                found.append(f"{param.name} reads as {list(value.shape)} that is not the weight")
    return found


def _called_after(run: Run) -> list[str]:
    """Describes each sharded layer that, called after the run, gives a result or communicates instead of refusing the call."""
    found = []
    sharded = {id(holder.module) for param in run.registry if param.shard is not None for holder in param.holders}
    tokens, hidden = torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, LENGTH, WIDTH, dtype=torch.float64)
    given = {"embed": (tokens, tokens), "head": (hidden,)}
    bounds = torch.tensor([[0, LENGTH]], dtype=torch.int32)
    for layer in run.layers:
        if any(id(module) in sharded for module in layer.module.modules()):
            with collectives() as calls:
                try:
                    layer.module(*given.get(layer.name, (hidden, bounds)))
                    found.append(f"{layer.name} gives a result after the run, though this rank has shards of its weights")
                except RunError:
                    pass
                except Exception as error:  # it stumbled over a shard
                    found.append(f"{layer.name} is no RunError after the run, but {type(error).__name__}: {error}")
            found += [f"{layer.name} exchanges after the run: {call}" for call in calls]
    return found


def tables(weights: dict[str, Any] | None, wp: int, global_size: int, micro_size: int, **changes: Any) -> dict[str, Any]:
    """Returns the contract's plan, weights over `wp` ranks by the communicator `weights`; None holds them whole."""
    optimizer = {"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5}
    found = model_plan(batch={"global_size": global_size, "micro_size": micro_size}, optimizer=optimizer)
    return found | ({"parallel": {"dp": "auto", "wp": wp}, "weights": weights} if weights else {}) | changes
