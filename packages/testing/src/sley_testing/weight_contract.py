"""Defines the tests that every weight communicator must pass, for a plugin's tests to inherit.

    class TestRing(WeightCommunicatorContract):
        weights = {"use": "ring.communicator"}

A small fp64 model (`layers`) has tied weights, linears that are used twice or never, a frozen linear, and sizes that are not
divisible by the number of ranks. Each row of its dataset consists of two documents. Runs that shard the model's weights over
`wp` ranks are compared with one process that holds all weights.

The communicator decides which parameters are sharded (`shard_dim`). It must shard at least one parameter of the model. If its
record declares rounded weights (`tolerance_for` above 0), the rounding errors are tested instead of the match with one process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sley_core.comm.world import World
from sley_core.data.dataset import DataInfo, Field
from sley_core.engine.shards import gather_full_tensors
from sley_core.errors import RunError
from sley_core.model.attention import Attention
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.records import WeightCommunicatorRecord
from sley_testing.collectives import Collective, assert_same_sequence, collectives
from sley_testing.contract import SQUARES, Samples, UnevenBlock, contract_plan
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import Tables
from sley_testing.ranks import Ranks
from sley_testing.runs import (
    RunRecord,
    assert_equal_replicas,
    assert_parity,
    assert_same_runs,
    fail_once,
    read_counts,
    record,
    record_reference,
    weights,
)
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

BeforeStep = Callable[[Run, int], None]
"""A function that is called before each step with the run and the number of steps taken so far."""

NUM_STEPS = 3  # optimizer steps per run
MICRO_SIZE = 2  # samples per microbatch
GLOBAL_SIZE = 4 * MICRO_SIZE  # the samples of two ranks with two microbatches each


@dataclass
class Inspection:
    """Holds the findings of `inspect_run` on one rank. calls: the collectives of the run, in order. counts: the communicator's
    counts after each step. is_sharded: whether at least one parameter of the model is sharded. errors: messages about wrong
    weights after the last step, and about calls of layers after the run.
    """

    calls: list[Collective] = field(default_factory=list)
    counts: list[dict[str, float]] = field(default_factory=list)
    is_sharded: bool = False
    errors: list[str] = field(default_factory=list)


def inspect_run(plan: Tables) -> Inspection:
    """Takes NUM_STEPS steps on this rank, evaluates, and returns the findings. Asserts that `counts` does not communicate."""
    inspection = Inspection()
    with World.join("cpu") as world, collectives() as inspection.calls:
        with assemble(plan_from_dict(plan), world) as run:
            inspection.is_sharded = any(param.shard is not None for param in run.registry)
            for _ in range(NUM_STEPS):
                run.step()
                with collectives() as calls:
                    inspection.counts.append(read_counts(run.stepper.executor.communicator))
                assert not calls, f"`counts` must not communicate, but calls {calls[0]}"
            run.evaluate()
            inspection.errors += _weight_errors(run)
        inspection.errors += _closed_call_errors(run)
    return inspection


def change_weights(run: Run, num_steps_done: int) -> None:
    """After the first step, halves all weights with `load_weights`, and freezes `second.wide.weight`. After the second step,
    unfreezes this weight, and multiplies all weights by 1.25 in place. Evaluates before each change.
    """
    if num_steps_done in (1, 2):
        run.evaluate()
        run.registry["second.wide.weight"].parameter.requires_grad_(num_steps_done == 2)
    if num_steps_done == 1:
        run.load_weights({name: value * 0.5 for name, value in weights(run).items()})
    if num_steps_done == 2:
        with torch.no_grad():
            for param in run.registry:
                param.parameter.mul_(1.25)


def delay_weights(run: Run, num_steps_done: int) -> None:
    """Sets weights to zero before each step except the first. A wait before each layer restores the weights of the layer."""
    if num_steps_done == 0:
        return
    pending = {param: param.parameter.detach().clone() for param in run.registry}
    for layer in run.layers:
        names = [name for name, _ in layer.module.named_parameters(layer.name, remove_duplicate=False)]

        def restore_weights(names: Sequence[str] = names) -> None:
            for param in [candidate for candidate in pending if {candidate.name, *candidate.aliases} & set(names)]:
                param.parameter.data.copy_(pending.pop(param))  # like a collective, this does not change the version

        run.parts.waits.before_layer(layer.name, restore_weights)
    with torch.no_grad():
        for param in run.registry:
            param.parameter.zero_()


def fail_steps(run: Run, num_steps_done: int) -> None:
    """Before the first step, takes a step that fails in its forward. Before the second, one that fails in its backward."""
    if num_steps_done in (0, 1):
        fail_once(run, in_forward=num_steps_done == 0)


class WeightCommunicatorContract:
    """Tests a weight communicator. Subclass it, and set `weights` to the `[weights]` table."""

    weights: ClassVar[Tables]

    @pytest.mark.parametrize(("world_size", "wp", "num_microbatches"), [(2, 2, 2), (4, 2, 1), (4, 4, 1)])
    def test_layouts_match_unsharded_weights(
        self, ranks: Callable[..., Ranks], world_size: int, wp: int, num_microbatches: int
    ) -> None:
        """Compares losses, norms, gradients and weights with a run of one process. Replicas must be bit-identical."""
        self._skip_rounded_weights()
        size = num_microbatches * MICRO_SIZE * world_size
        _assert_parity(record_reference(weight_plan(None, 1, size), NUM_STEPS), self._record(ranks, world_size, wp, size))

    def test_changes_between_steps_take_effect(self, ranks: Callable[..., Ranks]) -> None:
        self._skip_rounded_weights()
        baseline = record(weight_plan(None, 1, GLOBAL_SIZE), NUM_STEPS, before_step=change_weights)
        _assert_parity(baseline, self._record(ranks, before_step=change_weights))

    def test_layer_calls_wait_for_weights(self, ranks: Callable[..., Ranks]) -> None:
        """Expects the waits of a layer to run before its weights are read, gathered or prefetched."""
        self._assert_same_run(ranks, delay_weights)

    def test_failed_step_leaves_no_state(self, ranks: Callable[..., Ranks]) -> None:
        self._assert_same_run(ranks, fail_steps)

    def test_exchanges_counts_reads_and_closed_run(self, ranks: Callable[..., Ranks]) -> None:
        """Expects the same collectives on all ranks, finite counts, and gathered weights within the record's tolerance. A read
        of a sharded weight must return the full weight or raise RunError with its name. After the run, a call of a sharded
        layer must raise RunError.
        """
        inspections = ranks(2, 120)(inspect_run, weight_plan(self.weights, 2, GLOBAL_SIZE))
        assert inspections[0].is_sharded, f"{self.weights} shards no parameter of the model"
        assert_same_sequence([inspection.calls for inspection in inspections])
        for inspection in inspections:
            names = {tuple(counts) for counts in inspection.counts[1:]}
            assert len(names) == 1, "the names of the counts differ between steps"
            assert not inspection.errors, "\n".join(inspection.errors)

    def _skip_rounded_weights(self) -> None:
        if _tolerance(plan_from_dict(weight_plan(self.weights, 2, GLOBAL_SIZE))):
            pytest.skip("the record declares rounded weights")

    def _record(
        self,
        ranks: Callable[..., Ranks],
        world_size: int = 2,
        wp: int = 2,
        global_size: int = GLOBAL_SIZE,
        before_step: BeforeStep | None = None,
    ) -> list[RunRecord]:
        """Returns the records of all ranks. Runs without `before_step` are cached."""
        launch = ranks(world_size, 120)
        call = launch.once if before_step is None else launch
        return call(record, weight_plan(self.weights, wp, global_size), NUM_STEPS, before_step=before_step)

    def _assert_same_run(self, ranks: Callable[..., Ranks], before_step: BeforeStep) -> None:
        assert_same_runs(self._record(ranks), self._record(ranks, before_step=before_step))


def _assert_parity(baseline: RunRecord, recorded: Sequence[RunRecord]) -> None:
    """Asserts fp64 parity of all ranks with `baseline`, bit-identical replicas, and close gradients in every step."""
    assert_parity(baseline, recorded, "fp64")
    assert_equal_replicas(recorded)
    for rank in recorded:
        for expected_step, step in zip(baseline.gradients, rank.gradients, strict=True):
            assert_close_gradients(expected_step, step, 1e-8, floor=1e-8)


def _tolerance(plan: Plan) -> float:
    """Returns the relative tolerance of gathered weights that the communicator's record declares; 0 for exact weights."""
    assert plan.weights is not None
    assert isinstance(plan.weights.record, WeightCommunicatorRecord)
    tolerance = plan.weights.record.tolerance_for(plan.weights.config)
    assert 0.0 <= tolerance < 1.0, f"a tolerance of {tolerance} would accept any weight"
    return tolerance


@torch.no_grad()
def _weight_errors(run: Run) -> Iterator[str]:
    """Yields a message for each sharded parameter that reads as a wrong weight, for each refused read whose error does not name
    the parameter, and for each linear and embedding that computes with a wrong weight. In these computations, an element may
    differ by the record's tolerance times the sum of its own size and 2^-14 of the largest size. All ranks must call it.
    """
    tolerance = _tolerance(run.plan)
    shards = {param: param.parameter for param in run.registry if param.shard is not None}
    for param, full_weight in gather_full_tensors(shards, run.groups).items():
        assert param not in run.store or run.store.gradient(param).shape == param.parameter.shape, param
        for holder in param.holders:
            try:
                value = getattr(holder.module, holder.attribute).detach().clone()
                if value.shape != full_weight.shape or not torch.equal(value, full_weight):
                    yield f"{param.name} reads as {list(value.shape)}, which is not the full weight"
            except RunError as error:
                if param.name not in str(error):
                    yield f"the error of a read of {param.name} does not name it: {error}"
        module = param.holders[0].module
        if type(module) is nn.Embedding:
            weight = module(torch.arange(len(full_weight)))
        elif type(module) is nn.Linear and full_weight.ndim == 2:
            inputs = torch.eye(full_weight.shape[1]).to(full_weight)
            weight = (module(inputs) - module(torch.zeros_like(inputs))).t()  # without the bias
        else:
            continue
        largest, difference = full_weight.abs().max(), (weight - full_weight).abs()
        limit = tolerance * (full_weight.abs() + 2**-14 * largest) + 1e-12 * largest
        if not bool((difference <= limit).all()):
            yield f"{param.name} is gathered with an error of {float(difference.max())}"


def _closed_call_errors(run: Run) -> Iterator[str]:
    """Calls each sharded layer after the run. Yields a message for each call that communicates or raises no RunError."""
    sharded = {id(holder.module) for param in run.registry if param.shard is not None for holder in param.holders}
    tokens, hidden = torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, LENGTH, WIDTH, dtype=torch.float64)
    inputs = {"embed": (tokens, tokens), "head": (hidden,)}
    bounds = torch.tensor([[0, LENGTH]], dtype=torch.int32)
    for layer in run.layers:
        if any(id(module) in sharded for module in layer.module.modules()):
            with collectives() as calls:
                try:
                    layer.module(*inputs.get(layer.name, (hidden, bounds)))
                    yield f"{layer.name} returns a result after the run, although its weights are sharded"
                except RunError:
                    pass
                except Exception as error:  # a torch error, caused by the shape of a shard
                    yield f"{layer.name} raises no RunError after the run, but {type(error).__name__}: {error}"
            yield from (f"{layer.name} communicates after the run: {call}" for call in calls)


def weight_plan(weights: Tables | None, wp: int, global_size: int) -> Tables:
    """Returns the contract's plan, which recomputes one of two blocks. weights: the `[weights]` table; if None, the plan is for
    one process, and `wp` is ignored. wp: the number of shards of each weight. global_size: the number of samples per step.
    """
    plan = model_plan(
        batch={"global_size": global_size, "micro_size": MICRO_SIZE},
        optimizer={"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5},
        activations={"use": "core.recompute", "fraction": 0.5},
    )
    return plan | ({"parallel": {"dp": "auto", "wp": wp}, "weights": weights} if weights else {})


VOCABULARY, WIDTH, LENGTH = 11, 6, 8
"""The sizes of the model. VOCABULARY is not divisible by 2 and WIDTH not by 4, so that weight shards are padded."""

HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 3  # query heads, key heads, and elements per head


class Data(Samples):
    """A dataset. Each sample has the tokens of two documents of varying lengths, and targets `y` [LENGTH, VOCABULARY]."""

    info = DataInfo(
        {
            "tokens": Field("int64", 0, 1, "token"),
            "y": Field("float64", 0, 1),
            "positions": Field("int64", 0, 1),
            "cu_seqlens": Field("int32", 0, None),
        },
        vocab_size=VOCABULARY,
        sequence=LENGTH,
    )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = self.generator(index)
        bound = 1 + index % (LENGTH - 1)
        return {
            "tokens": torch.randint(VOCABULARY, (LENGTH,), generator=generator),
            "y": torch.randn(LENGTH, VOCABULARY, generator=generator, dtype=torch.float64),
            "positions": torch.cat([torch.arange(bound), torch.arange(LENGTH - bound)]),
            "cu_seqlens": torch.tensor([0, bound, LENGTH], dtype=torch.int32),
        }


class Embed(nn.Module):
    """Sums the embeddings of tokens and positions, both int64 [b, s]. Returns [b, s, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Any:
        return self.table(tokens) + self.positions(positions)


class Block(UnevenBlock):
    """Applies a norm, attention with two query heads per key head, dropout, `UnevenBlock` and two linears."""

    def __init__(self, dropout: float) -> None:
        super().__init__(WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_WIDTH)
        self.attention = Attention()
        self.out = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.wide = nn.Linear(WIDTH, 9, bias=False)
        self.narrow = nn.Linear(9, WIDTH)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Any:  # type: ignore[override]  # also takes document bounds
        normed = self.norm(hidden)
        q = self.q(normed).unflatten(-1, (HEADS, HEAD_WIDTH))
        k, v = self.kv(normed).unflatten(-1, (2, KV_HEADS, HEAD_WIDTH)).unbind(2)
        context = self.attention(q, k, v, cu_seqlens=cu_seqlens)
        hidden = hidden + self.dropout(self.out(context.flatten(-2)))
        normed = super().forward(normed).tanh()
        return hidden + self.narrow(self.wide(normed).tanh())


class Head(nn.Module):
    """Applies a norm and a linear. Returns logits [b, s, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Any:
        return self.out(self.norm(hidden))


def layers(dropout: float = 0.0) -> list[tuple[str, nn.Module]]:
    """Returns the layers with their names. The embedding of the tokens and the output linear of the head share their weight."""
    embed, head = Embed(), Head()
    head.out.weight = embed.table.weight
    return [("embed", embed), ("first", Block(dropout)), ("second", Block(dropout)), ("head", head)]


def model_plan(dropout: float = 0.0, **tables: Any) -> Tables:
    """Returns a one-process plan that trains `layers` on `Data`, extended by `tables`. dropout: the rate of `Block`."""
    model = {"factory": f"{__name__}:layers", "options": {"dropout": dropout}}
    return contract_plan(__name__, model=model, loss=SQUARES, evaluation={"every": 99, "steps": 2}, **tables)
