"""Defines the tests that every sequence attention must pass, for a plugin's tests to inherit.

    class TestRing(SequenceAttentionContract):
        sequence = {"use": "ring.attention"}

Each of two ranks holds half of every sequence. Its context and gradients are compared with core's causal attention over the
whole sequence. Then a small fp64 model is trained on two ranks and compared with one process.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sley_core.comm.world import Group, World
from sley_core.errors import PlanError, SleyError
from sley_core.model.attention import Attention
from sley_core.model.layers import Layer
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import SequenceCommunicator
from sley_core.topology import Topology
from sley_testing.collectives import Collective, assert_same_sequence, collectives
from sley_testing.plans import Tables
from sley_testing.ranks import Ranks
from sley_testing.runs import RunRecord, assert_equal_replicas, assert_parity, assert_same_run, record
from sley_testing.weight_contract import model_plan

Case = tuple[int, int, bool]  # the numbers of query heads and key heads, and whether rows hold several documents

NUM_STEPS = 2  # optimizer steps per run
BATCH, LENGTH, WIDTH = 2, 8, 3  # rows, positions per row, elements per head
BOUNDS = torch.tensor([[0, 3, 7, 8], [0, 6, 8, 8]], dtype=torch.int32)
"""The document bounds `cu_seqlens` of each row. One document of each row lies in both halves."""

DIVISIBLE_CASES: list[Case] = [(*heads, packed) for heads, packed in itertools.product([(4, 4), (4, 2), (4, 1)], [False, True])]
"""The cases that every attention must accept."""

INDIVISIBLE_CASES: list[Case] = [(3, 3, False), (3, 1, True), (1, 1, False)]  # head counts that two ranks cannot split evenly


@dataclass
class CaseResult:
    """Holds one rank's results for one case. errors: the errors of the context and of the gradients of q, k and v, relative to
    the largest element. calls: the collectives. refusal: the error code if the case was refused, else "". is_restored: whether
    `attach` kept the names of parameters and `detach` restored full attention.
    """

    errors: list[float] = field(default_factory=list)
    calls: list[Collective] = field(default_factory=list)
    refusal: str = ""
    is_restored: bool = False


def _make_group(world: World) -> Group:
    return world.make_groups(Topology.from_sizes(world.size, sp=world.size), 60)["sp"]


def _build_attention(sequence: Tables, group: Group) -> SequenceCommunicator:
    """Returns a new sequence attention over `group`. sequence: the `[sequence]` table."""
    component = plan_from_dict(sequence_plan(sequence)).sequence
    assert component is not None, sequence
    attention: SequenceCommunicator = component.build(group)
    return attention


def run_cases(sequence: Tables, cases: Sequence[Case]) -> list[CaseResult]:
    """Returns this rank's result for each case: for attention over slices, and for full attention after `detach`."""
    results = []
    with World.join("cpu") as world:
        group = _make_group(world)
        for case in cases:
            attention = _build_attention(sequence, group)
            result, layer = CaseResult(), Layer("layer", _AttentionLayer())
            names_before = list(dict(layer.module.named_parameters()))
            attention.attach([layer])
            names_attached = list(dict(layer.module.named_parameters()))
            with collectives() as result.calls:
                try:
                    result.errors = [error for seed in range(2) for error in _relative_errors(layer.module, group, case, seed)]
                except SleyError as error:
                    result.refusal = error.diagnostics[0].code
            attention.detach()
            q, k, v, bounds = _draw_inputs(case, 9)
            result.is_restored = names_attached == names_before and torch.equal(
                layer.module(q, k, v, **bounds), Attention()(q, k, v, **bounds)
            )
            results.append(result)
    return results


def train_twice(plan: Tables) -> tuple[float | None, RunRecord, RunRecord]:
    """Returns the initial held-out loss of `plan`, and the records of two runs of `plan`, on this rank."""
    return record(plan, 0).held_out_loss, record(plan, NUM_STEPS), record(plan, NUM_STEPS)


class SequenceAttentionContract:
    """Tests a sequence attention. Subclass it, and set `sequence` to the `[sequence]` table."""

    sequence: ClassVar[Tables]

    def test_slice_results_equal_full_attention(self, ranks: Callable[..., Ranks]) -> None:
        """Compares contexts and gradients. All ranks must issue the same collectives, and `detach` must undo `attach`. The
        attention may refuse numbers of heads that two ranks cannot split evenly, but then all ranks must refuse.
        """
        cases = DIVISIBLE_CASES + INDIVISIBLE_CASES
        for case, results in zip(cases, zip(*ranks(2, 120)(run_cases, self.sequence, cases), strict=True), strict=True):
            label, codes = f"(heads, kv_heads, packed) = {case}", [result.refusal for result in results]
            assert len(set(codes)) == 1, f"{label}: only some ranks refuse the case, {codes}, so the others would hang"
            assert not codes[0] or case in INDIVISIBLE_CASES, f"{label} is refused by `{codes[0]}`"
            error = max((error for result in results for error in result.errors), default=0.0)
            assert error <= 1e-10, f"{label}: the relative error of the context or gradients of a slice is {error:.3g}"
            is_restored = all(result.is_restored for result in results)
            assert is_restored, f"{label}: `detach` does not restore attention over whole sequences"
            assert_same_sequence([result.calls for result in results])

    def test_model_without_attention_is_refused(self) -> None:
        """Expects a PlanError for a model without `Attention`, since its positions would silently ignore other slices."""
        with World.fake(0, 2) as world, pytest.raises(PlanError):
            _build_attention(self.sequence, _make_group(world)).attach([Layer("layer", nn.Linear(2, 2))])

    def test_runs_match_one_process(self, ranks: Callable[..., Ranks]) -> None:
        """Compares losses, norms, gradients and weights. One of two blocks is recomputed. Replicas must stay bit-identical."""
        activations = {"use": "core.recompute", "fraction": 0.5}
        baseline = record(sequence_plan(None, activations=activations), NUM_STEPS)
        plan = sequence_plan(self.sequence, activations=activations)
        recorded = ranks(2, 120)(record, plan, NUM_STEPS, records_calls=True)
        assert_parity(baseline, recorded, "fp64")
        assert_equal_replicas(recorded)
        assert_same_sequence([[call for calls in rank.calls for call in calls] for rank in recorded])

    def test_dropout_is_repeatable_and_equal_on_all_ranks(self, ranks: Callable[..., Ranks]) -> None:
        """Compares two equal runs. One process drops different elements, so only its evaluation is compared."""
        initial_loss = record(sequence_plan(None, dropout=0.3), 0).held_out_loss
        results = ranks(2, 120)(train_twice, sequence_plan(self.sequence, dropout=0.3))
        for rank_initial_loss, first, second in results:
            assert rank_initial_loss == pytest.approx(initial_loss, rel=1e-10)
            assert_same_run(first, second)
        assert_equal_replicas([recorded for _, recorded, _ in results])


class _AttentionLayer(nn.Module):
    """Holds an attention and a parameter whose name must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.scale = nn.Linear(1, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **bounds: Tensor) -> Any:
        return self.attention(q, k, v, **bounds)


def _draw_inputs(case: Case, seed: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Returns q [b, s, h, d], k and v [b, s, h_kv, d] in float64, equal on all ranks, and any document bounds by name."""
    heads, kv_heads, packed = case
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(BATCH, LENGTH, num_heads, WIDTH, generator=generator, dtype=torch.float64)
        for num_heads in (heads, kv_heads, kv_heads)
    )
    return q, k, v, {"cu_seqlens": BOUNDS} if packed else {}


def _relative_errors(attention: nn.Module, group: Group, case: Case, seed: int) -> list[float]:
    """Returns the relative errors of this rank's contexts without and with autograd, and of its gradients."""
    *inputs, bounds = _draw_inputs(case, seed)
    (output_gradient, *_) = _draw_inputs(case, seed + 100)  # the context has the shape of q

    def local_slice(tensor: Tensor) -> Tensor:
        return tensor.chunk(group.size, dim=1)[group.coord].detach()

    local_inputs = [local_slice(tensor).clone().requires_grad_() for tensor in inputs]
    with torch.no_grad():
        no_grad_context = attention(*local_inputs, **bounds)
    context = attention(*local_inputs, **bounds)
    actual = [no_grad_context, context, *torch.autograd.grad(context, local_inputs, local_slice(output_gradient))]
    full_inputs = [tensor.requires_grad_() for tensor in inputs]
    full_context = Attention()(*full_inputs, **bounds)
    expected = [full_context, full_context, *torch.autograd.grad(full_context, full_inputs, output_gradient)]
    pairs = [(value.detach(), local_slice(reference)) for value, reference in zip(actual, expected, strict=True)]
    return [float((value - reference).abs().max() / reference.abs().max()) for value, reference in pairs]


def sequence_plan(sequence: Tables | None, dropout: float = 0.0, **changes: Any) -> Tables:
    """Returns the contract's plan with `changes`. sequence: the `[sequence]` table for two ranks; None for one process."""
    plan = model_plan(dropout, batch={"global_size": 4, "micro_size": 2}, optimizer={"use": "core.sgd", "lr": 0.01})
    return plan | ({"parallel": {"sp": 2, "dp": 1}, "sequence": sequence} if sequence else {}) | changes
